"""One replica of a model on Ray Serve: an engine, and the application of `sensorium serve` around it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, MutableMapping
from contextlib import AsyncExitStack
from typing import Any

from ..app import make_app
from ..config import split_options
from ..run import load_one_model
from .bridge import Start, run_app


class Replica:
    """The deployment of a model. Ray calls its methods in one event loop.

    Args:
        model: folder of a checkpoint, a GGUF file, or a name on the Hub.
        options: those of ServerConfig and of LLM.
    """

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        from prometheus_client import CollectorRegistry

        config, engine_options = split_options(options)
        self._services = load_one_model(model, config, engine_options, CollectorRegistry())
        self._app = make_app(self._services)
        self._lifespan: AsyncExitStack | None = None

    async def respond(
        self, key: str | None, scope: MutableMapping[str, Any], body: bytes
    ) -> AsyncGenerator[tuple[int, list[tuple[bytes, bytes]]] | bytes, None]:
        """Yield the status and the headers of a request's response, then its bytes.

        Args:
            key: has chosen this replica (see `router`).
            scope: see `bridge.message_of`.
        """
        if self._lifespan is None:
            self._lifespan = AsyncExitStack()
            await self._lifespan.enter_async_context(self._app.router.lifespan_context(self._app))
        parts = run_app(self._app, scope, body)
        try:
            async for part in parts:
                yield (part.status, part.headers) if isinstance(part, Start) else part
        finally:
            await parts.aclose()

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine's process has died for good: Ray replaces the replica."""
        for server in self._services.pool.loaded:
            await server.llm.check_health()

    def close(self) -> None:
        """End the engine."""
        for server in self._services.pool.loaded:
            server.engine.close()

    def __del__(self) -> None:  # the last thing that Ray calls, after the requests in progress
        if hasattr(self, "_services"):
            self.close()
