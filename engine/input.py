"""A caller's prompt to tokens and features: render, plan, process, expand. Knows no scheduler and no family."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..mm.errors import InputError, MediaError
from ..mm.types import ItemPlan, Media, MultiModalFeature, PlaceholderRange
from ..processors.chat import RenderedChat, encode_segments, render_chat
from ..processors.interface import ProcessingInfo, Span
from ..processors.spans import expand
from ..processors.text import Tokenizer
from .media import Item, MediaProcessor, MediaSettings, Processed, final_plan, num_bytes
from .prompts import EncoderDecoderPrompt, Prompt, normalise


@dataclass(frozen=True)
class Prepared:
    """One prompt, ready for the engine. `timings`: seconds of "plan", "decode" and "process"."""

    prompt: str | None
    token_ids: tuple[int, ...]
    features: tuple[MultiModalFeature, ...] = ()
    items: tuple[ItemPlan, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of the processed items."""
        return sum(num_bytes(feature.kwargs) for feature in self.features)


class InputProcessor:
    """Thread-safe; one per model."""

    def __init__(self, info: ProcessingInfo, tokenizer: Tokenizer, settings: MediaSettings, max_model_len: int) -> None:
        self._info, self._tokenizer, self._most = info, tokenizer, max_model_len
        self.media = MediaProcessor(info, replace(settings, max_rows=max_model_len))

    def prepare(self, prompt: object, reserve: int = 1) -> Prepared:
        """Tokens with every slot expanded, and the processed item of each.

        Args:
            prompt: any form that `engine.prompts.normalise` takes.
            reserve: tokens that `fit="context"` leaves for the answer.

        Raises:
            InputError: a prompt of another form or too long, a slot without an item or an item without a slot.
            MediaError: an item that is refused or cannot be decoded or processed, by modality and index.
        """
        return self._prepare(*self._read(prompt), reserve)

    def prepare_chat(
        self, messages: Sequence[Mapping[str, Any]], render: Mapping[str, Any], request: Mapping[str, Any], reserve: int = 1
    ) -> Prepared:
        """The same for OpenAI-style messages; text in them stays text.

        Args:
            render: arguments of `processors.chat.render_chat`, the template among them.
            request: what else a prompt may hold: mm_processor_kwargs, cache_salt, fit.

        Raises:
            InputError: messages or parts of a wrong form, and what `prepare` raises.
        """
        if not messages:
            raise InputError("a conversation has no messages; give at least one")
        own = {"tokenizer": self._tokenizer, "max_model_len": self._most}
        chat: RenderedChat = render_chat(messages, **{**render, **own})
        media = _as_stream(chat) if "vision_chunk" in self._info.modalities else chat.multi_modal_data
        given = decoder_only(normalise({"prompt": chat.text, "multi_modal_data": media, **request}))
        self._guard(chat.text)
        return self._prepare(given, encode_segments(chat.segments, self._tokenizer), reserve)

    def plan(self, prompt: object) -> list[ItemPlan]:
        """What each item will take; nothing is decoded. Without a prompt's text only media are looked at.

        Raises:
            InputError, MediaError: as `prepare`, as far as the headers tell.
        """
        if isinstance(prompt, Mapping) and prompt.get("prompt") is None and prompt.get("prompt_token_ids") is None:
            given = decoder_only(normalise({**prompt, "prompt": "", "fit": None}))
            return [item.plan for item in self.media.open(given.media, given.uuids, given.options, given.salt, False)]
        given, ids = self._read(prompt)
        return [item.plan for item in self._admit(given, ids, 1, identify=False)[0]]

    def _read(self, prompt: object) -> tuple[Prompt, Sequence[int]]:
        """A prompt and its token ids, slots not expanded."""
        given = decoder_only(normalise(prompt))
        if given.token_ids is not None:
            return given, given.token_ids
        self._guard(given.text or "")
        return given, self._tokenizer.encode(given.text or "")

    def _guard(self, text: str) -> None:
        """Refuse a text that cannot fit before it is tokenised, which takes long and much memory."""
        least = self._tokenizer.least_tokens(text)
        if least >= self._most:
            raise InputError(f"the prompt has {least} tokens at least, max_model_len is {self._most}; shorten it")

    def _admit(
        self, given: Prompt, ids: Sequence[int], reserve: int, identify: bool = True
    ) -> tuple[list[Item], tuple[int, ...]]:
        """The items, made to fit if the prompt asks for it, and the tokens as planned."""
        items = self.media.open(given.media, given.uuids, given.options, given.salt, identify)
        tokens, _ = self._expand(ids, [(item, item.spans) for item in items])
        if given.fit is not None and len(tokens) + reserve > self._most:
            text = len(tokens) - sum(item.plan.num_tokens for item in items)
            items = self.media.shrink(items, self._most - reserve - text, given.salt)
            tokens, _ = self._expand(ids, [(item, item.spans) for item in items])
        surely = len(tokens) - sum(item.plan.num_tokens for item in items if not item.plan.exact)
        if surely >= self._most:
            raise self._too_long(surely, items)
        return items, tokens

    def _too_long(self, tokens: int, items: Sequence[Item]) -> InputError:
        reason = f"the prompt takes {tokens} tokens, max_model_len is {self._most}"
        if not items:
            return InputError(f"{reason}; shorten it")
        largest = max((item.plan for item in items), key=lambda plan: plan.num_tokens)
        hint = 'make it smaller (max_pixels, fps, num_frames) or ask for fit="context"'
        return MediaError(largest.modality, largest.index, f"{reason}, {largest.num_tokens} of them for this item; {hint}")

    def _prepare(self, given: Prompt, ids: Sequence[int], reserve: int) -> Prepared:
        start = time.perf_counter()
        items, _ = self._admit(given, ids, reserve)
        timings = {"plan": time.perf_counter() - start, "decode": 0.0, "process": 0.0}
        made = [self.media.process(item, given.salt, timings) for item in items]
        spans = [
            tuple(item.info.span(item.source.modality, grid) for _, grid in done.pieces)
            for item, done in zip(items, made, strict=True)
        ]
        tokens, ranges = self._expand(ids, list(zip(items, spans, strict=True)))
        plans = tuple(final_plan(*entry) for entry in zip(items, made, spans, strict=True))
        return Prepared(given.text, tokens, _features(items, made, ranges), plans, timings)

    def _expand(
        self, ids: Sequence[int], items: Sequence[tuple[Item, Sequence[Span]]]
    ) -> tuple[tuple[int, ...], list[list[PlaceholderRange]]]:
        """The tokens, and the ranges of each item's pieces in the order of `items`."""
        slots: dict[str, list[Sequence[Span]]] = {}
        for item, spans in items:
            slots.setdefault(item.source.modality, []).append(spans)
        tokens, ranges = expand(ids, slots, self._info.slot_ids)
        return tokens, [ranges[item.source.modality][item.source.index] for item, _ in items]


def decoder_only(prompt: Prompt | EncoderDecoderPrompt) -> Prompt:
    """InputError for a prompt that only an encoder-decoder model can serve."""
    if isinstance(prompt, EncoderDecoderPrompt):
        raise InputError('this model has no text encoder; give "prompt" instead of "encoder_prompt" and "decoder_prompt"')
    return prompt


def _as_stream(chat: RenderedChat) -> dict[str, list[Media]]:
    """The media of a conversation, of whatever modality, as the one stream of a model that reads chunks."""
    entries = [replace(media, data={"type": name, name: media.data}) for name, media in chat.media]
    return {"vision_chunk": entries} if entries else {}


def _features(
    items: Sequence[Item], made: Sequence[Processed], ranges: Sequence[Sequence[PlaceholderRange]]
) -> tuple[MultiModalFeature, ...]:
    """In order of their offset; each piece of a source in pieces has an identity of its own."""
    features = [
        MultiModalFeature(item.source.modality, kwargs, where, grid, item.key if len(places) == 1 else f"{item.key}.{part}")
        for item, done, places in zip(items, made, ranges, strict=True)
        for part, ((kwargs, grid), where) in enumerate(zip(done.pieces, places, strict=True))
    ]
    return tuple(sorted(features, key=lambda feature: feature.range.offset))
