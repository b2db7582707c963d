"""A request as data: what a caller submits, and what it is answered."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ...callers.errors import ErrorInfo
from ...callers.pacing import releasing_gil
from ...mm.embeddings import ROWS
from ...mm.hashing import digest
from ...mm.types import MultiModalFeature
from ...processors.text.tokenizer import Tokenizer
from ..pooling_requests import PoolingRequest
from ..sampling_params import SamplingParams
from ..types import TokenOutput
from .input_processor import ParsedPrompt
from .output_processor import OutputBuilder
from .processed_prompt import ProcessedPrompt
from .trace import RequestTimes

_log = logging.getLogger(__name__)


def tokenize_draft(request: RequestInput, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens of a given draft, else of the one that is read. One that cannot be read is no draft."""
    draft = request.params.draft_text
    if draft is None and request.read_draft is not None:
        try:
            draft = request.read_draft()
        except Exception as error:
            _log.debug("there is no draft: %s", error)
    if isinstance(draft, str):
        return tuple(tokenizer.encode(draft, add_special_tokens=False)) if draft.strip() else ()
    return tuple(draft or ())


def tokenize_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of each bad word, at the start of a text and after a space.

    The result is kept in `params`, which all requests of a call share.
    """
    words = tuple(params.bad_words or ())
    if not words:
        return ()
    kept: tuple[tuple[str, ...], tuple[tuple[int, ...], ...]] = params.__dict__.get("bad_word_ids", ((), ()))
    if kept[0] != words:
        texts = (text for word in words for text in (word.lstrip(), " " + word.lstrip()))
        ids = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in releasing_gil(texts))
        kept = params.__dict__["bad_word_ids"] = words, tuple(dict.fromkeys(filter(None, ids)))
    return kept[1]


class Lease(Protocol):
    """Keeps an adapter from `load`, which may wait for the loop, until `release`. Then its identities are known."""

    identity: str
    encoder_identity: str

    def load(self) -> None: ...

    def release(self) -> None: ...


def _with_adapter(feature: MultiModalFeature, adapter: str) -> MultiModalFeature:
    """Return the feature with a hash of its own. Rows that the caller gave stay those of all adapters."""
    if ROWS in feature.kwargs:
        return feature
    item, dot, piece = feature.hash.partition(".")
    return replace(feature, hash=f"{digest('sensorium.adapted', item, adapter)}{dot}{piece}", adapter=adapter)


@dataclass(frozen=True)
class RequestInput:
    """A request as its caller submits it.

    Args:
        prepare: parses the prompt; runs in a thread of the input queue.
        priority: smaller values are served first.
        request_id: None lets the engine choose one.
        hold_open: as in `EngineRequest`.
        pooling, first_tokens: as in `EngineRequest`.
        has_files, salt: as in QueueEntry.
        adapter: the adapter that it chose; None: the base model, or what the model's own rules say.
        default_adapter: returns the adapter for the modalities of its items, if it chose none.
        read_draft: returns a `draft_text` for parameters without one; runs in a thread of the input queue, and may fail.
    """

    prepare: Callable[[], ProcessedPrompt | ParsedPrompt]
    params: SamplingParams
    priority: int = 0
    request_id: str | None = None
    hold_open: bool = False
    pooling: PoolingRequest | None = None
    first_tokens: int | None = None
    has_files: bool = False
    salt: str | None = None
    read_draft: Callable[[], str] | None = None
    adapter: Lease | None = None
    default_adapter: Callable[[Collection[str]], Lease | None] | None = None

    def adapted(self, features: Sequence[MultiModalFeature]) -> tuple[MultiModalFeature, ...]:
        """Return features whose encoder rows are those of the request's adapter, if it changes the encoder."""
        adapter = "" if self.adapter is None else self.adapter.encoder_identity
        return tuple(_with_adapter(feature, adapter) if adapter else feature for feature in features)

    @property
    def stops_and_repairs(self) -> bool:
        """True if the request has stop strings and the core may remove tokens from its answer."""
        detection = self.params.repetition_detection
        return bool(self.params.stop) and detection is not None and detection.repair


@dataclass(frozen=True)
class Closing:
    """Last event of an answer. Completions without a finish reason get `reason`."""

    reason: str
    error: ErrorInfo | None


@dataclass(eq=False, repr=False)
class Answer:
    """The answer of one turn so far. It is written by the loop's thread, except for the builder.

    Args:
        builder: guarded by the handle's lock.
        open: sequences that are not finished.
        inbox: events that the builder has not read.
        closed: the inbox has, or had, its Closing.
        unread: queued for the output thread.
    """

    builder: OutputBuilder
    open: set[str] = field(init=False)
    times: RequestTimes = field(default_factory=RequestTimes, init=False)
    inbox: deque[ProcessedPrompt | TokenOutput | Closing] = field(default_factory=deque, init=False)
    closed: bool = field(default=False, init=False)
    unread: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.open = set(self.builder.answers)

    def close(self, reason: str, error: ErrorInfo | None) -> None:
        self.times.ended = time.perf_counter()
        self.inbox.append(Closing(reason, error))
        self.closed = True
        self.open.clear()
