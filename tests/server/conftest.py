"""One server of the shipped model for all tests of this folder."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

MISSING = [name for name in ("fastapi", "uvicorn", "httpx", "openai", "multipart") if find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []


@pytest.fixture(scope="session")
def tiny():
    """Serve the shipped model: (URL, Server)."""
    from http_server import TINY, serving

    with serving(TINY, "tiny-vl", max_model_len=1024) as served:
        yield served


@pytest.fixture(scope="session")
def tiny_asr():
    """Serve the shipped speech model: (URL, Server)."""
    from http_server import TINY, serving

    with serving(TINY.parent / "tiny-asr", "tiny-asr") as served:
        yield served


@pytest.fixture(scope="session")
def http(tiny):
    import httpx

    with httpx.Client(base_url=tiny[0], timeout=240) as client:
        yield client


@pytest.fixture(scope="session")
def client(tiny):
    from http_server import openai_client

    with openai_client(tiny[0]) as client:
        yield client


@pytest.fixture(scope="session")
def tools(tiny):
    """Serve the shipped model with a template that takes tools: (client of openai, Server)."""
    from http_server import TINY, openai_client, serving

    template = tiny[1].engine.tokenizer.chat_template
    template = "{% if tools %}{{ tools | tojson }}{{ '<tool_call>' }}{% endif %}" + template
    with serving(TINY, "tiny-vl", max_model_len=1024, chat_template=template) as (url, server), openai_client(url) as client:
        yield client, server
