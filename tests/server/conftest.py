"""One server of the shipped model for all tests of this folder."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

MISSING = [name for name in ("fastapi", "uvicorn", "httpx", "openai", "multipart") if find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []


@pytest.fixture(scope="session")
def tiny():
    """Serve the shipped model: (URL, Server)."""
    from http_server import TINY, listening, make_server

    server = make_server(TINY, "tiny-vl", max_model_len=1024, max_num_seqs=4, warm_up=False)
    with server.engine.llm, listening(server) as url:
        yield url, server


@pytest.fixture(scope="session")
def http(tiny):
    import httpx

    with httpx.Client(base_url=tiny[0], timeout=240) as client:
        yield client


@pytest.fixture(scope="session")
def client(tiny):
    import openai

    with openai.OpenAI(base_url=f"{tiny[0]}/v1", api_key="none", max_retries=0, timeout=240) as client:
        yield client


@pytest.fixture(scope="session")
def tools(tiny):
    """Serve the shipped model with a template that takes tools: (client of openai, Server)."""
    import openai
    from http_server import TINY, listening, make_server

    template = tiny[1].engine.llm.get_tokenizer().chat_template
    template = "{% if tools %}{{ tools | tojson }}{{ '<tool_call>' }}{% endif %}" + template
    server = make_server(TINY, "tiny-vl", max_model_len=1024, max_num_seqs=4, warm_up=False, chat_template=template)
    with server.engine.llm, listening(server) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        yield client, server
