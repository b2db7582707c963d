"""The server of a model on a free port of this machine, in a thread."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing, closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry
from sensorium import AsyncLLM
from sensorium.engine.llm import LLM
from sensorium.server.app import make_app
from sensorium.server.config import ServerConfig
from sensorium.server.connections import LimitedConnection, connection_class
from sensorium.server.loader import make_services
from sensorium.server.state import Server, Services
from sensorium.server.store import Store
from waiting import wait_until

TINY = Path(__file__).parents[2] / "assets" / "tiny-vl"
MEDIA = TINY.parent / "media"
CASES = {name: case for name, case in json.loads((MEDIA / "answers.json").read_text()).items() if name.endswith("png")}
"""The shipped images, each with its prompt and answer."""
IMAGE = min(CASES, key=lambda name: (MEDIA / name).stat().st_size)


def make_server(model: Any, name: str, config: ServerConfig | None = None, **options: Any) -> Server:
    """Return a server without a network. `model`: a checkpoint or an LLM; `options`: of LLM."""
    registry = CollectorRegistry()
    engine = AsyncLLM(model) if isinstance(model, LLM) else AsyncLLM(model, metrics=registry, **options)
    return Server(engine, config or ServerConfig(), name, registry)


def image_url(name: str = IMAGE) -> str:
    """Return a shipped image as a data: URL."""
    return f"data:image/png;base64,{base64.b64encode((MEDIA / name).read_bytes()).decode()}"


def error(response: Any, status: int = 400) -> Any:
    """Return the error of a response with this status."""
    assert response.status_code == status, response.text
    return response.json()["error"]


def openai_client(url: str) -> Any:
    """Return a client of the openai package that tries once."""
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240)


@contextmanager
def serving(model: Any, name: str, **options: Any) -> Iterator[tuple[str, Server]]:
    """Serve a model while the context lasts: (URL, Server). `options`: of LLM."""
    server = make_server(model, name, **{"max_num_seqs": 4, "warm_up": False, **options})
    with server.llm.llm, listening(server) as url:
        yield url, server


@contextmanager
def serving_models(config: ServerConfig, **options: Any) -> Iterator[tuple[str, Services]]:
    """Serve the models of the configuration while the context lasts: (URL, Services). `options`: of LLM, for all models."""
    defaults = {"max_num_seqs": 4, "max_model_len": 256, "warm_up": False, **options}
    stored = nullcontext() if config.data_dir is None else closing(Store(config))
    with stored as store:
        services = make_services(config, defaults, CollectorRegistry(), store)
        try:
            with listening(services) as url:
                yield url, services
        finally:
            for server in services.pool.loaded:
                server.engine.close()


@contextmanager
def listening(served: Server | Services, http: type[LimitedConnection] | None = None) -> Iterator[str]:
    """Serve on a free port, and yield the URL. `http`: the protocol, if it is another one than the configuration's."""
    services = served.services if isinstance(served, Server) else served
    options: dict[str, Any] = {"http": http or connection_class(services.config), "log_level": "error"}
    running = uvicorn.Server(uvicorn.Config(make_app(services), host="127.0.0.1", port=0, **options))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: running.started)
        yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join()


def saying(generate: Callable[..., Any], text: str) -> Callable[..., Any]:
    """Return `AsyncLLM.generate` of a model whose answers are `text`, in chunks if deltas are requested.

    Requests must have tools.
    """

    async def say(messages: Any, params: Any, request_id: str, kind: str, priority: int, **options: Any) -> Any:
        assert options["tools"]
        async with aclosing(generate(messages, params, request_id, "final", priority, **options)) as outputs:
            output = await anext(outputs)
        cuts = [*range(0, len(text), 7), len(text)] if kind == "delta" else [0, len(text)]
        for start, end in pairwise(cuts):
            reason = "stop" if end == len(text) else None
            answer = replace(output.outputs[0], text=text[start:end], finish_reason=reason)
            yield replace(output, outputs=[answer], finished=reason is not None)

    return say
