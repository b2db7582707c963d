"""`Server`: the engine and the options that all endpoints use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from fastapi import Request
from starlette.requests import ClientDisconnect

from ..engine.model_files import load_model_files
from ..engine.types import RequestOutput
from ..mm.errors import short_repr
from ..mm.message_fields import check_messages
from ..mm.tenants import tenant_salt
from ..pipelines.llm import AsyncLLM
from .config import ServerConfig
from .errors import HttpError
from .guard import PRIORITY, TENANT, BodyBytes
from .parsers.answer import AnswerFormat, answer_format
from .shared_threads import SharedThreads
from .store import Store

if TYPE_CHECKING:
    from .batch_runner import BatchRunner

T = TypeVar("T")
_TOKENISERS, _PLANNERS = 4, 8  # threads


@dataclass
class Server:
    """The engine and what endpoints need to know about it.

    Args:
        name: the model's name in responses.
        registry: the CollectorRegistry with the engine's metrics, or None.
        created: time of the start.
        store: files and batches, or None without `data_dir`.
        batches: the batches in progress, while the application runs with a store.
    """

    engine: AsyncLLM
    config: ServerConfig
    name: str
    registry: Any = None
    created: int = field(default_factory=lambda: int(time.time()))
    store: Store | None = None
    batches: BatchRunner = field(init=False, repr=False)
    body_bytes: BodyBytes = field(default_factory=BodyBytes, repr=False)
    realtime_sessions: int = 0  # open ones
    tokenisers: SharedThreads = field(default_factory=lambda: SharedThreads(_TOKENISERS, "tokenise"), repr=False)
    planners: SharedThreads = field(default_factory=lambda: SharedThreads(_PLANNERS, "plan"), repr=False)  # may download

    @cached_property
    def labels(self) -> dict[str, str]:
        """Names of a classification checkpoint's classes."""
        found: dict[str, str] = load_model_files(self.engine.llm.config.model).config.get("id2label") or {}
        return found

    @cached_property
    def transcript_times(self) -> tuple[str, bool]:
        """Return the argument `timestamps` of `transcribe` that gives segments, and whether the model times words.

        A model without timestamps whose words have times gives a segment for each window; "none" if it has neither.
        """
        speech = self.engine.llm.speech
        words = speech is not None and (speech.alignment() is not None or speech.frame_rule() is not None)
        own = speech is not None and speech.has_timestamps
        return "segment" if own else "word" if words else "none", words

    @cached_property
    def capabilities(self) -> dict[str, Any]:
        """Names of the tasks that clients can use with the model; GET /v1/models returns them."""
        llm = self.engine.llm
        files, speech = load_model_files(llm.config.model), llm.speech
        chats = llm.can_generate and llm.get_tokenizer().chat_template is not None
        return {
            "modalities": llm.modalities,
            "tasks": (["chat"] if chats else []) + list(speech.tasks if speech else ()),
            "segment_times": self.transcript_times[0] != "none",
            "word_times": self.transcript_times[1],
            "realtime": speech is not None,
            "architecture": files.architecture,
            "patch_size": (files.config.get("vision_config") or {}).get("patch_size"),
        }

    @cached_property
    def answer_format(self) -> AnswerFormat:
        tokenizer, config = self.engine.llm.get_tokenizer(), self.config
        template = tokenizer.chat_template
        return answer_format(template, [*tokenizer.specials], config.tool_call_parser, config.reasoning_parser)

    def check_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise InputError if a message has an unknown field."""
        check_messages(messages, self.engine.llm.get_tokenizer().chat_template)

    def check_model(self, name: str | None) -> None:
        """Raise HttpError if a request names another model."""
        if name is not None and name != self.name:
            reason = f"the model {short_repr(name)} does not exist; this server has {short_repr(self.name)}"
            raise HttpError(404, reason, "model_not_found", "model")


def server_of(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


def cache_salt(request: Request, given: str | None) -> str | None:
    """Return the salt of a request: its own, made different for each API key, whose tenant it tells the engine."""
    tenant: str | None = request.scope[TENANT]
    if tenant is None or given is None:
        return given if tenant is None else tenant
    return tenant_salt(tenant, given)


def priority_of(request: Request) -> int:
    """Return the priority of a request in the engine."""
    return int(request.scope.get(PRIORITY, 0))


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


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`, or cancel it when the client disconnects. The request's body must have been read."""
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
