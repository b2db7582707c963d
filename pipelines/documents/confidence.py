"""Computes confidences of words: for the reader of printed lines from scores of characters, for models from those of tokens.

The reader's confidences are calibrated: `benchmarks/confidence.py` measured on rendered pages how many words with a score are
right, and assets/documents/confidence.json holds the result. A model's confidences are the probabilities that it gives to the
tokens of a word. They are not calibrated, because models, their prompts and their pages differ.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from .blocks import Block, Line

CALIBRATION = Path(__file__).parents[2] / "assets" / "documents" / "confidence.json"
CharScores = tuple[float, ...]
"""Scores of a line's characters except spaces, from 0 to 1; () if its source gives none."""
_WORD = re.compile(r"\S+")
_DIGITS = 2  # of a model's confidences, whose last bits depend on the batch
_MAX_AHEAD = 2048  # characters of an answer, from the last word found on, in which the next word is searched


@cache
def _knots() -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the knots of the calibration: scores in ascending order, and the share of right words at each."""
    knots = json.loads(CALIBRATION.read_text())["knots"]
    scores, shares = zip(*knots, strict=True)
    return scores, shares


def calibrated(score: float) -> float:
    """Return the share of words with this score that are right. It is interpolated linearly between knots.

    Args:
        score: the mean of the scores of a word's characters.
    """
    scores, shares = _knots()
    after = bisect_right(scores, score)
    if after in (0, len(scores)):
        return shares[min(after, len(scores) - 1)]
    low, high = scores[after - 1], scores[after]
    return shares[after - 1] + (score - low) / (high - low) * (shares[after] - shares[after - 1])


def word_scores(text: str, chars: CharScores) -> list[float]:
    """Return the score of each word of a text: the mean of the scores of its characters."""
    start, scores = 0, list[float]()
    for word in text.split():
        scores.append(sum(chars[start : start + len(word)]) / len(word))
        start += len(word)
    return scores


def scored_line(text: str, box: tuple[float, float, float, float], chars: CharScores) -> Line:
    """Return a line with the calibrated confidences of its words."""
    if not chars:
        return Line(text, box)
    words = tuple(round(calibrated(score), 4) for score in word_scores(text, chars))
    return Line(text, box, mean(words), words)


def mean(confidences: Iterable[float], digits: int = 4) -> float | None:
    """Return the rounded mean of the confidences of words, None if there are none."""
    values = list(confidences)
    return round(sum(values) / len(values), digits) if values else None


def confidence_of(lines: Iterable[Line]) -> float | None:
    """Return the mean confidence of the words of lines, None if they have none."""
    return mean(word for line in lines for word in line.word_confidences)


def with_token_confidences(
    blocks: Sequence[Block], tokens: Sequence[tuple[str, float]]
) -> tuple[tuple[Block, ...], float | None]:
    """Return the blocks of a model's answer with confidences, and the confidence of the page.

    The confidence of a word is the product of the probabilities of its tokens. Words that the answer writes in another way
    than the blocks, such as with escaped characters, do not count.

    Args:
        tokens: text and log probability of each token of the answer, in order.
    """
    answer, token_indices = _characters(tokens)
    at, scored, all_words = 0, list[Block](), list[float]()
    for block in blocks:
        words = list[float]()
        for word in _WORD.findall(block.text):
            start = answer.find(word, at, at + _MAX_AHEAD + len(word))
            if start >= 0:
                at = start + len(word)
                logprob = sum(tokens[index][1] for index in dict.fromkeys(token_indices[start:at]))
                words.append(math.exp(min(logprob, 0.0)))
        scored.append(replace(block, confidence=mean(words, _DIGITS)))
        all_words += words
    return tuple(scored), mean(all_words, _DIGITS)


def _characters(tokens: Sequence[tuple[str, float]]) -> tuple[str, list[int]]:
    """Return the characters of an answer without spaces, and the index of the token of each of them."""
    pairs = [(char, index) for index, (text, _) in enumerate(tokens) for char in text if not char.isspace()]
    return "".join(char for char, _ in pairs), [index for _, index in pairs]
