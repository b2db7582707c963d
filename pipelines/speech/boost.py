"""Phrases that a call expects to be spoken, such as names, as arguments of the logits processor that raises their tokens."""

from __future__ import annotations

import unicodedata
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...callers.errors import InputError, short_repr
from ...engine.outputs import RequestOutput
from ...engine.phrase_boost import MAX_WEIGHT, BoostPhrases
from ...engine.sampling_params import SamplingParams
from ..validation import is_number

if TYPE_CHECKING:
    from ...engine.engine import Engine

Boosted = Mapping[str, Any] | None
"""Arguments of `BoostPhrases`; None: no phrases are expected."""
Boost = Sequence[str | tuple[str, float]]
WEIGHT = 3.0  # default of a phrase
_MAX_ROUNDS = 16  # answers about a window until all phrases in it are finished
_MAX_TOKENS_FACTOR, _MAX_MORE_TOKENS = 2, 32  # by which an answer with phrases may be longer than the one without
MAX_PHRASES = 1000
_MAX_CHARACTERS = 100  # of a phrase
_MARKS = "-–—/'’\"“”„‘«»([{¿¡&@#.,:;!?…\n"
_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")  # scripts without spaces between words


def read_boost(boost: object) -> tuple[tuple[str, float], ...]:
    """Return the phrases with their weights.

    Raises:
        InputError: it is no list of phrases or (phrase, weight) pairs, has too many, or a phrase or weight is wrong.
    """
    if not isinstance(boost, list | tuple):
        reason = f"<<param=>>{short_repr(boost)} must be a list of phrases, or of pairs of a phrase and a weight"
        raise InputError(reason, code="invalid_value", param="boost")
    if len(boost) > MAX_PHRASES:
        reason = f"<<param>> has {len(boost)} phrases, the limit is {MAX_PHRASES}; give fewer"
        raise InputError(reason, code="over_limit", param="boost", limit=MAX_PHRASES, value=len(boost))
    return tuple(_read_phrase(index, entry) for index, entry in enumerate(boost))


def _read_phrase(index: int, entry: object) -> tuple[str, float]:
    phrase, weight = entry if isinstance(entry, list | tuple) and len(entry) == 2 else (entry, WEIGHT)
    if not isinstance(phrase, str) or not (text := " ".join(phrase.split())):
        raise _error(index, f"{short_repr(entry)} must be a phrase that is not empty, or a pair of one and a weight")
    if len(text) > _MAX_CHARACTERS:
        raise _error(index, f"{short_repr(text)} has {len(text)} characters, the limit is {_MAX_CHARACTERS}")
    if not is_number(weight) or not 0 < weight <= MAX_WEIGHT:
        raise _error(index, f"the weight {short_repr(weight)} of {short_repr(text)} must be above 0 and at most {MAX_WEIGHT:g}")
    return text, float(weight)


def _error(index: int, reason: str) -> InputError:
    return InputError(f"<<param>>[{index}]: {reason}", code="invalid_value", param="boost")


def boost_arguments(engine: Engine, phrases: Sequence[tuple[str, float]]) -> dict[str, Any] | None:
    """Return the arguments of `BoostPhrases`, None without phrases.

    Raises:
        InputError: the model's vocabulary cannot write a phrase.
    """
    if not phrases:
        return None
    assert engine.speech is not None
    is_decoder = engine.speech.frame_rule() is None and engine.speech.stream_rule() is None
    ignored = () if is_decoder else (*engine.tokenizer.all_special_ids, *engine.speech.placeholder_ids.values())
    spellings = list[tuple[list[int], float, bool]]()
    for index, (phrase, weight) in enumerate(phrases):
        found = [(tokens, weight, after_boundary) for tokens, after_boundary in _spellings(engine, phrase)]
        if not found:
            raise _error(index, f"the model cannot write {short_repr(phrase)}; its vocabulary lacks a character")
        spellings += found
    return {"phrases": spellings, "boundaries": _boundaries(engine), "ignored": sorted(ignored)}


async def boosted_output(
    plain: RequestOutput, boost: Boosted, answer: Callable[[Mapping[str, Any], Sequence[int]], Awaitable[RequestOutput]]
) -> RequestOutput:
    """Return an output in which phrases have their scores, or `plain`, the output without them, if that is better.

    The score of a phrase counts only if it is finished. An answer cannot take back its tokens, so one that leaves a phrase
    unfinished is written again, and no phrase begins at that place. Its own log probability and the scores decide at the end.

    Args:
        answer: makes an output for arguments of `BoostPhrases`, and for tokens of which it probably has many.
    """
    if boost is None or plain.error:
        return plain
    rule, skipped, drafted = BoostPhrases(**boost), list[int](), plain.outputs[0].token_ids
    plain_tokens, plain_score = drafted, rule.find(drafted).score
    for _ in range(_MAX_ROUNDS):
        output = await answer({**boost, "skipped": skipped}, drafted)
        if output.error:
            return output
        drafted = output.outputs[0].token_ids
        phrases = rule.find(drafted)
        left = [first for first, end in phrases.unfinished if first not in skipped and drafted[:end] != plain_tokens[:end]]
        if not left:
            gained = phrases.score - plain_score
            lost = (plain.outputs[0].cumulative_logprob or 0.0) - (output.outputs[0].cumulative_logprob or 0.0)
            is_cut = output.outputs[0].finish_reason == "length" != plain.outputs[0].finish_reason
            return output if gained > 0 and gained >= lost and not is_cut else plain
        skipped.append(left[0])
    return plain


def max_tokens(params: SamplingParams, drafted: Sequence[int]) -> int:
    """Return how many tokens an answer with phrases may have, after one of the tokens `drafted`."""
    limit = _MAX_TOKENS_FACTOR * len(drafted) + _MAX_MORE_TOKENS
    return limit if params.max_tokens is None else min(limit, params.max_tokens)


def _spellings(engine: Engine, phrase: str) -> Iterator[tuple[list[int], bool]]:
    """Yield the tokens of a phrase after a space, and without one; the latter begins only at a boundary between words."""
    spaced, plain = _tokens_after(engine, "a", f" {phrase}"), _tokens_after(engine, "(", phrase)
    needs_boundary = not unicodedata.name(phrase[0], "").startswith(_UNSPACED)
    for tokens, after_boundary in ((spaced, False), (plain, needs_boundary)):
        is_known = bool(tokens) and engine.tokenizer.all_special_ids.isdisjoint(tokens)  # such as <unk>
        if is_known and (tokens is spaced or tokens != spaced):
            yield tokens, after_boundary


def _tokens_after(engine: Engine, before: str, text: str) -> list[int]:
    """Return the tokens of a text in a sentence. Alone, some tokenizers put a space before it."""
    encode = engine.tokenizer.encode_ordinary
    first, tokens = encode(before), encode(before + text)
    return tokens[len(first) :] if tokens[: len(first)] == first else encode(text)


def _boundaries(engine: Engine) -> list[int]:
    """Return control tokens and those of marks, after which a word may begin without a space."""
    marks = (engine.tokenizer.encode_ordinary(f"{space}{mark}") for mark in _MARKS for space in ("", " "))
    return sorted(engine.tokenizer.all_special_ids | {tokens[-1] for tokens in marks if tokens})
