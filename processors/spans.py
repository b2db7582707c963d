"""Expansion of a prompt's placeholders: every placeholder token becomes the tokens of its item."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..callers.errors import InputError
from ..mm.types import PlaceholderRange
from .interface import Span, TextTokens, TokenRun

Piece = tuple[int, ...] | int
"""A part of a span: token ids of text, or a number of encoder rows."""


def build_span(pieces: Sequence[Piece], embed_token: int) -> Span:
    """Return a span of text and encoder rows; `embed_token` is written once per row.

    Example: `[(7,), 3, (8, 9)]` with 5 gives 7 5 5 5 8 9 and the mask F T T T F F.
    """
    runs = [TokenRun((embed_token,), piece, True) if isinstance(piece, int) else TokenRun(piece) for piece in pieces]
    return Span(sum(run.num_tokens for run in runs), sum(run.repeat for run in runs if run.is_embed), lambda: runs)


class MissingPlaceholderError(InputError):
    """An item has no placeholder in the prompt. `modality`: that of the item."""

    def __init__(self, message: str, modality: str) -> None:
        super().__init__(message)
        self.modality = modality


@dataclass
class PromptLayout:
    """A prompt with a span in place of every placeholder. Only `expand` writes the tokens of the spans.

    `parts`: text and spans in order. `inputs`: per modality and input, the indices of its spans in `parts`.
    """

    parts: list[Sequence[int] | Span]
    inputs: dict[str, list[list[int]]]

    @property
    def num_tokens(self) -> int:
        """Tokens of the expanded prompt."""
        return sum(map(_length, self.parts))

    def expand(self) -> tuple[tuple[int, ...], dict[str, list[list[PlaceholderRange]]]]:
        """Return the token ids and, per modality and input, a range per span."""
        tokens: list[int] = []
        ranges_of_parts: list[PlaceholderRange] = []  # one per part; those of text are not used
        for part in self.parts:
            if not isinstance(part, Span):
                ranges_of_parts.append(PlaceholderRange(len(tokens), len(part)))
                tokens.extend(part)
                continue
            offset = ranges_of_parts[-1].offset if part.shared else len(tokens)
            ranges_of_parts.append(PlaceholderRange(offset, part.num_tokens + part.ahead, part.is_embed))
            if not part.shared:
                tokens.extend(part.token_ids)
        ranges = {name: [[ranges_of_parts[i] for i in indices] for indices in inputs] for name, inputs in self.inputs.items()}
        return tuple(tokens), ranges

    def add_text(self, token_ids: Sequence[int], merges: Mapping[tuple[int, int], int]) -> None:
        """Append text, joined to text at the end. `merges`: pairs of tokens that become one where the two texts meet."""
        if not token_ids:
            return
        last = self.parts[-1] if self.parts else None
        text = last if isinstance(last, list) else []
        if text is not last:
            self.parts.append(text)
        merged = merges.get((text[-1], token_ids[0])) if text else None
        if merged is not None:
            text[-1], token_ids = merged, token_ids[1:]
        text.extend(token_ids)

    def add_spans(self, modality: str, spans: Sequence[Span], expanded: bool) -> None:
        """Append the spans of an input. `expanded`: the prompt already contains the text around them."""
        indices: list[int] = []
        for span in spans:
            around = not (expanded or span.shared)
            self.add_text(span.before if around else (), span.merges)
            indices.append(len(self.parts))
            self.parts.append(span)
            self.add_text(span.after if around else (), {})
        self.inputs[modality].append(indices)


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
    layout = PromptLayout([], {name: [] for name in spans})
    position = end = 0  # `end`: where the last placeholder ended
    merges: Mapping[tuple[int, int], int] = {}  # merges of the text after that placeholder
    fills: Mapping[int, tuple[int, ...]] = {}  # its fills
    while position < len(prompt_ids):
        modality = modality_of.get(prompt_ids[position])
        if modality is None:
            position += 1
            continue
        parts = _next_input(modality, len(layout.inputs.get(modality, ())), spans)
        start = _start_of_expanded(prompt_ids, position, end, parts)
        text = prompt_ids[end : position if start is None else start]
        layout.add_text(_filled(text, fills), merges)
        stop = position + 1 if start is None else start + sum(map(_length, parts))
        position = end = _end_of_trailing(prompt_ids, stop, parts[-1])
        layout.add_spans(modality, [*parts[:-1], _lengthened(parts[-1], prompt_ids[stop:end])], expanded=start is not None)
        merges, fills = parts[-1].merges if start is None else {}, parts[-1].fills
    layout.add_text(_filled(prompt_ids[end:], fills), merges)
    for modality, item_spans in spans.items():
        used = len(layout.inputs[modality])
        if used < len(item_spans):
            how = f"write {text_of(placeholder_ids[modality])} once for each item ({len(item_spans)} here), or ask with chat"
            raise MissingPlaceholderError(f"{modality} {used}: the prompt has no placeholder for it; {how}", modality)
    return layout


def _filled(token_ids: Sequence[int], fills: Mapping[int, tuple[int, ...]]) -> Sequence[int]:
    """Return text with the tokens that a span has for numbers in it."""
    return [new for token in token_ids for new in fills.get(token, (token,))] if fills else token_ids


def _end_of_trailing(prompt_ids: Sequence[int], start: int, span: Span) -> int:
    """Return the end of the trailing tokens of a span that begin at `start`."""
    while start < len(prompt_ids) and prompt_ids[start] in span.trailing:
        start += 1
    return start


def _lengthened(span: Span, token_ids: Sequence[int]) -> Span:
    """Return the span with tokens of the prompt at its end, which are not rows. The span's own text stays as it is."""
    if not token_ids:
        return span
    more = TokenRun(TextTokens(token_ids, ""))
    return replace(span, num_tokens=span.num_tokens + len(token_ids), runs=lambda: [*span.runs(), more])


def _next_input(modality: str, index: int, spans: Mapping[str, Sequence[Sequence[Span]]]) -> Sequence[Span]:
    inputs = spans.get(modality, ())
    if index >= len(inputs):
        raise InputError(
            f"{modality} {index}: the prompt has a placeholder for it but <<multi_modal_data>> holds {len(inputs)}; "
            "give one item per placeholder, or write the placeholder once for each item"
        )
    return inputs[index]


def _start_of_expanded(prompt_ids: Sequence[int], position: int, end: int, spans: Sequence[Span]) -> int | None:
    """Return where the spans start if the prompt already contains them around the placeholder at `position`, else None."""
    length, placeholder = sum(map(_length, spans)), prompt_ids[position]
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
    if follows or (stop < len(prompt_ids) and last == placeholder == prompt_ids[stop]):  # the run is longer than the spans
        return None
    return start if _equal(prompt_ids, start, runs) else None


def _equal(prompt_ids: Sequence[int], start: int, runs: Sequence[TokenRun]) -> bool:
    """Return whether the prompt contains the tokens of the runs from `start` on."""
    for run in runs:
        stop = start + run.num_tokens
        if prompt_ids[stop - 1] != run.token_ids[-1] or tuple(prompt_ids[start:stop]) != run.token_ids * run.repeat:
            return False
        start = stop
    return True


def _length(part: Sequence[int] | Span) -> int:
    if not isinstance(part, Span):
        return len(part)
    return 0 if part.shared else part.num_tokens
