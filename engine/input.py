"""A caller's prompt to tokens and features: render, plan, process, expand. Knows no scheduler and no family."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from ..mm.errors import InputError, MediaError
from ..mm.media import gate
from ..mm.parse import MediaSource
from ..mm.types import EmbeddingItem, ItemPlan, Media, MultiModalFeature, PlaceholderRange
from ..processors.chat import RenderedChat, encode_segments, render_chat
from ..processors.interface import ProcessingInfo, Span
from ..processors.spans import expand
from ..processors.text import Tokenizer
from .media import Item, MediaProcessor, MediaSettings, Processed, final_plan, num_bytes, source_bytes
from .prompts import Prompt, normalise
from .types import ItemTrace


@dataclass(frozen=True)
class Prepared:
    """One prompt, ready for the engine.

    `item_of`: for each feature, which of the items it is a piece of. `timings`: seconds of fetch, plan, decode and process.
    `cross`: the item that is no part of the tokens, read through cross-attention. `adapter`: as in EngineRequest.
    """

    prompt: str | None
    token_ids: tuple[int, ...]
    features: tuple[MultiModalFeature, ...] = ()
    items: tuple[ItemPlan, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)
    trace: tuple[ItemTrace, ...] = ()
    item_of: tuple[int, ...] = ()
    salt: str = ""
    cross: MultiModalFeature | None = None
    adapter: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of the processed items."""
        return sum(num_bytes(feature.kwargs) for feature in self.encoded)

    @property
    def encoded(self) -> tuple[MultiModalFeature, ...]:
        """All items: those among the tokens, and the one that is not."""
        return self.features if self.cross is None else (*self.features, self.cross)


@dataclass(frozen=True)
class Unfinished:
    """A prompt that was read and has media. `fetch` begins its downloads; `finish`, in a media worker, does the rest."""

    inputs: InputProcessor
    given: Prompt
    ids: Sequence[int]
    sources: Sequence[MediaSource]
    reserve: int
    fetches: dict[int, Future[Any]] = field(default_factory=dict)

    @property
    def remote(self) -> bool:
        """Whether there is anything to download."""
        return any(map(gate.is_remote, self.sources))

    @property
    def gives(self) -> frozenset[tuple[str | None, str]]:
        """Names that stand for content once this is finished, each with its tenant."""
        return self._names(lambda data: data is not None)

    @property
    def asks(self) -> frozenset[tuple[str | None, str]]:
        """Names whose content comes from elsewhere."""
        return self._names(lambda data: data is None)

    def fetch(self) -> Sequence[Future[Any]]:
        """What `finish` would wait for."""
        self.fetches.update(self.inputs.media.fetch(self.sources))
        return tuple(self.fetches.values())

    def finish(self) -> Prepared:
        """MediaError for an item that is refused or cannot be decoded or processed, by modality and index."""
        if self.remote and not self.fetches:
            self.fetch()
        return self.inputs.finish(self)

    def _names(self, those: Callable[[object], bool]) -> frozenset[tuple[str | None, str]]:
        return frozenset((self.given.salt, one.uuid) for one in self.sources if one.uuid is not None and those(one.data))


class InputProcessor:
    """Thread-safe; one per model."""

    def __init__(self, info: ProcessingInfo, tokenizer: Tokenizer, settings: MediaSettings, max_model_len: int) -> None:
        self._info, self._tokenizer, self._most = info, tokenizer, max_model_len
        self._crosses = any(name not in info.slot_ids for name in info.modalities)
        self.media = MediaProcessor(info, settings if self._crosses else replace(settings, max_rows=max_model_len))

    def prepare(self, prompt: object, reserve: int = 1) -> Prepared:
        """Tokens with every slot expanded, and the processed item of each.

        Args:
            prompt: any form that `engine.prompts.normalise` takes.
            reserve: tokens that `fit="context"` leaves for the answer.

        Raises:
            InputError: a prompt of another form or too long, a slot without an item or an item without a slot.
            MediaError: an item that is refused or cannot be decoded or processed, by modality and index.
        """
        begun = self.begin(prompt, reserve)
        return begun.finish() if isinstance(begun, Unfinished) else begun

    def begin(self, prompt: object, reserve: int = 1, more: bool = False) -> Prepared | Unfinished:
        """The part of `prepare` that looks at no media; all of it where there are none.

        `more`: the prompt goes on from another, nothing is put before its text.
        """
        return self._begin(*self._read(prompt, special=not more), reserve, more)

    def begin_chat(
        self, messages: Sequence[Mapping[str, Any]], render: Mapping[str, Any], request: Mapping[str, Any], reserve: int = 1
    ) -> Prepared | Unfinished:
        """`begin` for OpenAI-style messages; text in them stays text.

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
        given = self._given({"prompt": chat.text, "multi_modal_data": media, **request})
        self._guard(chat.text)
        return self._begin(given, encode_segments(chat.segments, self._tokenizer), reserve)

    def adapter(self, features: Iterable[MultiModalFeature]) -> str:
        """What computes a sequence with these and no other items, as in EngineRequest."""
        modalities = {"", *(feature.modality for feature in features)}
        return next((name for modality, name in self._info.adapters.items() if modality in modalities), "")

    def finish(self, draft: Unfinished) -> Prepared:
        """The part of `prepare` that reads, decodes and processes media."""
        start, given = time.perf_counter(), draft.given
        items, _ = self._admit(given, draft.ids, draft.sources, draft.reserve, draft.fetches)
        seconds = [{"fetch": item.seconds} for item in items]
        planned = time.perf_counter() - start
        made = [self.media.process(*entry) for entry in zip(items, [given.salt] * len(items), seconds, strict=True)]
        spans = [
            tuple(item.info.spans(item.source.modality, [grid for _, grid in done.pieces]))
            for item, done in zip(items, made, strict=True)
        ]
        tokens, ranges = self._expand(draft.ids, list(zip(items, spans, strict=True)))
        plans = tuple(final_plan(*entry) for entry in zip(items, made, spans, strict=True))
        trace = tuple(_trace(*entry) for entry in zip(items, made, plans, seconds, strict=True))
        features, item_of = _features(items, made, spans, ranges)
        timings, adapter = _stages(items, planned, seconds, remote=bool(draft.fetches)), self.adapter(features)
        cross = features[0] if features and self._crosses else None
        if cross is not None:
            features, item_of = (), ()
        return Prepared(given.text, tokens, features, plans, timings, trace, item_of, given.salt or "", cross, adapter)

    def plan(self, prompt: object) -> list[ItemPlan]:
        """What each item will take; nothing is decoded. Without a prompt's text only media are looked at.

        Raises:
            InputError, MediaError: as `prepare`, as far as the headers tell.
        """
        if isinstance(prompt, Mapping) and prompt.get("prompt") is None and prompt.get("prompt_token_ids") is None:
            given = self._given({**prompt, "prompt": "", "fit": None})
            return [item.plan for item in self.media.open(given.media, given.uuids, given.options, given.salt, False)]
        given, ids = self._read(prompt)
        sources = self.media.parse(given.media, given.uuids, given.options)
        ids = self._info.prompt_ids(ids, _count(sources))
        return [item.plan for item in self._admit(given, ids, sources, 1, self.media.fetch(sources), identify=False)[0]]

    def _read(self, prompt: object, special: bool = True) -> tuple[Prompt, Sequence[int]]:
        """A prompt and its token ids, slots not expanded."""
        given = self._given(prompt)
        if given.token_ids is not None:
            return given, given.token_ids
        self._guard(given.text or "")
        # what a tokenizer puts around a text is what an answer that is read across would look like
        return given, self._tokenizer.encode(given.text or "", add_special_tokens=special and not self._crosses)

    def _given(self, prompt: object) -> Prompt:
        """InputError for a prompt that a model of the other kind could serve."""
        given = normalise(prompt)
        if isinstance(given, Prompt):
            return given
        if not self._crosses:
            raise InputError('this model has no text encoder; give "prompt" instead of "encoder_prompt" and "decoder_prompt"')
        if given.encoder.text or given.encoder.token_ids or given.decoder is None:
            raise InputError('this model\'s encoder reads media alone; give its text as "decoder_prompt"')
        return replace(given.encoder, text=given.decoder.text, token_ids=given.decoder.token_ids)

    def _begin(self, given: Prompt, ids: Sequence[int], reserve: int, more: bool = False) -> Prepared | Unfinished:
        sources = self.media.parse(given.media, given.uuids, given.options)
        if self._crosses and not sources and not more:
            known = " or ".join(f"{{{name!r}: ...}}" for name in self._info.modalities)
            raise InputError(f"this model answers from what its encoder reads; give multi_modal_data={known} with the prompt")
        draft = Unfinished(self, given, self._info.prompt_ids(ids, _count(sources)), sources, reserve)
        return draft if draft.sources else self.finish(draft)

    def _guard(self, text: str) -> None:
        """Refuse a text that cannot fit before it is tokenised, which takes long and much memory."""
        least = self._tokenizer.least_tokens(text)
        if least >= self._most:
            raise InputError(f"the prompt has {least} tokens at least, max_model_len is {self._most}; shorten it")

    def _admit(
        self,
        given: Prompt,
        ids: Sequence[int],
        sources: Sequence[MediaSource],
        reserve: int,
        fetches: Mapping[int, Future[Any]],
        identify: bool = True,
    ) -> tuple[list[Item], tuple[int, ...]]:
        """The items, made to fit if the prompt asks for it, and the tokens as planned."""
        items = self.media.admit(sources, fetches, given.options, given.salt, identify)
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

    def _expand(
        self, ids: Sequence[int], items: Sequence[tuple[Item, Sequence[Span]]]
    ) -> tuple[tuple[int, ...], list[list[PlaceholderRange]]]:
        """The tokens, and the ranges of each item's pieces in the order of `items`; of one read across, among its own rows."""
        if self._crosses:
            if len(items) > 1:
                raise InputError(f"this model reads one item across, not {len(items)}; give each a prompt of its own")
            return tuple(ids), [[PlaceholderRange(0, item.plan.num_embeds)] for item, _ in items]
        slots: dict[str, list[Sequence[Span]]] = {}
        for item, spans in items:
            slots.setdefault(item.source.modality, []).append(spans)
        tokens, ranges = expand(ids, slots, self._info.slot_ids, self._text_of)
        return tokens, [ranges[item.source.modality][item.source.index] for item, _ in items]

    def _text_of(self, token: int) -> str:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return text or f"token {token} (the tokenizer has no text for it: the prompt must be token ids)"


def _count(sources: Sequence[MediaSource]) -> Counter[str]:
    """Items by modality."""
    return Counter(source.modality for source in sources)


def _as_stream(chat: RenderedChat) -> dict[str, list[Media]]:
    """The media of a conversation, of whatever modality, as the one stream of a model that reads chunks."""
    entries = [replace(media, data={"type": name, name: media.data}) for name, media in chat.media]
    return {"vision_chunk": entries} if entries else {}


def _features(
    items: Sequence[Item],
    made: Sequence[Processed],
    spans: Sequence[Sequence[Span]],
    ranges: Sequence[Sequence[PlaceholderRange]],
) -> tuple[tuple[MultiModalFeature, ...], tuple[int, ...]]:
    """In order of their offset, and which item each is of; each piece of a source has an identity of its own."""
    pieces = [
        (
            MultiModalFeature(
                span.modality or item.source.modality,
                kwargs,
                where,
                grid,
                item.key if len(places) == 1 else f"{item.key}.{part}",
            ),
            i,
        )
        for i, (item, done, own, places) in enumerate(zip(items, made, spans, ranges, strict=True))
        for part, ((kwargs, grid), span, where) in enumerate(zip(done.pieces, own, places, strict=True))
    ]
    pieces.sort(key=lambda piece: piece[0].range.offset)
    return tuple(feature for feature, _ in pieces), tuple(i for _, i in pieces)


def _stages(items: Sequence[Item], planned: float, seconds: Sequence[Mapping[str, float]], remote: bool) -> dict[str, float]:
    """Seconds of each stage of a prompt: files are read one after the other, downloads run side by side before all else."""
    loads = [item.seconds for item in items]
    total = {stage: sum((entry.get(stage, 0.0) for entry in seconds), 0.0) for stage in ("decode", "process")}
    fetch = max(loads, default=0.0) if remote else sum(loads)
    plan = planned if remote else max(0.0, planned - fetch)
    return {"fetch": float(fetch), "plan": plan, **total}


def _trace(item: Item, done: Processed, plan: ItemPlan, seconds: dict[str, float]) -> ItemTrace:
    given = item.source.data
    cached = "process" not in seconds and not isinstance(given, EmbeddingItem)
    return ItemTrace(plan.modality, plan.index, source_bytes(given), done.num_bytes, plan.num_tokens, cached, timings=seconds)
