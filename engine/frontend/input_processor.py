"""The input processor: it renders, plans, processes and expands prompts into token ids and features."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ...mm.errors import InputError, MediaError, SensoriumError, typed
from ...mm.media import gate
from ...mm.media.isolate import watching
from ...mm.media.ledger import Ledger
from ...mm.parse import MediaSource
from ...mm.plain import builtin_copy
from ...mm.tenants import tenant_of
from ...mm.types import ItemPlan, Media, PlaceholderRange
from ...processors.elements.element import ImageScale
from ...processors.elements.formats import MarkedText, located_modalities
from ...processors.interface import ProcessingInfo, Span, SupportsElements
from ...processors.spans import PromptLayout, lay_out
from ...processors.text.chat import RenderedChat, render_chat
from ...processors.text.message_parts import split_media
from ...processors.text.tokenizer import Tokenizer
from .items import PlannedItem, ProcessedItem, final_plan, final_spans, item_features, item_trace, stage_seconds
from .media import MultiModalProcessor, MultiModalSettings
from .processed_prompt import ProcessedPrompt, named_item
from .prompt_embeds import prompt_embeds_features, read_prompt_embeds
from .prompts import Prompt, read_prompt

_TEXT_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds")


@dataclass(frozen=True)
class ParsedPrompt:
    """A tokenised prompt with media that are not loaded yet. `fetch` starts downloads, `finish` does the rest.

    Args:
        token_ids: tokens with one placeholder per item.
        reserve: tokens that `fit="context"` leaves for the answer.
        ledger: counts the bytes of its media; `finish` closes it.
        places: of a conversation's items, by modality and index: the `param` of errors about them. None for other prompts.
    """

    inputs: InputProcessor
    prompt: Prompt
    token_ids: Sequence[int]
    sources: Sequence[MediaSource]
    reserve: int
    ledger: Ledger
    places: Mapping[tuple[str, int], str] | None = None
    fetches: dict[int, Future[Any]] = field(default_factory=dict)

    @property
    def remote(self) -> bool:
        """True if there is anything to download."""
        return any(map(gate.is_remote, self.sources))

    @property
    def provided_uuids(self) -> frozenset[tuple[str | None, str]]:
        """(cache_salt, uuid) pairs whose content this prompt gives."""
        return self._uuids(lambda source: source.data is not None)

    @property
    def required_uuids(self) -> frozenset[tuple[str | None, str]]:
        """(cache_salt, uuid) pairs whose content has to come from another prompt."""
        return self._uuids(lambda source: source.data is None)

    def fetch(self) -> Sequence[Future[Any]]:
        """Start the downloads that `finish` waits for."""
        self.fetches.update(self.inputs.media.fetch(self.sources, self.ledger))
        return tuple(self.fetches.values())

    def finish(self) -> ProcessedPrompt:
        """Load, decode and process the media. Raise MediaError for an item that fails."""
        with self.ledger, _naming_items(self.places):
            if self.remote and not self.fetches:
                self.fetch()
            return self.inputs.finish(self)

    def _uuids(self, condition: Callable[[MediaSource], bool]) -> frozenset[tuple[str | None, str]]:
        sources = [source for source in self.sources if condition(source)]
        return frozenset((self.prompt.salt, source.uuid) for source in sources if source.uuid is not None)


class InputProcessor:
    """Turns prompts into token ids and features. Thread-safe; one per model."""

    def __init__(
        self,
        info: ProcessingInfo,
        tokenizer: Tokenizer,
        settings: MultiModalSettings,
        max_model_len: int,
        max_template_seconds: float = 10.0,
        hidden_size: int | None = None,
    ) -> None:
        """`hidden_size`: width of `prompt_embeds`; None refuses them."""
        self._hidden_size = hidden_size
        self._max_template_seconds = max_template_seconds
        self._info, self._tokenizer, self._max_model_len = info, tokenizer, max_model_len
        self._cross_attention = any(name not in info.placeholder_ids for name in info.modalities)
        self._needs_item = self._cross_attention and info.cross_token is None
        # with special tokens, an encoder-decoder model's tokenizer would write a complete answer, EOS included
        self._adds_special_tokens = info.adds_special_tokens and not self._needs_item
        self.media = MultiModalProcessor(info, settings if self._cross_attention else replace(settings, max_rows=max_model_len))

    def process(self, prompt: object, reserve: int = 1) -> ProcessedPrompt:
        """Tokenise a prompt, process its items and expand the placeholders.

        Args:
            prompt: any form that `engine.frontend.prompts.read_prompt` takes.
            reserve: tokens that `fit="context"` leaves for the answer.

        Raises:
            InputError: the prompt has an unsupported form or is too long, or placeholders and items do not match.
            MediaError: an item cannot be loaded, decoded or processed, or is over a limit.
        """
        parsed = self.parse(prompt, reserve)
        return parsed.finish() if isinstance(parsed, ParsedPrompt) else parsed

    def parse(self, prompt: object, reserve: int = 1, more: bool = False) -> ProcessedPrompt | ParsedPrompt:
        """Do the first part of `process`, which reads no media. A prompt without media is then complete.

        Args:
            more: the prompt continues another one, so the tokenizer adds no special tokens.
        """
        read = self._read(prompt)
        if read.embeds is not None:
            return self._parse_embeds(read, more)
        return self._parse(read, self._tokenize(read, special=not more), reserve, more)

    def parse_chat(
        self, messages: Sequence[Mapping[str, Any]], render: Mapping[str, Any], request: Mapping[str, Any], reserve: int = 1
    ) -> ProcessedPrompt | ParsedPrompt:
        """Do the same as `parse` for OpenAI-style messages. Special tokens in their text are treated as plain text.

        Args:
            render: arguments of `processors.text.chat.render_chat`, such as the template.
            request: further keys of a prompt: mm_processor_kwargs, cache_salt, fit.

        Raises:
            InputError: messages or parts have a wrong form, or an error of `process`.
        """
        if not messages:
            raise InputError("a conversation has no messages; give at least one", param="messages")
        limits = {"max_model_len": self._max_model_len, "max_seconds": self._max_template_seconds}
        own = {"tokenizer": self._tokenizer, "placeholders": self._placeholders, "cache_salt": request.get("cache_salt")}
        own["policy"] = policy = self.media.settings.policy
        own["require_sandbox"] = policy.worker_sandbox == "require"
        chat: RenderedChat = render_chat(messages, **{**render, **limits, **own})
        media, places = self._media(chat), self._places(chat)
        with _naming_items(places):
            prompt = self._read({"prompt": chat.text, "multi_modal_data": media, **request})
            self._check_text_length(chat.text)
            placeholders = self._info.text_placeholders if chat.media else {}
            ids = self._tokenizer.encode_pieces(chat.segments, placeholders)
            if self._adds_special_tokens:
                ids = self._tokenizer.add_special_tokens(ids)
            parsed = self._parse(prompt, ids, reserve, has_placeholders=bool(placeholders))
        return replace(parsed, places=places)

    def parse_media(self, prompt: object) -> ParsedPrompt:
        """Parse the media of a prompt, with or without text, for their encoder rows. The text is not read."""
        if not isinstance(prompt, Mapping):
            form = '{"multi_modal_data": {"image": ...}}'
            raise InputError(f"encode_media takes prompts such as {form}, not {typed(prompt)}", param="prompts")
        given: dict[str, Any] = builtin_copy(prompt, "prompts", "the prompt")
        read = self._read({name: value for name, value in given.items() if name not in _TEXT_KEYS} | {"prompt": ""})
        sources = self.media.parse(read.media, read.uuids, read.options)
        if not sources:
            raise InputError("there is nothing to encode; give multi_modal_data", param="multi_modal_data")
        ids = [self._info.placeholder_ids[source.modality] for source in sources]
        return ParsedPrompt(self, read, ids, sources, 1, self.media.budget.open(tenant_of(read.salt)))

    def adapter(self, modalities: Iterable[str]) -> str:
        """Return the adapter for a sequence with items of these modalities, "" for none."""
        present = {"", *modalities}
        return next((name for modality, name in self._info.adapters.items() if modality in present), "")

    def finish(self, parsed: ParsedPrompt) -> ProcessedPrompt:
        """Do the last part of `process`: load, decode and process the media, and expand the placeholders."""
        start, prompt = time.perf_counter(), parsed.prompt
        items, layout = self._plan(prompt, parsed.token_ids, parsed.sources, parsed.reserve, parsed.fetches, parsed.ledger)
        timings = [{"fetch": item.seconds} for item in items]
        plan_seconds = time.perf_counter() - start
        processed, done = list[ProcessedItem](), dict[str, ProcessedItem]()
        for item, own in zip(items, timings, strict=True):
            if item.key not in done or item.source.uuid is not None:
                with parsed.ledger.holding(sum(header.num_bytes for header in item.headers)):  # while it is decoded
                    done[item.key] = self.media.process(item, prompt.salt, own)
                parsed.ledger.hold(done[item.key].num_bytes)
            processed.append(done[item.key])
        spans = [final_spans(*entry) for entry in zip(items, processed, strict=True)]
        if any(own is not item.spans for item, own in zip(items, spans, strict=True)):
            layout = self._lay_out(parsed.token_ids, items, spans)
        token_ids, ranges = self._expand(layout, items)
        plans = tuple(final_plan(*entry) for entry in zip(items, processed, spans, strict=True))
        trace = tuple(item_trace(*entry) for entry in zip(items, processed, plans, timings, strict=True))
        features, item_of = item_features(items, processed, spans, ranges)
        stages = stage_seconds(items, plan_seconds, timings, remote=bool(parsed.fetches))
        adapter = self.adapter(feature.modality for feature in features)
        cross = features[0] if features and self._cross_attention else None
        if cross is not None:
            features, item_of = (), ()
        salt, form = prompt.salt or "", self._answer_format(plans)
        return ProcessedPrompt(
            prompt.text, token_ids, features, plans, stages, trace, item_of, salt, cross, adapter, form, parsed.places
        )

    def _answer_format(self, plans: Sequence[ItemPlan]) -> MarkedText | None:
        info = self._info
        if not isinstance(info, SupportsElements) or not info.element_format:
            return None
        located = [plan for plan in plans if plan.modality in located_modalities(info.element_format)]
        scales = (ImageScale(one.size, info.resized(one), one.index, one.modality == "video") for one in located)
        return MarkedText(info.element_format, "", tuple(scales))

    def plan_chat(
        self, messages: Sequence[Mapping[str, Any]], mm_processor_kwargs: Mapping[str, Any] | None, cache_salt: str | None
    ) -> list[ItemPlan]:
        """Do the same as `plan` for the media of messages, whose text is not read."""
        _, media, places = split_media(messages, self.media.settings.policy, tenant_of(cache_salt))
        chat = RenderedChat((), tuple(media), tuple(places))
        request = {"mm_processor_kwargs": mm_processor_kwargs, "cache_salt": cache_salt}
        with _naming_items(self._places(chat)):
            given = {name: value for name, value in request.items() if value is not None}
            return self.plan({"multi_modal_data": self._media(chat), **given})

    def plan(self, prompt: object) -> list[ItemPlan]:
        """Plan each item from its header, without decoding. The prompt may have no text; then only the media are planned.

        Raises:
            InputError, MediaError: errors of `process` that can be found from headers.
        """
        prompt = builtin_copy(prompt, "prompt", "the prompt")
        if isinstance(prompt, Mapping) and prompt.get("prompt") is None and prompt.get("prompt_token_ids") is None:
            media = self._read({**prompt, "prompt": "", "fit": None})
            return [item.plan for item in self.media.open(media.media, media.uuids, media.options, media.salt, False)]
        read = self._read(prompt)
        if read.embeds is not None:
            return []
        ids = self._tokenize(read)
        sources = self.media.parse(read.media, read.uuids, read.options)
        ids = self._info.preprocess_prompt(ids, _num_items(sources))
        with self.media.budget.open(tenant_of(read.salt)) as ledger, watching(ledger.close):
            items, _ = self._plan(read, ids, sources, 1, self.media.fetch(sources, ledger), ledger, identify=False)
        return [item.plan for item in items]

    def _media(self, chat: RenderedChat) -> dict[str, list[Media]]:
        return _as_vision_chunks(chat) if "vision_chunk" in self._info.modalities else chat.multi_modal_data

    def _places(self, chat: RenderedChat) -> dict[tuple[str, int], str]:
        """Return the place of each item of a conversation by modality and index."""
        counts, places = Counter[str](), dict[tuple[str, int], str]()
        for (modality, _), place in zip(chat.media, chat.places, strict=True):
            name = "vision_chunk" if "vision_chunk" in self._info.modalities else modality
            places[name, counts[name]] = place
            counts[name] += 1
        return places

    def _tokenize(self, prompt: Prompt, special: bool = True) -> Sequence[int]:
        """Return the token ids of a prompt; placeholders are not expanded."""
        if prompt.token_ids is not None:
            return prompt.token_ids
        self._check_text_length(prompt.text or "")
        return self._tokenizer.encode(prompt.text or "", add_special_tokens=special and self._adds_special_tokens)

    def _parse_embeds(self, prompt: Prompt, more: bool) -> ProcessedPrompt:
        """Return the prompt of given `prompt_embeds`. Its token ids are zeros."""
        if self._cross_attention:
            reason = "an encoder-decoder model takes no prompt_embeds; give the decoder's prompt as text or token ids"
            raise InputError(reason, param="prompt_embeds")
        if self._hidden_size is None:
            reason = "this engine takes no prompt_embeds; load the model with enable_prompt_embeds=True"
            raise InputError(reason, param="prompt_embeds")
        if more:
            reason = "a live session takes prompt_embeds as its first prompt only; append text or token ids"
            raise InputError(reason, param="prompt_embeds")
        settings = self.media.settings
        rows = read_prompt_embeds(prompt.embeds, self._hidden_size, self._max_model_len - 1, settings.dtype)
        features = prompt_embeds_features(rows, settings.row_bytes // settings.dtype.itemsize, prompt.salt)
        adapter = self.adapter(())
        return ProcessedPrompt(None, (0,) * len(rows), features, salt=prompt.salt or "", adapter=adapter)

    def _read(self, prompt: object) -> Prompt:
        """Read a prompt. Raise InputError for a prompt that suits another kind of model."""
        read = read_prompt(prompt, self._max_model_len)
        if isinstance(read, Prompt):
            return read
        if not self._cross_attention:
            raise InputError('this model has no text encoder; give "prompt" instead of "encoder_prompt" and "decoder_prompt"')
        if read.encoder.text or read.encoder.token_ids or read.decoder is None:
            raise InputError('this model\'s encoder reads media only; give the text as "decoder_prompt"')
        decoder = read.decoder
        return replace(read.encoder, text=decoder.text, token_ids=decoder.token_ids, embeds=decoder.embeds)

    def _parse(
        self, prompt: Prompt, ids: Sequence[int], reserve: int, more: bool = False, has_placeholders: bool = False
    ) -> ProcessedPrompt | ParsedPrompt:
        sources = self.media.parse(prompt.media, prompt.uuids, prompt.options)
        if self._needs_item and not sources and not more:
            known = " or ".join(self._info.modalities)
            reason = f"this model answers from its encoder's input, which is {known}; give it in multi_modal_data"
            raise InputError(reason, param="multi_modal_data")
        if self._cross_attention and sources and more:
            raise InputError("a live session of this model takes an item with its first prompt only; start another session")
        # in a chat the template's text placeholders are tokens already, and the user's stay text
        preprocess = self._info.preprocess_chat if has_placeholders else self._info.preprocess_prompt
        ids = preprocess(ids, _num_items(sources))
        parsed = ParsedPrompt(self, prompt, ids, sources, reserve, self.media.budget.open(tenant_of(prompt.salt)))
        return parsed if parsed.sources else self.finish(parsed)

    def _check_text_length(self, text: str) -> None:
        """Refuse a text that is too long before time and memory are spent on tokenising it."""
        count = self._tokenizer.min_tokens(text)
        if count >= self._max_model_len:
            reason = f"the prompt has at least {count} tokens, but max_model_len is {self._max_model_len}; shorten it"
            raise InputError(reason, code="too_long")

    def _plan(
        self,
        prompt: Prompt,
        ids: Sequence[int],
        sources: Sequence[MediaSource],
        reserve: int,
        fetches: Mapping[int, Future[Any]],
        ledger: Ledger,
        identify: bool = True,
    ) -> tuple[list[PlannedItem], PromptLayout]:
        """Plan the items, shrink them if `fit` asks for it, and return them with the prompt's layout, before any expansion."""
        items = self.media.admit(sources, fetches, prompt.options, prompt.salt, ledger, identify)
        layout = self._lay_out(ids, items, [item.spans for item in items])
        if prompt.fit is not None and layout.num_tokens + reserve > self._max_model_len:
            text = layout.num_tokens - sum(item.plan.num_tokens for item in items)
            items = self.media.shrink(items, self._max_model_len - reserve - text, prompt.salt)
            layout = self._lay_out(ids, items, [item.spans for item in items])
        min_tokens = layout.num_tokens - sum(item.plan.num_tokens for item in items if not item.plan.exact)
        if min_tokens >= self._max_model_len:
            raise self._too_long_error(min_tokens, items)
        return items, layout

    def _too_long_error(self, tokens: int, items: Sequence[PlannedItem]) -> InputError:
        reason = f"the prompt takes {tokens} tokens, but max_model_len is {self._max_model_len}"
        if not items:
            return InputError(f"{reason}; shorten it", code="too_long")
        largest = max((item.plan for item in items), key=lambda plan: plan.num_tokens)
        hint = 'make it smaller (max_pixels, fps, num_frames) or pass fit="context"'
        reason = f"{reason}, {largest.num_tokens} of them for this item; {hint}"
        return MediaError(largest.modality, largest.index, reason, code="too_long")

    def _lay_out(self, ids: Sequence[int], items: Sequence[PlannedItem], spans: Sequence[Sequence[Span]]) -> PromptLayout:
        """Replace each placeholder by its item's spans. Cross-attention items have no placeholder and no span."""
        if self._cross_attention:
            if len(items) > 1:
                raise InputError(f"this model takes one item per prompt, not {len(items)}; give each a prompt of its own")
            token = self._info.cross_token
            if token is not None and list(ids).count(token) != len(items):
                found, text = list(ids).count(token), self._text_of(token)
                raise InputError(f"the prompt has {found} of {text} for {len(items)} items; write it once for each item")
            return PromptLayout([ids], {})
        by_modality: dict[str, list[Sequence[Span]]] = {}
        for item, own in zip(items, spans, strict=True):
            by_modality.setdefault(item.source.modality, []).append(own)
        return lay_out(ids, by_modality, self._info.placeholder_ids, self._text_of)

    def _expand(
        self, layout: PromptLayout, items: Sequence[PlannedItem]
    ) -> tuple[tuple[int, ...], list[list[PlaceholderRange]]]:
        """Write the tokens, and return them with the ranges of each item's pieces in the order of `items`."""
        tokens, ranges = layout.expand()
        if self._cross_attention:  # ranges count the encoder's rows
            start = tokens.index(self._info.cross_token) if items and self._info.cross_token is not None else 0
            return tokens, [[PlaceholderRange(start, item.plan.num_embeds)] for item in items]
        return tokens, [ranges[item.source.modality][item.source.index] for item in items]

    @property
    def _placeholders(self) -> dict[str, str]:
        """The text of each modality's placeholder."""
        texts = {token: text for text, token in self._info.text_placeholders.items()}
        return {name: texts.get(token) or self._text_of(token) for name, token in self._info.placeholder_ids.items()}

    def _text_of(self, token: int) -> str:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return text or f"token {token} (the tokenizer has no text for it: the prompt must be token ids)"


@contextmanager
def _naming_items(places: Mapping[tuple[str, int], str] | None) -> Iterator[None]:
    """Give errors of a conversation a `param`: the place of the item at fault, or "messages". `places`: as in ParsedPrompt."""
    try:
        yield
    except SensoriumError as error:
        if places is not None:
            error.info = named_item(error.info, places)
        raise


def _num_items(sources: Sequence[MediaSource]) -> Counter[str]:
    """Return the number of items by modality."""
    return Counter(source.modality for source in sources)


def _as_vision_chunks(chat: RenderedChat) -> dict[str, list[Media]]:
    """Return all media of a conversation as vision chunks, for models that take images and videos in one stream."""
    entries = [replace(media, data={"type": name, name: media.data}) for name, media in chat.media]
    return {"vision_chunk": entries} if entries else {}
