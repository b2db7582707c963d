"""Tokenises the text of a prompt together with the text of its items, as publishers' processors do.

A span's tokens are laid beside the prompt's. A tokenizer that gets both as one text may return other tokens where they meet:
byte pairs merge, and added tokens with `lstrip` or `rstrip` absorb the whitespace beside them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

from .interface import Span, TextTokens, TokenRun
from .spans import PromptLayout
from .text.tokenizer import Tokenizer

Pieces = Sequence[tuple[str, bool]]
"""Text in order, each piece with True if special tokens in it are recognised."""


@dataclass(frozen=True)
class PromptText:
    """The text that a prompt was tokenised from.

    Args:
        pieces: one trusted piece, or the segments of a rendered chat.
        encode: returns the ids of pieces, tokenised as the prompt was.
        first: tokens that the family puts before the others.
        rewritten: the family changed more of the prompt's tokens than its placeholders, so the text is not theirs.
    """

    pieces: Pieces
    encode: Callable[[Pieces], Sequence[int]]
    first: tuple[int, ...] = ()
    rewritten: bool = False


def retokenize(
    layout: PromptLayout,
    text: PromptText,
    prompt_ids: Sequence[int],
    placeholders: Mapping[str, Sequence[str]],
    inserted: Mapping[str, tuple[str, str]],
    tokenizer: Tokenizer,
) -> PromptLayout:
    """Return the layout with the tokens of its whole text, rows of items left out. It is unchanged if they are the same.

    Args:
        prompt_ids: the tokens in which the placeholders were searched.
        placeholders: modality -> texts that stand for an item in a prompt.
        inserted: modality -> text before and after an item that the family has inserted into the prompt.
    """
    spans = [part for part in layout.parts if isinstance(part, Span)]
    if not any(_may_join(span, placeholders, tokenizer) for span in spans) or not _has_text(spans):
        return layout
    runs = _runs(layout)
    pieces = None if text.rewritten else _whole_text(layout, text.pieces, placeholders, inserted, tokenizer)
    if pieces is not None:
        ids = [*text.first, *text.encode(pieces)]
    else:
        whole = [token for _, run in runs for token in (run.token_ids if run.is_embed else run.token_ids * run.repeat)]
        decoded = tokenizer.decode(whole, skip_special_tokens=False)
        ids = tokenizer.encode(decoded, add_special_tokens=False)
        if _control(ids, tokenizer) != _control(whole, tokenizer) or not _is_stable(prompt_ids, tokenizer):
            return layout
    return _with_tokens(layout, runs, ids) or layout


def _has_text(spans: Sequence[Span]) -> bool:
    """Return whether every span has rows, and tokens of its own."""
    return all(not span.shared and span.num_embeds for span in spans)


def _may_join(span: Span, placeholders: Mapping[str, Sequence[str]], tokenizer: Tokenizer) -> bool:
    """Return whether text beside a span, or within it, may be tokenised otherwise together with the span's tokens."""
    runs = [run for run in (TokenRun(span.before), *span.runs(), TokenRun(span.after)) if run.num_tokens]
    if not runs or all(run.is_embed for run in runs):
        return False
    edges = {runs[0].token_ids[0], runs[-1].token_ids[-1]}
    tokens = {token for run in runs for token in run.token_ids}
    literal_ids = {tokenizer.token_to_id(literal) for several in placeholders.values() for literal in several}
    return not tokenizer.splitting_ids >= edges or not tokenizer.joining_ids.isdisjoint(tokens | literal_ids)


def _runs(layout: PromptLayout) -> list[tuple[int, TokenRun]]:
    """Return the runs of tokens of all parts, with the index of the part."""
    return [
        (index, run)
        for index, part in enumerate(layout.parts)
        for run in (part.runs() if isinstance(part, Span) else [TokenRun(tuple(part))])
        if run.num_tokens
    ]


def _whole_text(
    layout: PromptLayout,
    pieces: Pieces,
    placeholders: Mapping[str, Sequence[str]],
    inserted: Mapping[str, tuple[str, str]],
    tokenizer: Tokenizer,
) -> Pieces | None:
    """Return the prompt's text with the text of the items, each run of rows once. None if the placeholders do not match."""
    inputs = sorted((indices, name) for name, several in layout.inputs.items() for indices in several)
    names = {literal: name for name, several in placeholders.items() if name in layout.inputs for literal in several if literal}
    if not names:
        return None
    pattern = re.compile("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")")
    out: list[tuple[str, bool]] = []
    remaining: Iterator[tuple[list[int], str]] = iter(inputs)
    for text, trusted in pieces:
        for part in pattern.split(text) if trusted else [text]:
            if not trusted or part not in names:
                out.append((part, trusted))
                continue
            indices, name = next(remaining, ([], ""))
            if name != names[part]:
                return None
            before, after = inserted.get(name, ("", ""))
            whole = "".join(_text_of(layout.parts[index], tokenizer) for index in indices)
            out.append((before + whole + after, True))
    return out if next(remaining, None) is None else None


def _text_of(part: Sequence[int] | Span, tokenizer: Tokenizer) -> str:
    """Return the text of a span, each run of rows once."""
    assert isinstance(part, Span)
    texts = list[str]()
    for run in (TokenRun(part.before), *part.runs(), TokenRun(part.after)):
        ids = run.token_ids
        text = ids.text if isinstance(ids, TextTokens) else tokenizer.decode(ids, skip_special_tokens=False)
        texts.append(text if run.is_embed else text * run.repeat)
    return "".join(texts)


def _control(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    return [token for token in ids if token in tokenizer.all_special_ids]


def _is_stable(ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Return whether tokens are those of their own text. They are not where a tokenizer adds spaces, for example."""
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return tokenizer.encode(text, add_special_tokens=False) == list(ids)


def _with_tokens(layout: PromptLayout, runs: Sequence[tuple[int, TokenRun]], ids: Sequence[int]) -> PromptLayout | None:
    """Return the layout with these tokens between the runs of rows. None if these are not the same rows."""
    rows = [number for number, (_, run) in enumerate(runs) if run.is_embed]
    bounds = _find_rows([runs[number][1].token_ids for number in rows], ids)
    if bounds is None:
        return None
    parts: list[list[TokenRun]] = [[] for _ in layout.parts]
    starts, ends = [start for start, _ in bounds], [end for _, end in bounds]
    between_rows = zip(pairwise([-1, *rows, len(runs)]), [0, *ends], [*starts, len(ids)], strict=True)
    for (first, last), start, stop in between_rows:
        between = [(index, run.token_ids * run.repeat) for index, run in runs[first + 1 : last]]
        left = runs[first][0] if first >= 0 else -1
        right = runs[last][0] if last < len(runs) else -1
        shared = _distribute(between, tuple(ids[start:stop]), left, right)
        if shared is None:
            return None
        for index, tokens in shared:
            parts[index].append(TokenRun(tokens))
        if last < len(runs):
            parts[right].append(runs[last][1])
    return _rebuilt(layout, parts)


def _find_rows(rows: Sequence[tuple[int, ...]], ids: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return where the tokens of each run of rows start and end. None if there are not exactly these rows, in this order."""
    kinds = {token for tokens in rows for token in tokens}
    places = [position for position, token in enumerate(ids) if token in kinds]
    if [ids[position] for position in places] != [token for tokens in rows for token in tokens]:
        return None
    offsets = [0, *accumulate(map(len, rows))]
    bounds = [(places[offset], places[end - 1] + 1) for offset, end in pairwise(offsets)]
    whole = all(end - start == len(tokens) for (start, end), tokens in zip(bounds, rows, strict=True))
    return bounds if whole else None


def _distribute(
    between: Sequence[tuple[int, tuple[int, ...]]], ids: tuple[int, ...], left: int, right: int
) -> list[tuple[int, tuple[int, ...]]] | None:
    """Divide the tokens between two runs of rows among the parts there: the end of a span, text, the start of a span.

    A span keeps its own tokens as far as they are still the same. The text between takes the others, or, if there is none, the
    later span that has tokens there.
    """
    before = tuple(token for _, tokens in between for token in tokens)
    if before == ids:
        return list(between)
    if left == right:
        return [(left, ids)]
    tail = tuple(token for index, tokens in between if index == left for token in tokens)
    head = tuple(token for index, tokens in between if index == right for token in tokens)
    texts = [index for index, _ in between if index not in (left, right)]
    kept = _common(tail, ids)
    rest = ids[kept:]
    last = _common(head[::-1], rest[::-1])
    middle = rest[: len(rest) - last]
    if len(set(texts)) > 1:
        return None
    receiver = texts[0] if texts else right if head else left
    shares = [(left, ids[:kept]), (receiver, middle), (right, rest[len(rest) - last :])]
    return [(index, tokens) for index, tokens in shares if tokens]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common start of two sequences."""
    pairs = zip(first, second, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _rebuilt(layout: PromptLayout, parts: Sequence[Sequence[TokenRun]]) -> PromptLayout:
    out: list[Sequence[int] | Span] = []
    for part, runs in zip(layout.parts, parts, strict=True):
        if isinstance(part, Span):
            tokens = sum(run.num_tokens for run in runs)
            out.append(replace(part, num_tokens=tokens, runs=partial(tuple, runs)))
        else:
            out.append([token for run in runs for token in run.token_ids])
    return PromptLayout(out, layout.inputs)
