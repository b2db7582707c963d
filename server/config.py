"""Options of the server, from a YAML file and from flags."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ..mm.errors import ConfigError, hint, short_repr
from .parsers.answer import PARSERS

ENGINE_DEFAULTS: Mapping[str, Any] = {"engine_process": True, "media": {"decode_isolation": "process"}}
"""Options of LLM whose default differs in the server, because its requests come from strangers."""
_COUNTS = (
    "max_connections",
    "max_body_bytes",
    "max_total_body_bytes",
    "max_requests",
    "batch_requests",
    "max_file_bytes",
    "max_files",
    "max_stored_bytes",
    "max_realtime_sessions",
)
_SECONDS = ("header_seconds", "body_seconds", "send_seconds", "drain_seconds", "realtime_idle_seconds")
_TEXTS = ("host", "served_model_name", "tls_cert", "tls_key", "data_dir")


@dataclass(frozen=True)
class ServerConfig:
    """Options of `sensorium serve` besides those of `LLM`.

    Args:
        host: address to listen on. The default takes connections of this machine only.
        port: TCP port; 0 lets the system choose one.
        api_key: a key, or a list of keys, one of which each request must have as `Authorization: Bearer KEY`. Requests with
            different keys share no cache. None takes requests without a key.
        served_model_name: name in responses and `/v1/models`. None is the model's name on the Hub or its folder's name.
        tls_cert, tls_key: files of the certificate chain and of its key, for HTTPS.
        max_connections: maximum number of open connections; further ones get the status 503 and are closed.
        header_seconds: maximum time until a TLS handshake is complete, until a request's header has arrived, and until the
            next request on an open connection; then the connection is closed.
        max_body_bytes: maximum size of a request's body.
        max_total_body_bytes: maximum size of the bodies of all requests in progress, lines of batches included; further
            requests get the status 429. Lines take at most half of it, and further ones wait.
        body_seconds: maximum time until a request's body has arrived.
        send_seconds: how long a client may read nothing of its response; then it is disconnected.
        max_requests: maximum number of requests in progress; further ones get the status 429.
        drain_seconds: how long requests in progress may go on after SIGTERM.
        data_dir: folder of files and batches. With None, requests to /v1/files and /v1/batches are refused.
        batch_requests: maximum number of requests of batches in progress. They have a lower priority than requests of clients.
        max_file_bytes: maximum size of an uploaded file.
        max_files: maximum number of files of one key; a batch in progress counts as its two files.
        max_stored_bytes: maximum size of all files of one key and of the results of its batches.
        max_realtime_sessions: maximum number of open sessions of /v1/realtime; further ones get the status 429.
        realtime_idle_seconds: how long a session may send nothing; then it is closed.
        tool_call_parser: how the model writes tool calls: "auto" (found in its chat template), "none", or a name of
            `parsers.answer.PARSERS`.
        reasoning_parser: "auto" splits reasoning from answers if the chat template has its markers; "none" does
            not.

    Raises:
        ConfigError: a value has a wrong type or is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | Sequence[str] | None = None
    served_model_name: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    max_connections: int = 2048
    header_seconds: float = 20.0
    max_body_bytes: int = 256 << 20
    max_total_body_bytes: int = 4 << 30
    body_seconds: float = 300.0
    send_seconds: float = 60.0
    max_requests: int = 1024
    drain_seconds: float = 30.0
    data_dir: str | None = None
    batch_requests: int = 8
    max_file_bytes: int = 200 << 20
    max_files: int = 10_000
    max_stored_bytes: int = 16 << 30
    max_realtime_sessions: int = 64
    realtime_idle_seconds: float = 300.0
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"

    def __post_init__(self) -> None:
        for name in _TEXTS:
            value = getattr(self, name)
            if not (value is None and name != "host") and not (isinstance(value, str) and value):
                raise _error(name, value, "must be a non-empty string")
        if not _is_integer(self.port) or not 0 <= self.port <= 65535:
            raise _error("port", self.port, "must be an integer from 0 to 65535")
        for name in _COUNTS:
            value = getattr(self, name)
            if not _is_integer(value) or value < 1:
                raise _error(name, value, "must be an integer, 1 or above")
        for name in _SECONDS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise _error(name, value, "must be a number of seconds above 0")
        for name, known in ("tool_call_parser", PARSERS), ("reasoning_parser", ("auto", "none")):
            if getattr(self, name) not in known:
                raise _error(name, getattr(self, name), f"must be one of {', '.join(known)}")
        if not all(isinstance(key, str) and key for key in self.keys):
            raise ConfigError("api_key must be a non-empty string, or a list of them", param="api_key")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together; give both", param="tls_cert")

    @property
    def keys(self) -> Sequence[str]:
        """The keys as a list."""
        given = self.api_key
        return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]  # type: ignore[list-item]


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address, without a port, is this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the options in a YAML file: those of ServerConfig and of LLM, and `model`. Dashes in names become underscores.

    Raises:
        ConfigError: the file cannot be read or is not a mapping.
    """
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--config {path} cannot be read: {reason}", param="config") from None
    if found is not None and not (isinstance(found, dict) and all(isinstance(name, str) for name in found)):
        raise ConfigError(f"--config {path} must hold options as NAME: VALUE, not {short_repr(found)}", param="config")
    return {name.replace("-", "_"): value for name, value in (found or {}).items()}


_OF_LLM = {"chat_template", "metrics", "tracing"}
"""Arguments of LLM beside the options of EngineConfig."""


def split_options(options: Mapping[str, Any]) -> tuple[ServerConfig, dict[str, Any]]:
    """Return the server's options, and those of LLM with the server's own defaults. Raise ConfigError for an unknown option."""
    from ..engine.config import EngineConfig
    from ..engine.vllm_args import NAMES

    names = {field.name for field in dataclasses.fields(ServerConfig)}
    known = sorted(names | {field.name for field in dataclasses.fields(EngineConfig)} | _OF_LLM)
    for name in options:
        if name not in known and name not in NAMES:
            raise ConfigError(f"unknown option {short_repr(name)}; {hint(name, known, NAMES)}", param=name)
    engine = {name: value for name, value in options.items() if name not in names}
    for name, default in ENGINE_DEFAULTS.items():
        given = engine.setdefault(name, default)
        if isinstance(given, Mapping):
            engine[name] = {**default, **given}
    return ServerConfig(**{name: value for name, value in options.items() if name in names}), engine


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _error(name: str, value: object, reason: str) -> ConfigError:
    return ConfigError(f"{name}={short_repr(value)} {reason}", param=name)
