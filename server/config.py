"""Options of the server, from a YAML file and from flags."""

from __future__ import annotations

import dataclasses
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ..callers.errors import ConfigError, hint, short_repr
from .adapter_entries import AdapterFolders, read_adapters
from .model_entries import PARSERS_OF_MODEL, ModelEntry, read_entries
from .parsers.answer import PARSERS, REASONING_PARSER_NAMES
from .parsers.vllm_names import UNREAD

ENGINE_DEFAULTS: Mapping[str, Any] = {"engine_process": True, "engine_standby": True, "media": {"decode_isolation": "process"}}
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
    "max_document_pages",
    "max_document_characters",
    "model_queue",
)
_SECONDS = ("header_seconds", "body_seconds", "send_seconds", "drain_seconds", "realtime_idle_seconds", "model_wait_seconds")
_ORIGIN = re.compile(r"https?://[^/?#@\s*,]+")  # as browsers send it: without a path or a slash at its end
_SERVICE_PORT = re.compile(r"(tcp|udp|sctp)://")
_ROOT_PATH = re.compile(r"(/[\w.~-]+)+/?")
_OWN_PATHS = ("v1", "api", "page")
_ROLES = {"encoder": ("encoder", "encoder_listen"), "language": ("decoder", "encoder")}  # `parts`, and an option it needs
_LEVELS = ("debug", "info", "warning", "error", "critical")
_TEXTS = ("host", "uds", "admin_key", "otlp_traces_endpoint", "tls_cert", "tls_key", "data_dir", "speaker_model")
SEND_SECONDS = 2
"""How long clients have to read the error that ends their request at the time limit of a shutdown."""


@dataclass(frozen=True)
class ServerConfig:
    """Options of `sensorium serve` besides those of `LLM`.

    Args:
        host: address to listen on. The default takes connections of this machine only.
        port: TCP port; 0 lets the system choose one.
        uds: path of a Unix domain socket to listen on instead of host and port. Only this user may connect; a proxy of another
            user needs the permissions of the socket changed.
        api_key: a key, or a list of keys, one of which each request must have as `Authorization: Bearer KEY`. Requests with
            different keys share no cache. None takes requests without a key.
        metrics_port: TCP port, at the same host, of /metrics alone, which needs no key there. None: there is no such port.
        root_path: path below which the server's paths stand for clients, such as /vision, if a proxy passes it on.
        admin_key: key of /sleep, /wake_up, /is_sleeping, /update_weights, /reset_prefix_cache, /reset_mm_cache, /load,
            /v1/media/encode, /v1/load_lora_adapter and /v1/unload_lora_adapter. Without it, the server has none of them.
        allowed_origins: an origin, or a list of them, such as `https://app.example`, whose pages may use this server from a
            browser (CORS). The key, if there is one, is still needed.
        served_model_name: a name, or a list of names, that requests may give; the first one is in responses. None is the
            model's name on the Hub or its folder's name.
        models: several models, each with `name`, `path`, `options` of LLM, `preload` and `adapters`. They are loaded when a
            request names them. None: the server has one model.
        adapters: LoRA adapters that requests may name instead of the model: an object of names and folders, or NAME=FOLDER.
        max_models_bytes: maximum memory of all models that are loaded, as their memory plans say; those that were not used for
            the longest time are unloaded. None is the memory of the machine, or of the first model's GPU.
        model_idle_seconds: time without requests after which one of several models is put to sleep until the next one. None:
            it stays awake.
        model_wait_seconds: how long a request waits until models with requests make room for its model; then it gets the
            status 503.
        model_queue: maximum number of requests that wait for their model; further ones get the status 503.
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
        data_dir: folder of files, batches and stored responses. With None, requests to /v1/files and /v1/batches are refused.
        batch_requests: maximum number of requests of batches in progress. They have a lower priority than requests of clients.
        max_file_bytes: maximum size of an uploaded file.
        max_files: maximum number of files of one key; a batch in progress counts as its two files.
        max_stored_bytes: maximum size of all files and stored responses of one key and of the results of its batches.
        max_realtime_sessions: maximum number of open sessions of /v1/realtime; further ones get the status 429.
        realtime_idle_seconds: how long a session may send nothing; then it is closed.
        max_document_pages: maximum number of pages of a document that is sent to /v1/documents.
        max_document_characters: maximum number of characters of the text layers of such a document, in which a line counts as
            at least 32; further pages have an error.
        speaker_model: folder of the networks that tell speakers apart (docs/speech.md). None: those in the packages whisperx
            and resemblyzer.
        tool_call_parser: how the model writes tool calls: "auto" (found in its chat template, or else by its
            architecture), "none", or a name of `parsers.answer.PARSERS`.
        reasoning_parser: how the model writes its reasoning: "auto" (found in its chat template, or else by its
            architecture), "none" (it stays in the text), or a name of `parsers.answer.REASONING_PARSER_NAMES`.
        role: "all"; "encoder", for a server that only encodes the items of others (`parts="encoder"` with `encoder_listen`); or
            "language", for one whose items are encoded by others (`parts="decoder"` with `encoder`).
        exit_on_engine_death: end with exit code 1 when the engine's process has died more than `engine_restarts` times, so
            that systemd or Docker starts the server again. Otherwise it answers 503.
        log_level: the least severe records that the log has: debug, info, warning, error or critical.
        log_format: "text", or "json" for one object on each line.
        access_log: log a line for each request.
        otlp_traces_endpoint: URL of an OpenTelemetry collector, such as http://localhost:4318/v1/traces, that gets a span for
            each request and for loading. A request with the header `traceparent` belongs to its client's trace.
        allow_unknown_fields: leave out the unknown fields of bodies and count them; otherwise such requests are refused.

    Raises:
        ConfigError: a value has a wrong type or is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    metrics_port: int | None = None
    root_path: str | None = None
    api_key: str | Sequence[str] | None = None
    admin_key: str | None = None
    allowed_origins: str | Sequence[str] | None = None
    served_model_name: str | Sequence[str] | None = None
    models: Sequence[ModelEntry] | None = None
    adapters: AdapterFolders = dataclasses.field(default_factory=dict)
    max_models_bytes: int | None = None
    model_idle_seconds: float | None = None
    model_wait_seconds: float = 60.0
    model_queue: int = 256
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
    max_document_pages: int = 500
    max_document_characters: int = 5_000_000
    speaker_model: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    role: str = "all"
    exit_on_engine_death: bool = True
    log_level: str = "info"
    log_format: str = "text"
    access_log: bool = True
    otlp_traces_endpoint: str | None = None
    allow_unknown_fields: bool = False

    def __post_init__(self) -> None:
        for name in _TEXTS:
            value = getattr(self, name)
            if not (value is None and name != "host") and not (isinstance(value, str) and value):
                raise _error(name, value, "must be a non-empty string")
        for name in ("port", "metrics_port"):
            value = getattr(self, name)
            if not (value is None and name == "metrics_port") and (not _is_integer(value) or not 0 <= value <= 65535):
                raise _error(name, value, "must be an integer from 0 to 65535")
        for name in (*_COUNTS, "max_models_bytes"):
            value = getattr(self, name)
            if not (value is None and name == "max_models_bytes") and (not _is_integer(value) or value < 1):
                raise _error(name, value, "must be an integer, 1 or above")
        for name in (*_SECONDS, "model_idle_seconds"):
            value = getattr(self, name)
            if value is None and name == "model_idle_seconds":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise _error(name, value, "must be a number of seconds above 0")
        for name, valid in ("tool_call_parser", PARSERS), ("reasoning_parser", REASONING_PARSER_NAMES):
            value = getattr(self, name)
            if value in UNREAD:
                reason = "is a parser of vLLM for a format that is not read here; give 'none' to get the text as it is"
                raise ConfigError(f"<<param=>>{value!r} {reason}", code="unsupported", param=name, value=value)
            if value not in valid:
                raise _error(name, value, f"is no parser; {hint(value, valid)}")
        for name, valid in ("log_level", _LEVELS), ("log_format", ("text", "json")), ("role", ("all", *_ROLES)):
            value = getattr(self, name)
            if value not in valid:
                raise _error(name, value, f"must be one of {', '.join(valid)}")
        for name in ("exit_on_engine_death", "access_log", "allow_unknown_fields"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise _error(name, value, "must be true or false")
        object.__setattr__(self, "adapters", read_adapters(self.adapters))
        if self.models is not None:
            if self.adapters:
                raise _error("adapters", self.adapters, "must be left out; each of models has its own")
            object.__setattr__(self, "models", read_entries(self.models))
            if self.served_model_name is not None:
                raise _error("served_model_name", self.served_model_name, "must be left out; each of models has its own name")
        self._check_keys()
        if self.metrics_port and self.metrics_port == self.port and self.uds is None:
            raise _error("metrics_port", self.metrics_port, "is the port of the server; choose another one, or leave it out")
        if self.root_path is not None and not (isinstance(self.root_path, str) and _ROOT_PATH.fullmatch(self.root_path)):
            raise _error("root_path", self.root_path, "must begin with a slash and hold a name, as in /vision")
        if self.root_path is not None and self.root_path.split("/")[1] in _OWN_PATHS:
            raise _error("root_path", self.root_path, "begins as a path of the server; choose another name")
        for name in self.served_names:
            if not (isinstance(name, str) and name):
                raise _error("served_model_name", self.served_model_name, "must be a non-empty string, or a list of them")
        for origin in self.origins:
            if not (isinstance(origin, str) and _ORIGIN.fullmatch(origin)):
                raise _error("allowed_origins", origin, "is no origin; give scheme and host, as in https://app.example:8443")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("<<param>> and <<tls_key>> belong together; give both", param="tls_cert")

    def _check_keys(self) -> None:
        if not all(isinstance(key, str) and key for key in self.keys):
            raise ConfigError("<<param>> must be a non-empty string, or a list of them", param="api_key")
        if self.admin_key in self.keys:
            raise ConfigError(
                "<<param>> is also an API key, which would open everything; choose another one", param="admin_key"
            )

    @property
    def keys(self) -> Sequence[str]:
        """The keys as a list."""
        return _as_list(self.api_key)

    @property
    def served_names(self) -> Sequence[str]:
        """The names of the model as a list; empty if none was given."""
        return _as_list(self.served_model_name)

    @property
    def origins(self) -> Sequence[str]:
        """The origins as a list."""
        return _as_list(self.allowed_origins)


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


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
        options = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--config {path} cannot be read: {reason}", param="config") from None
    if options is not None and not (isinstance(options, dict) and all(isinstance(name, str) for name in options)):
        raise ConfigError(f"--config {path} must hold options as NAME: VALUE, not {short_repr(options)}", param="config")
    return {name.replace("-", "_"): value for name, value in (options or {}).items()}


_OF_LLM = {"chat_template", "metrics", "tracing"}
"""Arguments of LLM beside the options of EngineConfig."""


def environment_options(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options in environment variables: SENSORIUM_ and the name in upper case. Values are written as those of flags.

    Raises:
        ConfigError: a value that begins like an object or a list is not JSON.
    """
    from ..engine.config import EngineConfig
    from ..engine.engine_args import parse_value

    as_text = {field.name for field in dataclasses.fields(ServerConfig) if "str" in str(field.type)} | {"model"}
    names = {field.name for kind in (ServerConfig, EngineConfig) for field in dataclasses.fields(kind)} | as_text
    names.add("chat_template")
    texts = {name: environment.get(f"SENSORIUM_{name.upper()}") for name in sorted(names - _READ_ELSEWHERE)}
    if _SERVICE_PORT.match(texts["port"] or ""):  # Kubernetes sets it for pods beside a service named sensorium
        texts["port"] = None
    options: dict[str, Any] = {}
    for name, text in texts.items():
        if text:
            try:
                options[name] = text if name in as_text else parse_value(text)
            except ArgumentTypeError as error:
                raise ConfigError(f"the environment variable SENSORIUM_{name.upper()}: {error}", param=name) from None
    return options


_READ_ELSEWHERE = {"kernels"}
"""Options whose environment variable the engine itself reads."""


def split_options(options: Mapping[str, Any]) -> tuple[ServerConfig, dict[str, Any]]:
    """Return the server's options, and those of LLM with the server's own defaults. Raise ConfigError for an unknown option."""
    names = {field.name for field in dataclasses.fields(ServerConfig)}
    _check_names(options, names)
    config = ServerConfig(**{name: value for name, value in options.items() if name in names})
    for index, entry in enumerate(config.models or ()):
        try:
            _check_names(entry.options, set(PARSERS_OF_MODEL))
        except ConfigError as error:
            raise ConfigError(f"models[{index}].options: {error}", param=f"models[{index}].options") from None
    engine_options = {name: value for name, value in options.items() if name not in names}
    return config, with_defaults(with_role(with_lora(engine_options, config.adapters), config))


def _check_names(options: Mapping[str, Any], further: Collection[str]) -> None:
    """Raise ConfigError for an option that is neither one of LLM nor one of these, or has no use in the server."""
    from ..engine.config import EngineConfig
    from ..engine.vllm_args import NAMES

    names = sorted({field.name for field in dataclasses.fields(EngineConfig)} | _OF_LLM | {*further})
    for name in options:
        if name not in names and name not in NAMES:
            raise ConfigError(f"unknown option {short_repr(name)}; {hint(name, names, NAMES)}", param=name)


def with_lora(options: Mapping[str, Any], adapters: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of LLM for a model with these adapters: with `enable_lora`, unless there are none."""
    return {"enable_lora": True, **options} if adapters else {**options}


def with_role(options: Mapping[str, Any], config: ServerConfig) -> dict[str, Any]:
    """Return the options of LLM for a server of this role.

    Raises:
        ConfigError: an option that the role needs is missing, or one contradicts it.
    """
    if config.role == "all":
        return {**options}
    parts, needed = _ROLES[config.role]
    if config.models is not None:
        raise _error(
            "role", config.role, "is for one model; set <<parts>> and <<encoder>> in the options of each of <<models>>"
        )
    if options.get(needed) is None:
        raise _error("role", config.role, f"needs <<{needed}>>")
    if options.get("parts") not in (None, parts):
        raise _error("role", config.role, f"means <<parts=>>{parts!r}; leave <<parts>> out")
    return {**options, "parts": parts}


def with_defaults(options: Mapping[str, Any], defaults: Mapping[str, Any] = ENGINE_DEFAULTS) -> dict[str, Any]:
    """Return the options of LLM that were given, with the defaults of the others.

    An option that is an object gets the defaults of its missing keys.
    """
    engine = {**defaults, **options}
    for name, default in defaults.items():
        if isinstance(default, Mapping) and isinstance(engine[name], Mapping):
            engine[name] = {**default, **engine[name]}
    return engine


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _error(name: str, value: object, reason: str) -> ConfigError:
    return ConfigError(f"<<param=>>{short_repr(value)} {reason}", param=name)
