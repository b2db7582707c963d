"""Loads a model and serves it until a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

from ..callers.errors import ConfigError, EngineDeadError, SensoriumError, short_repr
from ..callers.garbage import freeze_loaded
from ..pipelines.llm import AsyncLLM
from .config import SEND_SECONDS, ServerConfig, environment_options, is_loopback, split_options
from .listeners import address, bind, bind_metrics
from .logs import json_line, logging_to_stderr
from .tracing import loading_span, make_provider

if TYPE_CHECKING:
    from .state import Services
    from .store import Store

_log = logging.getLogger(__name__)
_MULTI_MODEL_OPTIONS = ("max_models_bytes", "model_idle_seconds", "model_wait_seconds", "model_queue")
"""Options that say how several models share the memory of the machine."""
_SWITCH_SECONDS = 0.0005
"""How long a thread keeps the interpreter while the event loop waits for it. With Python's 5 ms, /health waits for parsers,
media workers and the engine's loop in turn."""


def serve(options: Mapping[str, Any]) -> None:
    """Serve a model until SIGINT or SIGTERM, which let requests in progress finish.

    Args:
        options: those of ServerConfig and of LLM, and `model`.

    Raises:
        ConfigError: an option is wrong, the port cannot be used, or a package is missing.
        CheckpointError, HubError: see `LLM`.
        EngineDeadError: the engine's process has died too often; see `exit_on_engine_death`.
        SensoriumError: the application did not start.
    """
    try:
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401

        from . import app, store  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"the server needs more packages ({error}); pip install 'sensorium[serve]'") from None
    options = {**environment_options(os.environ), **options}
    config, engine_options = split_options(options)
    model = engine_options.pop("model", None)
    if model is not None and config.models is not None:
        raise ConfigError(f"both {short_repr(model)} and <<models>> name models; give one of them", param="model")
    if model is None and config.models is None:
        raise ConfigError(
            "there is no model to serve; give a folder or a name on the Hub, as in `sensorium serve MODEL`", param="model"
        )
    for name in _MULTI_MODEL_OPTIONS:
        if config.models is None and options.get(name) is not None:
            raise ConfigError("<<param>> is for several models; list them as <<models>>, or leave it out", param=name)
    with logging_to_stderr(config):
        _load_and_serve(model, config, engine_options)


def _load_and_serve(model: str | os.PathLike[str] | None, config: ServerConfig, engine_options: dict[str, Any]) -> None:
    """Load a model, or with None the configured ones, and serve until a signal."""
    from prometheus_client import CollectorRegistry

    from .loader import make_services
    from .store import Store

    check_certificate(config)
    listener, metrics_listener = bind(config), bind_metrics(config)
    sys.setswitchinterval(_SWITCH_SECONDS)
    if not config.keys and config.uds is None and not is_loopback(config.host):
        _log.warning("requests from %s need no key; give --api-key, or listen on 127.0.0.1", config.host)
    registry = CollectorRegistry()
    stored = nullcontext() if config.data_dir is None else closing(Store(config))
    with listener, metrics_listener or nullcontext(), stored as store:
        names = [entry.names[0] for entry in config.models or ()] if model is None else [_name(model, config)]
        endpoint = config.otlp_traces_endpoint
        provider = None if endpoint is None else make_provider(endpoint, ", ".join(names))
        services = None
        try:
            if model is None:
                services = make_services(config, engine_options, registry, store, provider)
            else:
                services = load_one_model(model, config, engine_options, registry, store, provider)
            listener.listen()
            _announce(names, listener, config)
            asyncio.run(_run(services, listener, metrics_listener))
            deaths = [server.engine.loop.num_deaths for server in services.pool.loaded if server.llm.errored]
            if deaths and config.exit_on_engine_death:
                raise EngineDeadError(f"the engine's process has died too often (times since the start: {deaths[0]})")
        finally:
            for server in () if services is None else services.pool.loaded:
                server.engine.close()
            if provider is not None:
                provider.shutdown()  # sends the last spans


def load_one_model(
    model: str | os.PathLike[str],
    config: ServerConfig,
    engine_options: dict[str, Any],
    registry: Any,
    store: Store | None = None,
    provider: Any = None,
) -> Services:
    """Load the only model of a server. `registry`, `store`: see `Services`. `provider`: the TracerProvider, or None.

    Raises:
        ConfigError: an option is wrong.
        CheckpointError, HubError: see `LLM`.
    """
    from .state import Server

    with loading_span(provider):
        tracing = {} if provider is None else {"tracing": provider}
        engine = AsyncLLM(model, config.max_requests, **{"metrics": registry, **tracing, **engine_options})
    server = Server(engine, config, _name(model, config), registry, store=store)
    try:
        for name in {*server.names} & config.adapters.keys():
            raise ConfigError(f"<<param=>>{short_repr(name)} is the name of the model; choose another one", param="adapters")
        server.load_adapters(server.services.pool.models[0].adapters)
    except BaseException:
        engine.close()
        raise
    return server.services


def _name(model: str | os.PathLike[str], config: ServerConfig) -> str:
    return next(iter(config.served_names), model_name(model))


def _announce(names: Sequence[str], listener: socket.socket, config: ServerConfig) -> None:
    """Say that the server takes requests: scripts wait for this line, whatever the log's level is."""
    scheme = "http" if config.tls_cert is None else "https"
    where = f"{scheme}://{address(listener)}" if config.uds is None else f"the Unix socket {config.uds}"
    _say(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} served on {where}", config)


def _say(text: str, config: ServerConfig) -> None:
    """Write a line to stderr, unless its reader has gone: that must not keep the server from stopping."""
    with suppress(OSError):
        print(json_line(text) if config.log_format == "json" else text, file=sys.stderr, flush=True)


def model_name(model: str | os.PathLike[str]) -> str:
    """Return a model's name in responses: its name on the Hub, or the name of its folder, without the folders above."""
    return os.path.basename(os.path.abspath(model)) if os.path.exists(model) else os.fspath(model)


async def _run(services: Services, listener: socket.socket, metrics_listener: socket.socket | None) -> None:
    """Serve until a signal or the engine's end. The signal is ours, not uvicorn's, so that the engine is closed after the last
    response."""
    loop: Any = asyncio.get_running_loop()
    config = services.config
    freeze_loaded()
    http = _http_server(services)
    if config.tls_cert is not None:  # uvicorn has no option for it; asyncio's default is 60 s
        loop.create_server = partial(loop.create_server, ssl_handshake_timeout=config.header_seconds)
    http.capture_signals = nullcontext

    def stop(number: int) -> None:
        _stop(http, number, config)
        loop.call_later(config.drain_seconds, services.draining.expire)

    def stop_without_engine() -> None:
        with suppress(RuntimeError):  # the event loop has ended before
            loop.call_soon_threadsafe(stop, signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    if config.exit_on_engine_death:
        services.on_engine_death = stop_without_engine
        for server in services.pool.loaded:
            server.engine.loop.when_dead(stop_without_engine)
    if metrics_listener is None:
        await _serve(http, listener)
        return
    metrics_listener.listen()
    metrics = _metrics_server(services)
    serving = asyncio.ensure_future(metrics.serve(sockets=[metrics_listener]))
    try:
        await _serve(http, listener)
    finally:
        metrics.should_exit = metrics.force_exit = True  # scrapes in progress are not waited for
        await serving


async def _serve(http: Any, listener: socket.socket) -> None:
    """Serve until the end. Raise SensoriumError if the application has not started.

    Then uvicorn logs why, and either returns or raises SystemExit: that depends on its version.
    """
    with suppress(SystemExit):
        await http.serve(sockets=[listener])
    if not http.started:
        raise SensoriumError("the server did not start; the log says why", code="internal")


def _metrics_server(services: Services) -> Any:
    """Return uvicorn's server of /metrics alone, which needs no key."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.routing import Route

    from .connections import connection_class
    from .endpoints.status import metrics

    app = Starlette(routes=[Route("/metrics", metrics)])
    app.state.services = services
    http = connection_class(services.config, services.count_malformed)
    config = uvicorn.Config(app, log_config=None, log_level="warning", http=http, server_header=False, lifespan="off")
    metrics_server: Any = uvicorn.Server(config)
    metrics_server.capture_signals = nullcontext
    return metrics_server


def _http_server(services: Services) -> Any:
    """Return uvicorn's server of the application."""
    import uvicorn

    from .app import make_app
    from .connections import connection_class
    from .endpoints.realtime import MAX_MESSAGE_BYTES

    config = services.config
    return uvicorn.Server(
        uvicorn.Config(
            make_app(services),
            log_config=None,
            log_level="warning",
            http=connection_class(config, services.count_malformed),
            ws_max_size=MAX_MESSAGE_BYTES,
            ws_per_message_deflate=False,
            # longer than clients keep idle connections (httpx: 5 s), or one is closed while a request is sent on it
            timeout_keep_alive=round(config.header_seconds) or 1,
            server_header=False,
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
            timeout_graceful_shutdown=ceil(config.drain_seconds) + SEND_SECONDS,
        )
    )


def _stop(server: Any, number: int, config: ServerConfig) -> None:
    """Stop at a signal. A second SIGINT does not wait for requests in progress."""
    if not server.should_exit:
        _say(f"stopping; requests in progress have {config.drain_seconds:g} s", config)
    server.handle_exit(number, None)


def check_certificate(config: ServerConfig) -> None:
    """Raise ConfigError if the certificate cannot be used, before the model is loaded."""
    if config.tls_cert is None:
        return
    try:
        no_password = bytes  # else OpenSSL asks for one on the terminal
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key, no_password)
    except OSError as error:  # ssl.SSLError is one
        reason = f"<<param=>>{config.tls_cert} and <<tls_key=>>{config.tls_key} cannot be used ({error.strerror or error})"
        raise ConfigError(f"{reason}; give a chain and its key in PEM, without a password", param="tls_cert") from None
