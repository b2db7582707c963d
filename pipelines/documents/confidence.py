"""Computes confidences of words: for printed lines from scores of characters, for models from probabilities of tokens.

A `Calibration` turns such a score into the share of words with this score that are right. RapidOCR's was measured by
`benchmarks/confidence.py` on rendered pages, and is in assets/documents/confidence.json. Models, their prompts and their pages
differ, so that none is given for them: `sensorium read --fit-calibration` measures one on pages whose text is known.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...callers.errors import InputError, short_repr
from .blocks import Block, Line

CALIBRATION = Path(__file__).parents[2] / "assets" / "documents" / "confidence.json"
"""RapidOCR's calibration."""
CharScores = tuple[float, ...]
"""Scores of a line's characters except spaces, from 0 to 1; () if its source gives none."""
_WORD = re.compile(r"\S+")
_DIGITS = 2  # of a model's confidences, whose last bits depend on the batch
_WORD_DIGITS = 3  # the same of words: most of them have nearly 1
_MAX_AHEAD = 2048  # characters of an answer, from the last word found on, in which the next word is searched


@dataclass(frozen=True)
class Calibration:
    """The share of right words by their score.

    Args:
        knots: scores in ascending order with the shares at them, neither of which fall.
        reader: the model or reader whose scores they are. question: the prompt of a model.
    """

    knots: tuple[tuple[float, float], ...]
    reader: str = ""
    question: str | None = None

    def __call__(self, score: float) -> float:
        """Return the share of words with this score that are right, interpolated linearly between knots."""
        after = bisect_right(self.knots, score, key=lambda knot: knot[0])
        if after in (0, len(self.knots)):
            return self.knots[min(after, len(self.knots) - 1)][1]
        (low, low_share), (high, high_share) = self.knots[after - 1 : after + 1]
        return low_share + (score - low) / (high - low) * (high_share - low_share)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.knots).encode()).hexdigest()[:16]


def load_calibration(path: str | os.PathLike[str], reader: str, question: str | None = None) -> Calibration:
    """Return the calibration that `--fit-calibration` has written for a reader or model.

    Raises:
        InputError: the file cannot be read, is no calibration, or is that of another reader, model or prompt.
    """
    name = short_repr(os.fspath(path))
    try:
        values = json.loads(Path(path).read_bytes())
        calibration = Calibration(_checked_knots(values["knots"]), str(values["reader"]), values.get("question"))
    except OSError as error:
        raise InputError(f"<<param>>{name} cannot be read: {error.strerror}", param="calibration") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        reason = f"<<param>>{name} is no calibration; give a file that fit_calibration has written"
        raise InputError(reason, param="calibration", code="invalid_value") from None
    if (calibration.reader, calibration.question) != (reader, question):
        fitted, used = (
            short_repr(name if prompt is None else f"{name}: {prompt}")
            for name, prompt in ((calibration.reader, calibration.question), (reader, question))
        )
        reason = f"<<param>>{name} was fitted to {fitted}, and pages are read with {used}; fit one for it"
        raise InputError(reason, param="calibration", code="invalid_value")
    return calibration


def _checked_knots(knots: Any) -> tuple[tuple[float, float], ...]:
    """Return the knots of a calibration. Raise ValueError if they are none."""
    pairs = tuple((float(score), float(share)) for score, share in knots)
    are_in_order = all(low[0] < high[0] and low[1] <= high[1] for low, high in pairwise(pairs))
    if not pairs or not are_in_order or not all(0 <= share <= 1 for _, share in pairs):
        raise ValueError
    return pairs


RAPIDOCR = Calibration(_checked_knots(json.loads(CALIBRATION.read_text())["knots"]), "rapidocr")


def word_scores(text: str, chars: CharScores) -> list[float]:
    """Return the score of each word of a text: the mean of the scores of its characters."""
    start, scores = 0, list[float]()
    for word in text.split():
        scores.append(sum(chars[start : start + len(word)]) / len(word))
        start += len(word)
    return scores


def scored_line(text: str, box: tuple[float, float, float, float], chars: CharScores) -> Line:
    """Return a line with the scores of its words as confidences."""
    words = tuple(word_scores(text, chars)) if chars else ()
    return Line(text, box, mean(words), words)


def with_calibration(blocks: Sequence[Block], calibration: Calibration | None) -> tuple[Block, ...]:
    """Return blocks of printed lines, whose words have scores, with confidences. None rounds the scores."""
    return tuple(
        replace(block, lines=lines, confidence=confidence_of(lines), is_calibrated=calibration is not None)
        for block in blocks
        for lines in (tuple(_calibrated_line(line, calibration) for line in block.lines),)
    )


def _calibrated_line(line: Line, calibration: Calibration | None) -> Line:
    words = tuple(round(score if calibration is None else calibration(score), 4) for score in line.word_confidences)
    return replace(line, confidence=mean(words), word_confidences=words)


def mean(confidences: Iterable[float], digits: int = 4) -> float | None:
    """Return the rounded mean of the confidences of words, None if there are none."""
    values = list(confidences)
    return round(sum(values) / len(values), digits) if values else None


def confidence_of(lines: Iterable[Line]) -> float | None:
    """Return the mean confidence of the words of lines, None if they have none."""
    return mean(word for line in lines for word in line.word_confidences)


def with_token_confidences(
    blocks: Sequence[Block], tokens: Sequence[tuple[str, float]], calibration: Calibration | None = None
) -> tuple[tuple[Block, ...], float | None]:
    """Return the blocks of a model's answer with confidences, and the confidence of the page.

    The score of a word is the product of the probabilities of its tokens. Words that the answer writes in another way than the
    blocks, such as with escaped characters, do not count.

    Args:
        tokens: text and log probability of each token of the answer, in order.
        calibration: turns scores into confidences; None: they are the confidences.
    """
    answer, token_indices = _characters(tokens)
    at, scored, all_words = 0, list[Block](), list[float]()
    for block in blocks:
        words = list[float | None]()
        for word in _WORD.findall(block.text):
            start = answer.find(word, at, at + _MAX_AHEAD + len(word))
            score = None
            if start >= 0:
                at = start + len(word)
                logprob = sum(tokens[index][1] for index in dict.fromkeys(token_indices[start:at]))
                score = math.exp(min(logprob, 0.0))
            words.append(score if score is None or calibration is None else calibration(score))
        scored.append(_with_words(block, words, calibration is not None))
        all_words += [word for word in words if word is not None]
    return tuple(scored), mean(all_words, _DIGITS)


def _with_words(block: Block, words: Sequence[float | None], is_calibrated: bool) -> Block:
    known = [word for word in words if word is not None]
    rounded = tuple(word if word is None else round(word, _WORD_DIGITS) for word in words) if known else ()
    is_calibrated = is_calibrated and bool(known)
    return replace(block, confidence=mean(known, _DIGITS), word_confidences=rounded, is_calibrated=is_calibrated)


def _characters(tokens: Sequence[tuple[str, float]]) -> tuple[str, list[int]]:
    """Return the characters of an answer without spaces, and the index of the token of each of them."""
    pairs = [(char, index) for index, (text, _) in enumerate(tokens) for char in text if not char.isspace()]
    return "".join(char for char, _ in pairs), [index for _, index in pairs]
