"""Loads a model and serves it until a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Mapping
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

from ..engine.errors import error_text
from ..mm.errors import ConfigError
from ..pipelines.llm import AsyncLLM
from .config import ServerConfig, is_loopback, split_options

_log = logging.getLogger(__name__)
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
    """
    try:
        import uvicorn
        from prometheus_client import CollectorRegistry

        from .app import make_app
        from .connections import connection_class
        from .endpoints.realtime import MAX_MESSAGE_BYTES
        from .state import Server
        from .store import Store
    except ImportError as error:
        raise ConfigError(f"the server needs more packages ({error}); pip install 'sensorium[serve]'") from None
    key = os.environ.get("SENSORIUM_API_KEY")
    config, engine_options = split_options({"api_key": key, **options} if key else options)
    model = engine_options.pop("model", None)
    if model is None:
        raise ConfigError(
            "there is no model to serve; give a folder or a name on the Hub, as in `sensorium serve MODEL`", param="model"
        )
    check_certificate(config)
    listener = bind(config)
    sys.setswitchinterval(_SWITCH_SECONDS)
    if not config.keys and not is_loopback(config.host):
        _log.warning("requests from %s need no key; give --api-key, or listen on 127.0.0.1", config.host)
    registry = CollectorRegistry()
    with listener, nullcontext() if config.data_dir is None else closing(Store(config)) as store:
        engine = AsyncLLM(model, config.max_requests, **{"metrics": registry, **engine_options})
        try:
            name = config.served_model_name or model_name(model)
            server = uvicorn.Server(
                uvicorn.Config(
                    make_app(Server(engine, config, name, registry, store=store)),
                    log_level="warning",
                    http=connection_class(config),
                    ws_max_size=MAX_MESSAGE_BYTES,
                    ws_per_message_deflate=False,
                    # longer than clients keep idle connections (httpx: 5 s), or one is closed while a request is sent on it
                    timeout_keep_alive=round(config.header_seconds) or 1,
                    server_header=False,
                    ssl_certfile=config.tls_cert,
                    ssl_keyfile=config.tls_key,
                    timeout_graceful_shutdown=round(config.drain_seconds) or 1,
                )
            )
            listener.listen()
            scheme = "http" if config.tls_cert is None else "https"
            print(f"{name} is served on {scheme}://{_address(listener)}", file=sys.stderr, flush=True)
            asyncio.run(_run(server, listener, config))
        finally:
            engine.close()


def model_name(model: str | os.PathLike[str]) -> str:
    """Return a model's name in responses: its name on the Hub, or the name of its folder, without the folders above."""
    return os.path.basename(os.path.abspath(model)) if os.path.exists(model) else os.fspath(model)


async def _run(server: Any, listener: socket.socket, config: ServerConfig) -> None:
    """Serve until a signal. The signal is ours, not uvicorn's, so that the engine is closed after the last response."""
    loop: Any = asyncio.get_running_loop()
    if config.tls_cert is not None:  # uvicorn has no option for it; asyncio's default is 60 s
        loop.create_server = partial(loop.create_server, ssl_handshake_timeout=config.header_seconds)
    server.capture_signals = nullcontext
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.handle_exit, number, None)
    await server.serve(sockets=[listener])


def check_certificate(config: ServerConfig) -> None:
    """Raise ConfigError if the certificate cannot be used, before the model is loaded."""
    if config.tls_cert is None:
        return
    try:
        no_password = bytes  # else OpenSSL asks for one on the terminal
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key, no_password)
    except OSError as error:  # ssl.SSLError is one
        reason = f"tls_cert={config.tls_cert} and tls_key={config.tls_key} cannot be used ({error.strerror or error})"
        raise ConfigError(f"{reason}; give a chain and its key in PEM, without a password", param="tls_cert") from None


def bind(config: ServerConfig) -> socket.socket:
    """Return a socket that has the port, and does not listen yet. A port in use is found before the model is loaded."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets whose protocol is named; without it, an answer waits 40 ms for a delayed ACK
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        reason = f"{config.host}, port {config.port} cannot be used ({error_text(error)}); choose another host or port"
        raise ConfigError(reason, param="port") from None
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
