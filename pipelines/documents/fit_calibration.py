"""Measures the calibration of a model's or a reader's confidences on pages whose text is known."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import repeat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...callers.errors import ConfigError, InputError, short_repr
from ...mm.media.policy import DEFAULT_POLICY
from ..files import NamedItem
from .blocks import Block, PageRecord
from .confidence import Calibration
from .inputs import read_policy
from .manifest import Manifest
from .options import ReadOptions
from .page_task import PageReader
from .read import DocumentReader

TEXT_SUFFIX = ".txt"
"""Suffix of the file that has the right text of a document, with a form feed between pages, as the outputs of `read` have."""
LEAST_WORDS = 200
"""Minimum number of words with a score."""
_MARKUP = "*_`"  # around words in Markdown
_PER_KNOT = 150  # minimum number of words, if there are enough
_KNOTS = 20  # with fewer words, about so many knots are made
_BINS = 10


@dataclass(frozen=True)
class FittedCalibration:
    """A calibration, and what it was fitted to.

    Args:
        pages: float64 `[words, 2]` of each page: score, and 1 if the word is right else 0.
    """

    calibration: Calibration
    pages: tuple[NDArray[np.float64], ...]

    @property
    def words(self) -> NDArray[np.float64]:
        return np.concatenate(self.pages)

    @property
    def errors(self) -> tuple[float, float]:
        """The expected calibration error of scores, and that of confidences, each fitted to the other half of the pages."""
        halves = [np.concatenate(self.pages[start::2]) for start in (0, 1)]
        confidences = [
            np.array([Calibration(fit(other))(score) for score in half[:, 0]])
            for half, other in zip(halves, halves[::-1], strict=True)
        ]
        words = np.concatenate(halves)
        weights = np.ones(len(words))
        before = calibration_error(words[:, 0], words[:, 1], weights)
        return before, calibration_error(np.concatenate(confidences), words[:, 1], weights)

    def write(self, path: Path) -> None:
        """Write it as `load_calibration` reads it. Raise ConfigError if the file cannot be written."""
        before, after = self.errors
        values = {
            "reader": self.calibration.reader,
            "question": self.calibration.question,
            "pages": len(self.pages),
            "words": len(self.words),
            "right": int(self.words[:, 1].sum()),
            "expected_calibration_error": {"before": round(before, 4), "after": round(after, 4)},
            "knots": self.calibration.knots,
        }
        try:
            path.write_text(f"{json.dumps(values, indent=1)}\n", "utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}; give another <<fit_calibration>>") from None


def fit_calibration(items: Sequence[NamedItem], reader: PageReader, options: ReadOptions) -> FittedCalibration:
    """Read documents, and compare the words with the right texts; see `scored_pages`.

    Raises:
        InputError: as `scored_pages` does; or there are fewer than two pages, or `LEAST_WORDS` words, with scores.
    """
    pages = tuple(page for page in scored_pages(items, reader, options) if len(page))
    count = sum(map(len, pages))
    if len(pages) < 2 or count < LEAST_WORDS:
        reason = f"{count:,} words with a score were read on {len(pages)} pages"
        reason = f"{reason}; give two pages or more, with {LEAST_WORDS} words"
        raise InputError(reason, param="fit_calibration", limit=LEAST_WORDS, value=count)
    question = options.question if reader.kind == "model" else None
    return FittedCalibration(Calibration(fit(np.concatenate(pages)), reader.name, question), pages)


def scored_pages(items: Sequence[NamedItem], reader: PageReader, options: ReadOptions) -> Iterator[NDArray[np.float64]]:
    """Read documents whose right texts lie beside them: that of a.pdf in a.txt. Yield `[words, 2]` of each page.

    Args:
        items: of local files. Files of right texts among them are not read as documents.
        reader: without a calibration. options: its options, which use no text layers.

    Raises:
        InputError: a document cannot be opened or read, or has no text beside it.
    """
    documents = [item for item in items if Path(str(item.item)).suffix.lower() != TEXT_SUFFIX]
    texts, policy = [_right_texts(item) for item in documents], read_policy(DEFAULT_POLICY, options)
    with Manifest(None) as manifest:
        for index, document in DocumentReader(documents, reader, options, policy, manifest).documents():
            if document.error is not None:
                raise document.error.exception()
            for page in manifest.records(document.key, document.ranges):
                if page.error is not None:
                    raise page.error.exception()
                if page.number > len(texts[index]):
                    reason = f"the right text of {short_repr(document.source)} has no page {page.number}"
                    raise InputError(f"{reason}; divide its pages by form feeds", param="fit_calibration")
                yield np.array(list(scored_words(page, texts[index][page.number - 1])), np.float64).reshape(-1, 2)


def _right_texts(item: NamedItem) -> list[str]:
    """Return the right text of each page of a document."""
    if not isinstance(item.item, str):
        raise item.item if isinstance(item.item, InputError) else InputError("give local files", param="fit_calibration")
    path = Path(item.item).expanduser().with_suffix(TEXT_SUFFIX)
    try:
        return path.read_text("utf-8").split("\f")
    except (OSError, ValueError) as error:
        reason = f"the right text of {short_repr(item.source)} cannot be read from {short_repr(str(path))}"
        raise InputError(f"{reason}: {getattr(error, 'strerror', None) or error}", param="fit_calibration") from None


def scored_words(page: PageRecord, text: str) -> Iterator[tuple[float, bool]]:
    """Yield the score of each word of a page that has one, and whether the word is right.

    A word is right if the alignment of the page's words with those of the right text (difflib) has an equal word there.
    """
    words = [pair for block in page.blocks for pair in _block_words(block)]
    right = [False] * len(words)
    matcher = SequenceMatcher(None, [word for word, _ in words], text.split(), autojunk=False)
    for start, _, size in matcher.get_matching_blocks():
        right[start : start + size] = [True] * size
    yield from ((score, is_right) for (_, score), is_right in zip(words, right, strict=True) if score is not None)


def _block_words(block: Block) -> Iterator[tuple[str, float | None]]:
    """Yield the words of a block with their scores: its own if it has some, or else those of its lines."""
    if block.word_confidences or not block.lines:
        words = block.text.split()
        shown = [word.strip(_MARKUP) for word in words] if block.text_format == "markdown" else words
        yield from zip(shown, block.word_confidences or repeat(None), strict=False)
        return
    for line in block.lines:
        yield from zip(line.text.split(), line.word_confidences or repeat(None), strict=False)


def fit(words: NDArray[np.float64], least: int | None = None) -> tuple[tuple[float, float], ...]:
    """Return (score, share of right words) in order: an isotonic regression (pool adjacent violators).

    Args:
        words: `[words, 2]`: score, and 1 if the word is right else 0.
        least: minimum number of words per pair; None: 150, or fewer if there are few words.
    """
    least = least or max(min(_PER_KNOT, len(words) // _KNOTS), 1)
    scores, owners, counts = np.unique(words[:, 0].round(4), return_inverse=True, return_counts=True)
    rights = np.bincount(owners, words[:, 1])
    pools = list[tuple[float, float, float]]()  # words, sum of their scores, number of right ones
    for count, score, right in zip(counts.tolist(), scores.tolist(), rights.tolist(), strict=True):
        pools.append((count, count * score, right))
        while len(pools) > 1 and (pools[-1][2] / pools[-1][0] <= pools[-2][2] / pools[-2][0] or pools[-2][0] < least):
            before, after = pools[-2:]
            pools[-2:] = [(before[0] + after[0], before[1] + after[1], before[2] + after[2])]
    shares = np.maximum.accumulate([(right + 1) / (count + 2) for count, _, right in pools])
    means = [total / count for count, total, _ in pools]
    return tuple((round(mean, 4), round(share, 4)) for mean, share in zip(means, shares.tolist(), strict=True))


def calibration_error(confidences: NDArray[np.float64], shares: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """Return the expected calibration error in ten bins."""
    bins = np.minimum((confidences * _BINS).astype(int), _BINS - 1)
    gaps = [abs(np.sum((confidences - shares)[bins == i] * weights[bins == i])) for i in range(_BINS)]
    return float(sum(gaps) / weights.sum())
