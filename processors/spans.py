"""Expands the placeholders of a prompt: every placeholder token becomes the tokens of its item."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..mm.errors import InputError
from ..mm.types import PlaceholderRange
from .interface import Span, TokenRun

Piece = tuple[int, ...] | int
"""A part of a span: token ids of text, or a number of encoder rows."""


def build_span(pieces: Sequence[Piece], embed_token: int) -> Span:
    """A span of text and rows in turn; `embed_token` is written once per row.

    Example: `[(7,), 3, (8, 9)]` with 5 gives 7 5 5 5 8 9 and the mask F T T T F F.
    """
    runs = [TokenRun((embed_token,), piece, True) if isinstance(piece, int) else TokenRun(piece) for piece in pieces]
    return Span(sum(run.num_tokens for run in runs), sum(run.repeat for run in runs if run.is_embed), lambda: runs)


@dataclass(frozen=True)
class PromptLayout:
    """A prompt with a span in place of every placeholder. Only `expand` writes the tokens of the spans.

    `parts`: text and spans in order. `inputs`: per modality and input, the indices of its spans in `parts`.
    """

    parts: Sequence[Sequence[int] | Span]
    inputs: Mapping[str, Sequence[Sequence[int]]]

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the expanded prompt."""
        return sum(_length(part) for part in self.parts)

    def expand(self) -> tuple[tuple[int, ...], dict[str, list[list[PlaceholderRange]]]]:
        """The token ids and, per modality and input, a range per span."""
        tokens: list[int] = []
        offsets: list[int] = []
        for part in self.parts:
            is_shared = isinstance(part, Span) and part.shared
            offsets.append(offsets[-1] if is_shared else len(tokens))
            if not is_shared:
                tokens.extend(part.token_ids if isinstance(part, Span) else part)
        ranges = {
            modality: [[self._range(index, offsets[index]) for index in indices] for indices in inputs]
            for modality, inputs in self.inputs.items()
        }
        return tuple(tokens), ranges

    def _range(self, index: int, offset: int) -> PlaceholderRange:
        span = self.parts[index]
        assert isinstance(span, Span)
        return PlaceholderRange(offset, span.num_tokens, span.is_embed)


def lay_out(
    prompt_ids: Sequence[int],
    spans: Mapping[str, Sequence[Sequence[Span]]],
    placeholder_ids: Mapping[str, int],
    text_of: Callable[[int], str] = "token {}".format,
) -> PromptLayout:
    """Find the placeholder of each input, left to right, and put the input's spans there.

    A run of exactly the next input's own tokens counts as a placeholder that is already expanded; any other placeholder
    token stands for one input. Example: placeholder 9 and an input of one span of 3 nines: [1, 9, 2] and [1, 9, 9, 9, 2]
    both expand to [1, 9, 9, 9, 2] with the range (1, 3).

    Args:
        spans: modality -> the spans of each input.
        placeholder_ids: modality -> its placeholder token.
        text_of: the text of a token, for error messages.

    Raises:
        InputError: more inputs than placeholders or more placeholders than inputs, by modality and index.
    """
    modality_of = {placeholder_ids[name]: name for name in placeholder_ids}
    layout = _LayoutBuilder({name: [] for name in spans})
    position = end = 0  # `end`: where the last placeholder ended
    while position < len(prompt_ids):
        modality = modality_of.get(prompt_ids[position])
        if modality is None:
            position += 1
            continue
        own = _next_input(modality, len(layout.inputs.get(modality, ())), spans)
        start = _start_of_expanded(prompt_ids, position, end, own)
        layout.add_text(prompt_ids[end : position if start is None else start])
        layout.add_spans(modality, own, expanded=start is not None)
        position = end = position + 1 if start is None else start + _num_tokens(own)
    layout.add_text(prompt_ids[end:])
    for modality, given in spans.items():
        used = len(layout.inputs[modality])
        if used < len(given):
            raise InputError(
                f"{modality} {used}: the prompt has only {used} placeholder(s) for {len(given)} item(s); "
                f"write {text_of(placeholder_ids[modality])} once for each item, or ask with chat"
            )
    return layout.build()


class _LayoutBuilder:
    """Collects the parts of a PromptLayout; the text between two spans is one part, in which newlines are merged."""

    def __init__(self, inputs: dict[str, list[list[int]]]) -> None:
        self.inputs = inputs
        self._parts: list[Sequence[int] | Span] = []
        self._text: list[int] = []
        self._merges: Mapping[tuple[int, int], int] = {}  # for the next text

    def add_text(self, token_ids: Sequence[int]) -> None:
        if token_ids:
            self._append(token_ids, self._merges)
            self._merges = {}

    def add_spans(self, modality: str, spans: Sequence[Span], expanded: bool) -> None:
        """`expanded`: the prompt already contains the text around the spans."""
        indices: list[int] = []
        for span in spans:
            if not (expanded or span.shared):
                self._append(span.before, span.newline_merges)
            self._flush()
            indices.append(len(self._parts))
            self._parts.append(span)
            if not (expanded or span.shared):
                self._append(span.after, {})
        self._merges = {} if expanded else spans[-1].newline_merges
        self.inputs[modality].append(indices)

    def build(self) -> PromptLayout:
        self._flush()
        return PromptLayout(self._parts, self.inputs)

    def _append(self, token_ids: Sequence[int], merges: Mapping[tuple[int, int], int]) -> None:
        merged = merges.get((self._text[-1], token_ids[0])) if self._text and token_ids else None
        if merged is not None:
            self._text[-1], token_ids = merged, token_ids[1:]
        self._text.extend(token_ids)

    def _flush(self) -> None:
        if self._text:
            self._parts.append(self._text)
            self._text = []


def _next_input(modality: str, index: int, spans: Mapping[str, Sequence[Sequence[Span]]]) -> Sequence[Span]:
    given = spans.get(modality, ())
    if index >= len(given):
        raise InputError(
            f"{modality} {index}: the prompt has a placeholder for it but multi_modal_data holds {len(given)}; "
            "give one item per placeholder, or write the placeholder once for each item"
        )
    return given[index]


def _start_of_expanded(prompt_ids: Sequence[int], position: int, end: int, spans: Sequence[Span]) -> int | None:
    """Where the spans start if the prompt already contains them around the placeholder at `position`, else None."""
    length, placeholder = _num_tokens(spans), prompt_ids[position]
    if not 1 < length <= len(prompt_ids) - end:
        return None
    runs = [run for span in spans if not span.shared for run in span.runs() if run.num_tokens]
    before = 0  # tokens of the spans before the first placeholder token in them
    for run in runs:
        if placeholder in run.token_ids:
            before += run.token_ids.index(placeholder)
            break
        before += run.num_tokens
    start, stop = position - before, position - before + length
    if start < end or stop > len(prompt_ids):
        return None
    first, last = runs[0].token_ids[0], runs[-1].token_ids[-1]
    follows = start > 0 and first == placeholder == prompt_ids[start - 1]
    if follows or (stop < len(prompt_ids) and last == placeholder == prompt_ids[stop]):  # a longer run than the spans'
        return None
    return start if _equal(prompt_ids, start, runs) else None


def _equal(prompt_ids: Sequence[int], start: int, runs: Sequence[TokenRun]) -> bool:
    """True if the prompt contains the tokens of the runs from `start` on."""
    for run in runs:
        stop = start + run.num_tokens
        if prompt_ids[stop - 1] != run.token_ids[-1] or tuple(prompt_ids[start:stop]) != run.token_ids * run.repeat:
            return False
        start = stop
    return True


def _num_tokens(spans: Sequence[Span]) -> int:
    return sum(map(_length, spans))


def _length(part: Sequence[int] | Span) -> int:
    if not isinstance(part, Span):
        return len(part)
    return 0 if part.shared else part.num_tokens
