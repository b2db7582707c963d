"""`Server`: a model, and `Services`: what all models share. All endpoints use them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from fastapi import Request, WebSocket
from starlette.requests import ClientDisconnect, HTTPConnection

from ..callers.errors import SensoriumError, short_repr
from ..callers.message_fields import check_messages, drop_unknown_fields
from ..engine.engine import Engine
from ..engine.model_files import load_model_files
from ..engine.outputs import RequestOutput
from ..mm.tenants import tenant_salt
from ..pipelines.llm import AsyncLLM
from ..pipelines.speech.options import Times
from .background import Background
from .config import ServerConfig
from .drain import Draining
from .errors import HttpError
from .guard import PRIORITY, TENANT, BodyBytes
from .http_metrics import HttpMetrics, register_engine
from .model_facts import ModelFacts, make_facts, transcript_times
from .model_pool import ModelPool
from .parsers.answer import AnswerFormat, answer_format
from .parsers.reasoning import mentions_reasoning
from .pooled_model import ModelLease, PooledAdapter, as_pooled
from .protocol.body import on_unknown_field
from .reasoning_signer import ReasoningSigner, stored_signer
from .request_record import current_record
from .shared_threads import SharedThreads
from .store import Store

if TYPE_CHECKING:
    from .batch_runner import BatchRunner

T = TypeVar("T")
LEASE = "sensorium.lease"
"""Key of a scope: the lease of the request's model, if the server has several."""
_log = logging.getLogger(__name__)
_TOKENISERS, _PLANNERS, _DOWNLOADERS = 4, 8, 8  # threads


@dataclass
class Services:
    """What all models of a server share.

    Args:
        registry: the CollectorRegistry of the metrics of HTTP requests, or None.
        store: files, batches and stored responses, or None without `data_dir`.
        pool: the models.
        created: time of the start.
        batches: the batches in progress, while the application runs with a store.
        background: the responses in the background.
    """

    config: ServerConfig
    pool: ModelPool[Server]
    registry: Any = None
    store: Store | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    batches: BatchRunner = field(init=False, repr=False)
    body_bytes: BodyBytes = field(default_factory=BodyBytes, repr=False)
    draining: Draining = field(default_factory=Draining, repr=False)
    background: Background = field(init=False, repr=False)
    realtime_sessions: int = 0  # open ones
    adapter_changes: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)  # one adapter is added or removed at a time
    on_engine_death: Callable[[], object] = lambda: None  # called in any thread, once an engine's process has died for good
    tokenisers: SharedThreads = field(default_factory=lambda: SharedThreads(_TOKENISERS, "tokenise"), repr=False)
    planners: SharedThreads = field(default_factory=lambda: SharedThreads(_PLANNERS, "plan"), repr=False)  # may download
    downloaders: SharedThreads = field(default_factory=lambda: SharedThreads(_DOWNLOADERS, "download"), repr=False)

    def __post_init__(self) -> None:
        self.background = Background(self.config.max_requests, self.draining, self.body_bytes, self.config.access_log)

    @cached_property
    def http_metrics(self) -> HttpMetrics | None:
        """Counts requests."""
        return None if self.registry is None else HttpMetrics(self.registry, self.default_label)

    @property
    def default_label(self) -> str:
        """The label `model_name` of metrics of no model: the only one, or none if there are several."""
        return self.pool.models[0].name if self.pool.is_fixed else ""

    @property
    def registries(self) -> list[tuple[Any, str]]:
        """The registries of all metrics, each with its label `model_name`."""
        servers = [] if self.pool.is_fixed else self.pool.loaded
        labelled = [(self.registry, self.default_label), *((server.registry, server.name) for server in servers)]
        return [(registry, name) for registry, name in labelled if registry is not None]

    def count_malformed(self) -> None:
        """Count a request that is not HTTP. The log has no line for it, because anyone can send many."""
        if self.http_metrics is not None:
            self.http_metrics.count_malformed()

    def is_full(self) -> bool:
        """Return whether the only model takes no more media. Of several, `with_model` asks the one that a request names."""
        return self.pool.is_fixed and any(server.engine.media_full for server in self.pool.loaded)

    @cached_property
    def reasoning_signer(self) -> ReasoningSigner:
        """Signs the reasoning that clients send back; its key lasts as long as the folder of files and batches."""
        return ReasoningSigner() if self.store is None else stored_signer(self.config.data_dir or "")


class Server:
    """One model and what endpoints need to know about it.

    Args:
        name: the model's name in responses.
        registry: the CollectorRegistry with the engine's metrics, or None.
        store: see `Services`, which is made for this one model if `services` is None.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        config: ServerConfig,
        name: str,
        registry: Any = None,
        store: Store | None = None,
        services: Services | None = None,
    ) -> None:
        self.llm, self.config, self.name, self.registry = llm, config, name, registry
        self.silent_language: str | None = None  # code that the speech model detects in silence, once it was asked
        if registry is not None:
            register_engine(registry, llm.engine.loop)
        self.services = services or Services(
            config, ModelPool.fixed(self, self.names, as_pooled(config.adapters)), registry, store
        )

    @property
    def names(self) -> Sequence[str]:
        """The names that requests may give the model; responses have the first one, `name`."""
        return self.config.served_names or [self.name]

    @property
    def engine(self) -> Engine:
        return self.llm.engine

    @cached_property
    def labels(self) -> dict[str, str]:
        """Names of a classification checkpoint's classes."""
        labels: dict[str, str] = load_model_files(self.engine.config.model).config.get("id2label") or {}
        return labels

    @cached_property
    def transcript_times(self) -> tuple[Times, bool]:
        """See the function."""
        return transcript_times(self.engine.speech)

    @cached_property
    def facts(self) -> ModelFacts:
        """What the server tells about the model."""
        engine = self.engine
        files, template = load_model_files(engine.config.model), engine.tokenizer.chat_template
        return make_facts(engine.config, files, engine.info, engine.speech, template, self.answer_format)

    @cached_property
    def fingerprint(self) -> str:
        """`system_fingerprint` of answers: it changes with the checkpoint's config, the options, the version or the kernels."""
        config = self.engine.config
        parts = metadata.version("sensorium"), load_model_files(config.model).config, config, self.engine.info.bodies
        return f"fp_{sha256(repr(parts).encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """How the model writes reasoning and tool calls."""
        engine, config = self.engine, self.config
        tokenizer, architecture = engine.tokenizer, load_model_files(engine.config.model).architecture
        template = tokenizer.chat_template or ""
        names = config.tool_call_parser, config.reasoning_parser
        return answer_format(template, [*tokenizer.specials], *names, architecture)

    def warn_about_reasoning(self) -> None:
        """Log a warning if the chat template shows that the model reasons and no parser reads that."""
        engine = self.engine
        if not engine.info.can_generate or self.config.reasoning_parser != "auto" or self.answer_format.reasoning is not None:
            return
        if mentions_reasoning(engine.tokenizer.chat_template or ""):
            reason = "the chat template shows that the model reasons, but in no known format, so answers include the reasoning"
            _log.warning("%s; choose a format with --reasoning-parser, or none to leave it there", reason)

    def checked_messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages of a request. Raise InputError if one has an unknown field, unless such fields are left out."""
        template, count = self.engine.tokenizer.chat_template, on_unknown_field.get()
        if count is not None:
            messages, dropped = drop_unknown_fields(messages, template)
            count(dropped)
        check_messages(messages, template)
        return messages

    def adapter_of(self, name: str | None) -> str | None:
        """Return the adapter that a request names as its model, or None. Raise HttpError if it names another model.

        With `lora_resolvers`, an unknown name may be that of an adapter, which the engine looks for.
        """
        is_own = name is None or name in self.names
        may_resolve = self.engine.adapters.resolves_names and self.services.pool.owner(name or "") is None
        if not is_own and not may_resolve and self.services.pool.find(name) is not self.services.pool.find(self.name):
            raise HttpError(404, f"this request goes to the model {short_repr(self.name)}", "model_not_found", "model")
        if (record := current_record.get()) is not None:
            record.model = self.name if is_own else name
        return None if is_own else name

    def load_adapters(self, adapters: dict[str, PooledAdapter]) -> None:
        """Load adapters for requests. One that was added, and cannot be read any more, is removed.

        Raises:
            ConfigError, CheckpointError: one of the configuration does not fit the model.
        """
        for name, adapter in [*adapters.items()]:  # a copy: the event loop may add some meanwhile
            try:
                self.engine.adapters.load(name, adapter.folder, adapter.is_pinned)
            except SensoriumError as error:
                if not adapter.was_added:
                    error.info = replace(error.info, text=f"the adapter {short_repr(name)}: {error.info.text}")
                    raise
                _log.warning("the adapter %s is removed, because it cannot be loaded again: %s", name, error)
                adapters.pop(name, None)

    def check_model(self, name: str | None) -> None:
        """Raise HttpError if a request names another model, or an adapter, which its endpoint does not take."""
        if self.adapter_of(name) is not None:
            reason = f"{short_repr(name)} is an adapter, which this endpoint does not take; name {short_repr(self.name)}"
            raise HttpError(400, reason, "unsupported", "model")


def services_of(request: HTTPConnection) -> Services:
    services: Services = request.app.state.services
    return services


def server_of(request: HTTPConnection) -> Server:
    """Return the model of a request: the one that it has leased, or the only one."""
    lease: ModelLease[Server] | None = request.scope.get(LEASE)
    server = services_of(request).pool.models[0].model if lease is None else lease.model
    assert server is not None
    return server


def keep_model(request: HTTPConnection) -> Callable[[], None]:
    """Let a request's model stay loaded beyond the response, until the returned function is called."""
    lease: ModelLease[Server] | None = request.scope.pop(LEASE, None)
    return (lambda: None) if lease is None else lease.release


def cache_salt(request: Request, salt: str | None) -> str | None:
    """Return the salt of a request: its own, made different for each API key, whose tenant it tells the engine."""
    tenant: str | None = request.scope[TENANT]
    if tenant is None or salt is None:
        return salt if tenant is None else tenant
    return tenant_salt(tenant, salt)


def priority_of(request: Request, wanted: int | None = None) -> int:
    """Return the priority of a request in the engine. `wanted`: the one that it asks for, 0 or above; None: 0."""
    return int(request.scope.get(PRIORITY, 0)) + (wanted or 0)


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid4().hex}"


def checked(output: RequestOutput) -> RequestOutput:
    """Return an output. Raise its error if it has one."""
    if output.error is not None:
        raise output.error.exception()
    return output


async def first_output(outputs: AsyncGenerator[T, None]) -> T:
    """Return the first output of a request, which is aborted if this coroutine is cancelled."""
    try:
        return await anext(outputs)
    except BaseException:
        await outputs.aclose()
        raise


async def unless_disconnected(client: Request | WebSocket, work: Awaitable[T]) -> T:
    """Return the result of `work`, or cancel it and raise ClientDisconnect when the client disconnects.

    Args:
        client: a request whose body was read, or a WebSocket that was not accepted.
    """
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(client))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnected(client: Request | WebSocket) -> None:
    while (await client.receive())["type"] not in ("http.disconnect", "websocket.disconnect"):
        pass
