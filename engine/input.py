"""A caller's prompt to tokens and features: parse, process, expand. Knows no scheduler and no family."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from ..mm.errors import InputError, MediaError
from ..mm.hashing import digest
from ..mm.parse import parse_media
from ..mm.types import ItemGeometry, MediaItem, MultiModalFeature, MultiModalKwargsItem
from ..processors.chat import encode_segments, render_chat
from ..processors.interface import ProcessingInfo
from ..processors.spans import expand
from ..processors.text import Tokenizer

_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data")
Processed = tuple[MultiModalKwargsItem, ItemGeometry]


@dataclass(frozen=True)
class Prepared:
    """One prompt, ready for the engine. `timings`: seconds of "decode" and "process"."""

    prompt: str | None
    token_ids: tuple[int, ...]
    features: tuple[MultiModalFeature, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of the processed items."""
        return sum(num_bytes(feature.kwargs) for feature in self.features)


class Once:
    """Results by key, each made once even when several threads ask; the newest `limit` bytes are kept for later askers."""

    def __init__(self, limit: int = 64 << 20) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._making: dict[str, Future[Processed]] = {}
        self._kept: OrderedDict[str, Processed] = OrderedDict()

    def get(self, key: str, make: Callable[[], Processed]) -> Processed:
        with self._lock:
            if key in self._kept:
                return self._kept[key]
            mine = key not in self._making
            future = self._making.setdefault(key, Future())
        if mine:
            self._make(key, make, future)
        return future.result()

    def _make(self, key: str, make: Callable[[], Processed], future: Future[Processed]) -> None:
        try:
            future.set_result(make())
        except Exception as error:
            future.set_exception(error)
        with self._lock:
            del self._making[key]
            if future.exception() is None:
                self._kept[key] = future.result()
            while sum(num_bytes(kwargs) for kwargs, _ in self._kept.values()) > self._limit:
                self._kept.popitem(last=False)


def num_bytes(kwargs: MultiModalKwargsItem) -> int:
    """Bytes of an item's tensors."""
    return sum(elem.data.nbytes for elem in kwargs.values() if isinstance(elem.data, Tensor))


class InputProcessor:
    """Thread-safe; one per model."""

    def __init__(self, info: ProcessingInfo, tokenizer: Tokenizer, limits: Mapping[str, int], fingerprint: str) -> None:
        self._info, self._tokenizer, self._limits, self._fingerprint = info, tokenizer, limits, fingerprint

    def prepare(self, prompt: object, once: Once) -> Prepared:
        """Tokens with every slot expanded, and the processed item of each.

        `prompt`: a string, or a mapping with "prompt" or "prompt_token_ids", and "multi_modal_data".

        Raises:
            InputError: a prompt of another form, a slot without an item or an item without a slot, too many items.
            MediaError: an item that cannot be decoded or processed, by modality and index.
        """
        text, token_ids, data = read_prompt(prompt)
        ids = self._tokenizer.encode(text or "") if token_ids is None else token_ids
        return self._expand(text, ids, data, once)

    def prepare_chat(
        self, messages: Sequence[Mapping[str, Any]], template: str, add_generation_prompt: bool, once: Once
    ) -> Prepared:
        """The same for OpenAI-style messages, rendered with a chat template; text in them stays text.

        Raises:
            InputError: messages or parts of a wrong form, and what `prepare` raises.
        """
        if not messages:
            raise InputError("a conversation has no messages; give at least one")
        chat = render_chat(messages, template, self._tokenizer, add_generation_prompt)
        return self._expand(chat.text, encode_segments(chat.segments, self._tokenizer), chat.multi_modal_data, once)

    def _expand(self, text: str | None, ids: Sequence[int], data: Mapping[str, object], once: Once) -> Prepared:
        start = time.perf_counter()
        items = parse_media(data, self._limits, self._info.modalities, self._info.sampling())
        decoded = time.perf_counter()
        keys = {name: [self._key(name, item) for item in values] for name, values in items.items()}
        done = {
            name: [
                _named(name, i, partial(once.get, key, partial(self._info.process, item)))
                for i, (key, item) in enumerate(zip(keys[name], values, strict=True))
            ]
            for name, values in items.items()
        }
        spans = {name: [self._info.span(name, geometry) for _, geometry in values] for name, values in done.items()}
        tokens, ranges = expand(ids, spans, self._info.slot_ids)
        features = [
            MultiModalFeature(name, kwargs, where, geometry, key)
            for name in done
            for (kwargs, geometry), where, key in zip(done[name], ranges[name], keys[name], strict=True)
        ]
        features.sort(key=lambda feature: feature.range.offset)
        timings = {"decode": decoded - start, "process": time.perf_counter() - decoded}
        return Prepared(text, tokens, tuple(features), timings)

    def _key(self, modality: str, item: MediaItem) -> str:
        return digest("sensorium.item", modality, item.hash, self._info.options_key(modality), self._fingerprint)


def _named(modality: str, index: int, work: Callable[[], Processed]) -> Processed:
    """What a family's rules refuse, said of the item."""
    try:
        return work()
    except MediaError:
        raise
    except InputError as error:
        raise MediaError(modality, index, str(error)) from None


def read_prompt(prompt: object) -> tuple[str | None, list[int] | None, Mapping[str, object]]:
    """(text, token ids, media) of a prompt; exactly one of the first two is given. InputError for any other form."""
    if isinstance(prompt, str):
        return prompt, None, {}
    if not isinstance(prompt, Mapping):
        raise InputError(f'a prompt is a string or {{"prompt": ...}}, not a {type(prompt).__name__}')
    unknown = [str(key) for key in prompt if key not in _KEYS]
    if unknown:
        raise InputError(f"unknown key {unknown[0]!r} in a prompt; known are {', '.join(_KEYS)}")
    text, ids, data = (prompt.get(key) for key in _KEYS)
    if (text is None) == (ids is None):
        raise InputError('a prompt needs either "prompt" or "prompt_token_ids"')
    if text is not None and not isinstance(text, str):
        raise InputError(f'"prompt" is a string, not a {type(text).__name__}')
    if data is not None and not isinstance(data, Mapping):
        raise InputError(f'"multi_modal_data" maps modality to items, e.g. {{"image": image}}, not a {type(data).__name__}')
    return text, None if ids is None else read_token_ids(ids), data or {}


def read_token_ids(ids: object) -> list[int]:
    """A list of integers from any sequence of them; InputError otherwise."""
    try:
        values = [int(token) for token in ids]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise InputError(f'"prompt_token_ids" is a list of integers, not {str(ids)[:40]!r}') from None
    if isinstance(ids, str | bytes):
        raise InputError(f'"prompt_token_ids" is a list of integers, not {str(ids)[:40]!r}')
    return values
