"""`LiveSession`: a conversation whose tokens stay in the KV cache between its turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue

from ..callers.errors import InputError
from ..mm.types import MultiModalFeature
from ..processors.elements.element import ImageScale
from ..processors.elements.marked_text import located_modalities
from ..processors.text.tokenizer import Tokenizer
from .engine import Engine
from .errors import NotPicklable
from .frontend.input_processor import ParsedPrompt
from .frontend.output_processor import OutputBuilder
from .frontend.processed_prompt import ProcessedPrompt
from .frontend.request_handle import Append, End, RequestHandle, Truncate
from .outputs import RequestOutput


@dataclass(frozen=True, eq=False)
class Turn:
    """Items whose rows go with the next generated tokens of a sequence that is held open, for `AsyncLLM.append`.

    `close`: end the sequence with this answer.
    """

    handle: RequestHandle
    features: tuple[MultiModalFeature, ...]
    close: bool

    def message(self, tokenizer: Tokenizer) -> Append:
        """Return the message that appends the items and begins the answer."""
        builder = OutputBuilder(self.handle.name, self.handle.input.params, tokenizer)
        has_image = any(feature.modality == "image" for feature in self.features)  # whose size is not known here
        answer_format = None if has_image else self.handle.answer.builder.prepared.answer_format
        builder.start(ProcessedPrompt(None, (), answer_format=answer_format))
        return Append(self.handle, builder, (), self.features, close=self.close)


class LiveSession(NotPicklable):
    """A sequence that is held open: a prompt, its answer, more input, the next answer.

    Made by `LLM.live`. It ends with `close`, with its `with` block, or when it is garbage collected. Every turn uses the same
    sampling parameters. A stop string ends a turn; its tokens stay in the sequence. Use it from one thread at a time.
    """

    def __init__(self, engine: Engine, handle: RequestHandle) -> None:
        if (num_answers := handle.input.params.n) > 1:
            raise InputError(f"a live session has one answer per turn, not n={num_answers}; pass n=1")
        self._engine = engine
        self._mail: SimpleQueue[None] = SimpleQueue()  # an entry for each time that there is new output
        self._handle = handle
        handle.input = replace(handle.input, hold_open=True)
        self._last: RequestOutput | None = None
        self._kept: tuple[int, ...] = ()  # tokens of the sequence after the last turn
        self._no_answer = ""  # why the last answer is not one to the current tokens; "" if it is
        self._items: tuple[tuple[int, str], ...] | None = None  # offset and modality of each item; None in the first turn
        self._images: tuple[tuple[int, ImageScale], ...] = ()  # offset and scale of each image, for elements of answers
        engine.loop.submit([handle], partial(_post, self._mail), stream=True)
        engine.loop.drop_with(self, self._handle)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens of the sequence after the last complete answer."""
        return self._kept

    def stream(self) -> Iterator[RequestOutput]:
        """Yield outputs as the answer of this turn grows. Each one holds the answer so far.

        Raises:
            InputError: the last call was `truncate`, or an `append` that failed, so there is nothing to answer.
        """
        if self._no_answer:
            raise InputError(f"there is no new answer: {self._no_answer}; append something first")
        while self._last is None:
            self._mail.get()
            output = self._handle.take()
            if output is not None:
                if output.finished:
                    self._last = output
                    self._kept = (*output.prompt_token_ids, *output.outputs[0].token_ids)
                    if self._items is None:
                        self._items = _item_offsets(self._handle.answer.builder.prepared.features)
                        self._images = _image_scales(self._handle.answer.builder.prepared)
                yield output

    def answer(self) -> RequestOutput:
        """Wait for the whole answer of this turn and return it. Raise InputError as `stream`.

        After `close` or the `with` block, it returns the last answer again. If `close` came before the answer was complete, the
        answer ends there, with the finish reason "abort".
        """
        for _ in self.stream():
            pass
        assert self._last is not None
        return self._last

    def append(self, part: object) -> None:
        """Add text, tokens or media, in any form of a prompt, and begin the next answer.

        Raises:
            InputError: the part cannot be served or does not fit, or the session has ended.
            MediaError: an item is refused, or cannot be decoded or processed.
        """
        self._wait()
        try:
            self._append(part)
        except Exception:
            if self._handle.keep:  # otherwise the session has ended; its last answer can still be read
                self._no_answer = "the last append failed"
            raise
        self._no_answer, self._last = "", None

    def _wait(self) -> None:
        if self._last is None:
            self.answer()

    def _append(self, part: object) -> None:
        parsed = self._engine.inputs.parse(part, more=True)
        prepared = parsed.finish() if isinstance(parsed, ParsedPrompt) else parsed
        features = tuple(
            replace(feature, range=replace(feature.range, offset=feature.range.offset + len(self._kept)))
            for feature in prepared.features
        )
        items = (*(self._items or ()), *_item_offsets(features))
        chosen = self._handle.input.adapter is not None  # by the request, for all turns
        adapter = None if chosen else self._engine.inputs.adapter(modality for _, modality in items)
        turn = OutputBuilder(self._handle.name, self._handle.input.params, self._engine.tokenizer)
        prompt = replace(prepared, token_ids=(*self._kept, *prepared.token_ids), features=features)
        images = (*self._images, *_image_scales(prompt))
        answer_format = prompt.answer_format and replace(prompt.answer_format, images=tuple(scale for _, scale in images))
        turn.start(replace(prompt, answer_format=answer_format))

        self._engine.loop.call(Append(self._handle, turn, prepared.token_ids, features, adapter)).result()
        self._items, self._images = items, images

    def truncate(self, num_tokens: int) -> None:
        """Roll the sequence and its KV cache back to `num_tokens` tokens. Raise InputError if that cuts an item."""
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int):
            raise InputError(f"num_tokens must be an integer, not {str(num_tokens)[:40]!r}")
        self._wait()
        self._engine.loop.call(Truncate(self._handle, num_tokens)).result()
        self._kept, self._no_answer = self._kept[:num_tokens], "the session was truncated"
        self._items = tuple((offset, modality) for offset, modality in self._items or () if offset < num_tokens)
        self._images = tuple((offset, scale) for offset, scale in self._images if offset < num_tokens)

    def close(self) -> None:
        """End the session and free its memory. A running answer ends with the finish reason "abort"."""
        self._engine.loop.send(End(self._handle, "abort"))

    def __enter__(self) -> LiveSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _item_offsets(features: Sequence[MultiModalFeature]) -> tuple[tuple[int, str], ...]:
    """Return offset and modality of each item."""
    return tuple((feature.range.offset, feature.modality) for feature in features)


def _image_scales(prepared: ProcessedPrompt) -> tuple[tuple[int, ImageScale], ...]:
    """Return offset and scale of each image, for models that name elements; the offset of a cross-attention image is 0."""
    if prepared.answer_format is None:
        return ()
    owners = prepared.item_of
    located = located_modalities(prepared.answer_format.format)
    images = [i for i, item in enumerate(prepared.items) if item.modality in located]
    offsets = [prepared.features[owners.index(i)].range.offset if i in owners else 0 for i in images]
    return tuple(zip(offsets, prepared.answer_format.images, strict=True))


def _post(mail: SimpleQueue[None], handles: Sequence[RequestHandle]) -> None:
    """The `post` of a session's request. The request itself is not in the mail, which its `post` refers to."""
    mail.put(None)
