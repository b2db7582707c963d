"""The input processor: it renders, plans, processes and expands prompts into token ids and features."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ...callers.errors import InputError, MediaError, SensoriumError, typed
from ...callers.plain import builtin_copy
from ...mm.media import gate
from ...mm.media.isolate import watching
from ...mm.media.ledger import Ledger
from ...mm.parse import MediaSource
from ...mm.tenants import tenant_of
from ...mm.types import ItemPlan, Media, MultiModalFeature, PlaceholderRange
from ...processors.elements.element import ImageScale
from ...processors.elements.marked_text import MarkedText, located_modalities
from ...processors.interface import ProcessingInfo, Span, SupportsElements, SupportsEncoderText
from ...processors.retokenize import PromptText, retokenize
from ...processors.spans import MissingPlaceholderError, PromptLayout, lay_out
from ...processors.text.chat import RenderedChat, render_chat
from ...processors.text.left_out import left_out_error
from ...processors.text.message_parts import split_media
from ...processors.text.tokenizer import Tokenizer
from .items import PlannedItem, ProcessedItem, final_plan, final_spans, item_features, item_trace, stage_seconds
from .media import MultiModalProcessor, MultiModalSettings
from .processed_prompt import ProcessedPrompt, named_item
from .prompt_embeds import prompt_embeds_features, read_prompt_embeds
from .prompt_text import PromptOptions, PromptTokenizer
from .prompts import EncoderDecoderPrompt, Prompt, read_prompt

_TEXT_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds")


@dataclass(frozen=True)
class ParsedPrompt:
    """A tokenised prompt with media that are not loaded yet. `fetch` starts downloads, `finish` does the rest.

    Args:
        token_ids: tokens with one placeholder per item.
        reserve: tokens that `fit="context"` leaves for the answer.
        ledger: counts the bytes of its media; `finish` closes it.
        places: (modality, index) of an item of a conversation -> the `param` of errors about it, such as
            "messages[0].content[1]". None for other prompts.
        left_out: returns the error about a modality of which the chat template of a conversation leaves out an item.
        text: what `token_ids` were tokenised from; None if the prompt is token ids.
        max_tokens: tokens that the prompt may have, with those of its media; None: as many as the model takes.
    """

    inputs: InputProcessor
    prompt: Prompt
    token_ids: Sequence[int]
    sources: Sequence[MediaSource]
    reserve: int
    ledger: Ledger
    places: Mapping[tuple[str, int], str] | None = None
    left_out: Callable[[str], InputError] | None = None
    text: PromptText | None = None
    max_tokens: int | None = None
    fetches: dict[int, Future[Any]] = field(default_factory=dict)

    @property
    def modalities(self) -> frozenset[str]:
        """Modalities of its items."""
        return frozenset(source.modality for source in self.sources)

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
        """(cache_salt, uuid) pairs whose content has to come from another prompt, or that another one may give other content.

        A prompt with the data waits for earlier ones with the same uuid, too: of two with different data, the later one fails.
        """
        trusts = self.inputs.media.settings.trust_uuid
        return self._uuids(lambda source: source.data is None or not trusts)

    def fetch(self) -> Sequence[Future[Any]]:
        """Start the downloads that `finish` waits for."""
        self.fetches.update(self.inputs.media.fetch(self.sources, self.ledger))
        return tuple(self.fetches.values())

    def finish(self) -> ProcessedPrompt:
        """Load, decode and process the media. Raise MediaError for an item that fails."""
        with self.ledger, _naming_items(self.places):
            if self.remote and not self.fetches:
                self.fetch()
            try:
                return self.inputs.finish(self)
            except MissingPlaceholderError as error:
                raise error if self.left_out is None else self.left_out(error.modality) from None

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
        options: PromptOptions | None = None,
    ) -> None:
        """Make an input processor. `max_model_len`: maximum number of tokens of prompt and answer together."""
        options = options or PromptOptions()
        self.text = PromptTokenizer(info, tokenizer, max_model_len, options)
        self._hidden_size, self._max_template_seconds = options.hidden_size, options.max_template_seconds
        self._info, self._tokenizer, self._max_model_len = info, tokenizer, max_model_len
        self._max_prompt = self.text.max_prompt
        self._cross_attention = any(name not in info.placeholder_ids for name in info.modalities)
        self._needs_item = self._cross_attention and info.cross_token is None
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
        tokens = self.text.tokenize(read, special=not more)
        return self._parse(read, tokens, reserve, self.text.prompt_text(read, special=not more), "turn" if more else "prompt")

    def parse_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        render: Mapping[str, Any],
        request: Mapping[str, Any],
        reserve: int = 1,
        max_tokens: int | None = None,
    ) -> ProcessedPrompt | ParsedPrompt:
        """Do the same as `parse` for OpenAI-style messages. Special tokens in their text are treated as plain text.

        Args:
            render: arguments of `processors.text.chat.render_chat`, such as the template.
            request: further keys of a prompt: mm_processor_kwargs, cache_salt, fit.
            max_tokens: as in ParsedPrompt.

        Raises:
            InputError: messages or parts have a wrong form, or an error of `process`.
        """
        if isinstance(self._info, SupportsEncoderText):
            raise InputError("this model answers prompts, not conversations; give a prompt", code="unsupported")
        if not messages:
            raise InputError("a conversation has no messages; give at least one", param="messages")
        limit = self._max_model_len if request.get("truncate_prompt_tokens") is None else None
        limits = {"max_model_len": limit, "max_seconds": self._max_template_seconds}
        needed = {
            "tokenizer": self._tokenizer,
            "placeholders": self.text.placeholders,
            "cache_salt": request.get("cache_salt"),
        }
        needed["policy"] = policy = self.media.settings.policy
        needed["require_sandbox"] = policy.worker_sandbox == "require"
        options = {**render, **limits, **needed}
        chat: RenderedChat = render_chat(messages, **options)
        media, places = self._media(chat), self._places(chat)
        with _naming_items(places):
            prompt = self._read({"prompt": chat.text, "multi_modal_data": media, **request})
            if prompt.truncate_prompt_tokens is None:
                self.text.check_text_length(chat.text)
            placeholders = self._info.text_placeholders if chat.media else {}
            tokens = self.text.truncate(prompt, self.text.encode_segments(chat.segments, placeholders))
            text = PromptText(chat.segments, self.text.encode_segments)
            parsed = self._parse(prompt, tokens, reserve, text, "chat" if placeholders else "prompt", max_tokens)
        if isinstance(parsed, ProcessedPrompt):
            return replace(parsed, places=places)

        def left_out(modality: str) -> InputError:
            kinds = (modality if modality == "vision_chunk" else kind for kind, _ in chat.media)
            items = list(zip(kinds, chat.places, strict=True))
            return left_out_error(messages, modality, items, chat.text, lambda changed: render_chat(changed, **options).text)

        return replace(parsed, places=places, left_out=left_out)

    def parse_media(self, prompt: object) -> ParsedPrompt:
        """Parse the media of a prompt, with or without text, for their encoder rows. The text is not read."""
        if not isinstance(prompt, Mapping):
            example = '{"multi_modal_data": {"image": ...}}'
            raise InputError(f"encode_media takes prompts such as {example}, not {typed(prompt)}", param="prompts")
        if isinstance(self._info, SupportsEncoderText):
            raise InputError("this model takes texts only; give a prompt", code="unsupported")
        fields: dict[str, Any] = builtin_copy(prompt, "prompts", "the prompt")
        read = self._read({name: value for name, value in fields.items() if name not in _TEXT_KEYS} | {"prompt": ""})
        sources = self.media.parse(read.media, read.uuids, read.options)
        if not sources:
            raise InputError("there is nothing to encode; give <<param>>", param="multi_modal_data")
        ids = [self._info.placeholder_ids[source.modality] for source in sources]
        return ParsedPrompt(self, read, ids, sources, 1, self.media.budget.open(tenant_of(read.salt)))

    def adapter(self, modalities: Iterable[str]) -> str:
        """Return the adapter for a sequence with items of these modalities, "" for none."""
        present = {"", *modalities}
        return next((name for modality, name in self._info.adapters.items() if modality in present), "")

    def finish(self, parsed: ParsedPrompt) -> ProcessedPrompt:
        """Do the last part of `process`: load, decode and process the media, and expand the placeholders."""
        start, prompt = time.perf_counter(), parsed.prompt
        items, layout = self._plan(parsed)
        timings = [{"fetch": item.seconds} for item in items]
        plan_seconds = time.perf_counter() - start
        processed, done = list[ProcessedItem](), dict[str, ProcessedItem]()
        for item, seconds in zip(items, timings, strict=True):
            if item.key not in done or item.source.uuid is not None:
                with parsed.ledger.holding(sum(header.num_bytes for header in item.headers)):  # while it is decoded
                    done[item.key] = self.media.process(item, prompt.salt, seconds)
                parsed.ledger.hold(done[item.key].num_bytes)
            processed.append(done[item.key])
        spans = [final_spans(*entry) for entry in zip(items, processed, strict=True)]
        if any(final is not item.spans for item, final in zip(items, spans, strict=True)):
            layout = self._lay_out(parsed, items, spans)
        token_ids, ranges = self._expand(layout, items)
        plans = tuple(final_plan(*entry) for entry in zip(items, processed, spans, strict=True))
        trace = tuple(item_trace(*entry) for entry in zip(items, processed, plans, timings, strict=True))
        features, item_of = item_features(items, processed, spans, ranges)
        stages = stage_seconds(items, plan_seconds, timings, remote=bool(parsed.fetches))
        adapter = self.adapter(feature.modality for feature in features)
        cross: tuple[MultiModalFeature, ...] = ()
        if self._cross_attention:
            features, item_of, cross = (), (), features
        salt, answer_format = prompt.salt or "", self._answer_format(plans)
        return ProcessedPrompt(
            prompt.text, token_ids, features, plans, stages, trace, item_of, salt, cross, adapter, answer_format, parsed.places
        )

    def _answer_format(self, plans: Sequence[ItemPlan]) -> MarkedText | None:
        info = self._info
        if not isinstance(info, SupportsElements) or not info.element_format:
            return None
        located = [plan for plan in plans if plan.modality in located_modalities(info.element_format)]
        scales = (ImageScale(plan.size, info.resized(plan), plan.index, plan.modality == "video") for plan in located)
        return MarkedText(info.element_format, "", tuple(scales))

    def plan_chat(
        self, messages: Sequence[Mapping[str, Any]], mm_processor_kwargs: Mapping[str, Any] | None, cache_salt: str | None
    ) -> list[ItemPlan]:
        """Do the same as `plan` for the media of messages, whose text is not read."""
        _, media, places = split_media(messages, self.media.settings.policy, tenant_of(cache_salt))
        chat = RenderedChat((), tuple(media), tuple(places))
        request = {"mm_processor_kwargs": mm_processor_kwargs, "cache_salt": cache_salt}
        with _naming_items(self._places(chat)):
            options = {name: value for name, value in request.items() if value is not None}
            return self.plan({"multi_modal_data": self._media(chat), **options})

    def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        render: Mapping[str, Any],
        request: Mapping[str, Any],
        max_tokens: int | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of a conversation with those of its media, from their headers. Arguments: as `parse_chat`.

        Raises:
            InputError, MediaError: errors of `process` that can be found from headers.
        """
        parsed = self.parse_chat(messages, render, request, max_tokens=max_tokens)
        if isinstance(parsed, ProcessedPrompt):
            return parsed.token_ids
        with parsed.ledger, watching(parsed.ledger.close), _naming_items(parsed.places):
            parsed.fetch()
            try:
                return self._plan(parsed, identify=False)[1].expand()[0]
            except MissingPlaceholderError as error:
                raise error if parsed.left_out is None else parsed.left_out(error.modality) from None

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
        ids, _ = self.text.tokenize(read)
        sources = self.media.parse(read.media, read.uuids, read.options)
        before, ids = ids, self._info.preprocess_prompt(ids, _num_items(sources))
        with self.media.budget.open(tenant_of(read.salt)) as ledger, watching(ledger.close):
            parsed = ParsedPrompt(
                self, read, ids, sources, 1, ledger, text=self.text.rewritten(self.text.prompt_text(read), before, ids)
            )
            parsed.fetch()
            items, _ = self._plan(parsed, identify=False)
        return [item.plan for item in items]

    def _media(self, chat: RenderedChat) -> dict[str, list[Media]]:
        return _as_vision_chunks(chat) if "vision_chunk" in self._info.modalities else chat.multi_modal_data

    def _places(self, chat: RenderedChat) -> dict[tuple[str, int], str]:
        """Return the place of each item of a conversation by modality and index."""
        counts, places = Counter[str](), dict[tuple[str, int], str]()
        for (modality, _), where in zip(chat.media, chat.places, strict=True):
            name = "vision_chunk" if "vision_chunk" in self._info.modalities else modality
            places[name, counts[name]] = where
            counts[name] += 1
        return places

    def _parse_embeds(self, prompt: Prompt, more: bool) -> ProcessedPrompt:
        """Return the prompt of given `prompt_embeds`. Its token ids are zeros."""
        if self._cross_attention:
            reason = "an encoder-decoder model takes no <<param>>; give the decoder's prompt as text or token ids"
            raise InputError(reason, param="prompt_embeds")
        if self._hidden_size is None:
            reason = "this engine takes no <<param>>; load the model with <<enable_prompt_embeds=>>True"
            raise InputError(reason, code="unsupported", param="prompt_embeds")
        if more:
            reason = "a live session takes <<param>> as its first prompt only; append text or token ids"
            raise InputError(reason, param="prompt_embeds")
        settings = self.media.settings
        rows = read_prompt_embeds(prompt.embeds, self._hidden_size, self._max_model_len - 1, settings.dtype)
        features = prompt_embeds_features(rows, settings.row_bytes // settings.dtype.itemsize, prompt.salt)
        adapter = self.adapter(())
        return ProcessedPrompt(None, (0,) * len(rows), features, salt=prompt.salt or "", adapter=adapter)

    def _read(self, prompt: object) -> Prompt:
        """Read a prompt. Raise InputError for a prompt that suits another kind of model."""
        read = read_prompt(prompt, self._max_model_len, self._max_model_len - self._max_prompt)
        if isinstance(self._info, SupportsEncoderText):
            return self._with_encoder_text(read, self._info)
        if isinstance(read, Prompt):
            return read
        if not self._cross_attention:
            raise InputError(
                'this model has no text encoder; give "prompt" instead of "encoder_prompt" and "decoder_prompt"',
                code="unsupported",
            )
        if read.encoder.text or read.encoder.token_ids or read.decoder is None:
            raise InputError('this model\'s encoder reads media only; give the text as "decoder_prompt"')
        decoder = read.decoder
        return replace(read.encoder, text=decoder.text, token_ids=decoder.token_ids, embeds=decoder.embeds)

    def _with_encoder_text(self, read: Prompt | EncoderDecoderPrompt, info: SupportsEncoderText) -> Prompt:
        """Return the decoder's prompt with the encoder's text as its item. A plain prompt is the encoder's."""
        encoder, decoder = (read, Prompt(token_ids=[])) if isinstance(read, Prompt) else (read.encoder, read.decoder)
        decoder = decoder or Prompt(token_ids=[])
        for part in (encoder, decoder):
            if part.media or part.embeds is not None:
                param = "multi_modal_data" if part.media else "prompt_embeds"
                raise InputError("this model takes texts only; leave out <<param>>", code="unsupported", param=param)
        item = info.encoder_item(list(self.text.tokenize(encoder, encoder=True)[0]))
        return replace(
            encoder,
            text=decoder.text,
            token_ids=decoder.token_ids,
            media={item.modality: [item]},
            truncate_prompt_tokens=None,
        )

    def _parse(
        self,
        prompt: Prompt,
        tokens: tuple[Sequence[int], bool],
        reserve: int,
        text: PromptText | None,
        kind: Literal["prompt", "chat", "turn"],
        max_tokens: int | None = None,
    ) -> ProcessedPrompt | ParsedPrompt:
        """Add the media to a prompt, to a chat with the template's placeholders, or to a prompt that continues another one.

        `tokens`: its token ids, and whether it was cut.
        """
        ids, truncated = tokens
        sources = self.media.parse(prompt.media, prompt.uuids, prompt.options)
        if self._needs_item and not sources and kind != "turn":
            modalities = " or ".join(self._info.modalities)
            reason = f"this model answers from its encoder's input, which is {modalities}; <<give_item>>"
            raise InputError(reason, code="unsupported", param="multi_modal_data")
        if self._cross_attention and sources and kind == "turn":
            raise InputError(
                "a live session of this model takes an item with its first prompt only; start another session",
                code="unsupported",
            )
        # in a chat the template's text placeholders are tokens already, and the user's stay text
        preprocess = self._info.preprocess_chat if kind == "chat" else self._info.preprocess_prompt
        before, ids = ids, preprocess(ids, _num_items(sources))
        parsed = ParsedPrompt(self, prompt, ids, sources, reserve, self.media.budget.open(tenant_of(prompt.salt)))
        parsed = replace(parsed, text=self.text.rewritten(text, before, ids), max_tokens=max_tokens)
        return parsed if parsed.sources else replace(self.finish(parsed), truncated=truncated)

    def _plan(self, parsed: ParsedPrompt, identify: bool = True) -> tuple[list[PlannedItem], PromptLayout]:
        """Plan the items, shrink them if `fit` asks for it, and return them with the prompt's layout, before any expansion."""
        prompt, reserve = parsed.prompt, parsed.reserve
        items = self.media.admit(parsed.sources, parsed.fetches, prompt.options, prompt.salt, parsed.ledger, identify)
        layout = self._lay_out(parsed, items, [item.spans for item in items])
        if prompt.fit is not None and layout.num_tokens + reserve > self._max_model_len:
            text = layout.num_tokens - sum(item.plan.num_tokens for item in items)
            items = self.media.shrink(items, self._max_model_len - reserve - text, prompt.salt)
            layout = self._lay_out(parsed, items, [item.spans for item in items])
        min_tokens = layout.num_tokens - sum(item.plan.num_tokens for item in items if not item.plan.exact)
        if min_tokens > (self._max_prompt if parsed.max_tokens is None else parsed.max_tokens):
            raise self._too_long_error(min_tokens, items)
        return items, layout

    def _too_long_error(self, tokens: int, items: Sequence[PlannedItem]) -> InputError:
        reason = f"the prompt takes {tokens} tokens, but <<max_model_len>> is {self._max_model_len}"
        if not items:
            return InputError(f"{reason}; shorten it", code="too_long", limit=self._max_prompt, value=tokens)
        largest = max((item.plan for item in items), key=lambda plan: plan.num_tokens)
        reason = f"{reason}, {largest.num_tokens} of them for this item; <<shrink_item>>"
        return MediaError(largest.modality, largest.index, reason, code="too_long", limit=self._max_prompt, value=tokens)

    def _lay_out(self, parsed: ParsedPrompt, items: Sequence[PlannedItem], spans: Sequence[Sequence[Span]]) -> PromptLayout:
        """Replace each placeholder by its item's spans. Cross-attention items have no placeholder and no span."""
        ids = parsed.token_ids
        if self._cross_attention:
            token = self._info.cross_token
            if token is None and len(items) > 1:
                raise InputError(
                    f"this model takes one item per prompt, not {len(items)}; give each a prompt of its own", code="unsupported"
                )
            if token is not None and list(ids).count(token) != len(items):
                count, text = list(ids).count(token), self.text.text_of(token)
                reason = f"the prompt has {count} of {text} for {len(items)} items; write it once for each item"
                raise MissingPlaceholderError(reason, items[0].source.modality) if count < len(items) else InputError(reason)
            return PromptLayout([ids], {})
        by_modality: dict[str, list[Sequence[Span]]] = {}
        for item, item_spans in zip(items, spans, strict=True):
            by_modality.setdefault(item.source.modality, []).append(item_spans)
        layout = lay_out(ids, by_modality, self._info.placeholder_ids, self.text.text_of)
        whole_text = self.text.whole_text
        if parsed.text is None or whole_text is None or whole_text.tokenizes_parts or not items:
            return layout
        if layout.num_tokens >= 2 * self._max_model_len:
            return layout  # a prompt that is far too long is refused before its tokens are written
        return retokenize(layout, parsed.text, ids, self.text.placeholder_texts, whole_text.inserted, self._tokenizer)

    def _expand(
        self, layout: PromptLayout, items: Sequence[PlannedItem]
    ) -> tuple[tuple[int, ...], list[list[PlaceholderRange]]]:
        """Write the tokens, and return them with the ranges of each item's pieces in the order of `items`."""
        tokens, ranges = layout.expand()
        if self._cross_attention:  # ranges count the encoder's rows
            cross_token = self._info.cross_token
            if cross_token is None:  # at most one item, which no token stands for
                return tokens, [[PlaceholderRange(0, item.plan.num_embeds)] for item in items]
            starts = [position for position, token in enumerate(tokens) if token == cross_token]
            return tokens, [[PlaceholderRange(start, item.plan.num_embeds)] for start, item in zip(starts, items, strict=True)]
        return tokens, [ranges[item.source.modality][item.source.index] for item in items]


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
