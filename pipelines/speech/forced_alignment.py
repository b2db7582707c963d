"""Times of words from a CTC model of characters, such as wav2vec 2.0, for the text of any other model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...callers.errors import ConfigError, InputError
from ...mm.speech import SpeechRequest
from .merge import split_words
from .segments import Segment, WindowText, Word
from .vad import FRAME_SECONDS, EnergyDetector

if TYPE_CHECKING:
    from ...engine.engine import Engine

_DELIMITER = "|"
_EARLIER, _LATER = 0.1, 0.3  # seconds that a word may begin before, and end after, the frames of its characters


@dataclass(frozen=True)
class _CtcModel:
    """A CTC model with its characters.

    Attributes:
        stride: samples from one frame to the next, None if the config does not give it.
        normalize: samples are scaled to mean 0 and variance 1.
    """

    model: Any
    ids: Mapping[str, int]
    blank: int
    rate: int
    stride: int | None
    normalize: bool

    @torch.inference_mode()
    def log_probs(self, samples: Tensor) -> np.ndarray:
        """Return float32 `[frames, characters]`."""
        if self.normalize:
            deviation, mean = torch.std_mean(samples, unbiased=False)
            samples = (samples - mean) / (deviation.square() + 1e-7).sqrt()
        return self.model(samples[None]).logits[0].float().log_softmax(-1).numpy()  # type: ignore[no-any-return]

    def step(self, samples: int, frames: int) -> float:
        """Return the seconds from one frame to the next: the stride, or the mean of the audio if the stride does not fit.

        The stride fits if it leaves fewer than two strides of samples after the last frame.
        """
        stride = self.stride or 0
        return (stride if 0 <= samples - frames * stride < 2 * stride else samples / frames) / self.rate

    def encode(self, word: str) -> list[int]:
        """Return the ids of a word's known characters: as written, in upper or in lower case, whichever has most of them."""
        forms = [word.strip(), word.strip().upper(), word.strip().lower()]
        best = min(forms, key=lambda spelling: sum(char not in self.ids for char in spelling))
        return [self.ids[char] for char in best if char in self.ids]


class CtcAligner:
    """Finds the most probable frames of each word by Viterbi over the characters of the text. It makes no request."""

    def __init__(self, folder: Path, rate: int) -> None:
        """Raise ConfigError if the folder has no CTC model of characters for this sampling rate."""
        self._ctc = _load(folder)
        if self._ctc.rate != rate:
            reason = f"the aligner takes audio of {self._ctc.rate} Hz, but this model takes {rate} Hz; use another CTC model"
            raise ConfigError(reason, param="aligner")

    async def __call__(
        self, engine: Engine, item: object, text: WindowText, request: SpeechRequest, language: str | None, rate: int
    ) -> WindowText:
        if text.window is None:
            raise InputError("an aligner needs samples, and this audio is given as encoder rows; give samples or a file")
        parts = text.segments or (Segment(0.0, None, text.result.text, 1),)
        words = [split_words(part.text) for part in parts]
        timed = iter(self.align(text.window.samples, [word for of_part in words for word in of_part]))
        done = tuple(
            replace(part, words=tuple(next(timed) for _ in of_part)) for part, of_part in zip(parts, words, strict=True)
        )
        return replace(text, segments=done)

    def align(self, samples: Tensor, words: Sequence[str]) -> list[Word]:
        """Return the words with times. A word without a known character lies between its neighbours."""
        log_probs = self._ctc.log_probs(samples)
        ids, owners, delimiter = list[int](), list[int](), self._ctc.ids.get(_DELIMITER)
        for number, word in enumerate(words):
            word_ids = self._ctc.encode(word)
            if word_ids and ids and delimiter is not None:
                ids, owners = [*ids, delimiter], [*owners, -1]
            ids, owners = ids + word_ids, owners + [number] * len(word_ids)
        path, duration = forced_align(log_probs, ids, self._ctc.blank), len(samples) / self._ctc.rate
        if path is None:  # more characters than frames
            edges = np.linspace(0, duration, len(words) + 1).tolist()
            return [Word(edges[i], edges[i + 1], word, 0.0) for i, word in enumerate(words)]
        step, quiet = self._ctc.step(len(samples), len(path)), _quiet_times(samples, self._ctc.rate)
        owner = np.where(path < 0, -1, np.asarray([*owners, -1])[path])
        sure = np.exp(log_probs[range(len(path)), np.asarray([*ids, self._ctc.blank])[path]])
        timed: list[Word | None] = [None] * len(words)
        for number, span in _word_spans(len(words), owners, path).items():
            earliest, first, end, latest = (step * frame for frame in span)
            start, end = _extend(earliest, first, end, latest, quiet)
            timed[number] = Word(start, end, words[number], float(sure[owner == number].mean()))
        return _fill(words, timed, duration)


def _word_spans(count: int, owners: Sequence[int], path: np.ndarray) -> dict[int, tuple[int, int, int, int]]:
    """Return `(earliest, first, end, latest)`, in frames, for each of `count` words that has known characters.

    The characters are named in the frames from `first` up to `end`. A CTC model names a character in only a few of the frames
    in which it sounds, so the word may reach from `earliest` to `latest`: from the start of the delimiter before it (0 for the
    first word) to the start of the delimiter or word after it (the last frame for the last word). Next to a word without
    known characters, it does not reach further.

    Args:
        owners: number of each character's word, -1 for a delimiter.
        path: result of `forced_align`.
    """
    begins = [*(int(np.argmax(path == i)) for i in range(len(owners))), len(path)]
    places: dict[int, list[int]] = {}
    for token_index, number in enumerate(owners):
        places.setdefault(number, []).append(token_index)
    word_spans = {}
    for number in sorted(places.keys() - {-1}):
        first, last = places[number][0], places[number][-1]
        start, end = begins[first], int(np.flatnonzero(path == last)[-1]) + 1
        delimited = number - 1 in places and owners[first - 1] < 0
        earliest = 0 if number == 0 else begins[first - 1] if delimited else start
        latest = begins[last + 1] if number + 1 in places or number + 1 == count else end
        word_spans[number] = earliest, start, end, latest
    return word_spans


def _quiet_times(samples: Tensor, rate: float) -> np.ndarray:
    """Return the start times of the frames without speech. Each is FRAME_SECONDS long."""
    return FRAME_SECONDS * np.flatnonzero((EnergyDetector(rate)(samples) < 0.5).numpy())


def _extend(earliest: float, start: float, end: float, latest: float, quiet: np.ndarray) -> tuple[float, float]:
    """Extend a word towards `earliest` and `latest`, by at most _EARLIER and _LATER, and not into frames without speech."""
    before, after = quiet[quiet < start], quiet[quiet >= end]
    if len(before):
        earliest = max(earliest, float(before[-1]) + FRAME_SECONDS)
    if len(after):
        latest = min(latest, float(after[0]))
    return min(start, max(earliest, start - _EARLIER)), max(end, min(latest, end + _LATER))


def _fill(words: Sequence[str], timed: Sequence[Word | None], duration: float) -> list[Word]:
    """Put the words without times between their neighbours. Several in a row share the time evenly."""
    filled, last = list[Word](), 0.0
    for i, (word, timed_word) in enumerate(zip(words, timed, strict=True)):
        if timed_word is None:
            starts = ((j, later.start) for j, later in enumerate(timed[i:], i) if later is not None)
            after, following = next(starts, (len(timed), duration))
            timed_word = Word(last, last + max(0.0, following - last) / (after - i), word, 0.0)
        filled.append(timed_word)
        last = timed_word.end
    return filled


def forced_align(log_probs: np.ndarray, ids: Sequence[int], blank: int) -> np.ndarray | None:
    """Return, for each frame, the index of its character in `ids`, -1 for blank, on the most probable CTC path.

    Return None if the text has more characters than there are frames for. Equal characters need a blank between them.
    """
    count = len(ids)
    labels = np.full(2 * count + 1, blank)
    labels[1::2] = ids
    can_skip = np.zeros(len(labels), dtype=bool)
    can_skip[3::2] = labels[3::2] != labels[1:-2:2]
    score = np.full(len(labels), -np.inf)
    score[:2] = log_probs[0, labels[:2]]
    moves = np.zeros((len(log_probs), len(labels)), dtype=np.int8)
    for frame in range(1, len(log_probs)):
        options = np.full((3, len(labels)), -np.inf)
        options[0], options[1, 1:] = score, score[:-1]
        options[2, 2:] = np.where(can_skip[2:], score[:-2], -np.inf)
        moves[frame] = options.argmax(0)
        score = options.max(0) + log_probs[frame, labels]
    state = max(range(max(0, len(labels) - 2), len(labels)), key=lambda label: score[label])
    if not np.isfinite(score[state]):
        return None
    path = np.empty(len(log_probs), dtype=np.int64)
    for frame in reversed(range(len(log_probs))):
        path[frame] = state // 2 if state % 2 else -1
        state -= int(moves[frame, state])
    return path


@lru_cache(maxsize=1)
def _load(folder: Path) -> _CtcModel:
    try:
        from transformers import AutoModelForCTC

        ids = loads((folder / "vocab.json").read_text("utf-8"))
        settings = folder / "preprocessor_config.json"
        settings_json = loads(settings.read_text("utf-8")) if settings.exists() else {}
        model = AutoModelForCTC.from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype=torch.float32).eval()
        blank, count = int(model.config.pad_token_id), int(model.config.vocab_size)
        if not isinstance(ids, dict) or not all(type(number) is int and 0 <= number < count for number in ids.values()):
            raise ValueError(f"vocab.json must give each character a number below the model's {count}")
        rate, normalize = int(settings_json.get("sampling_rate", 16_000)), bool(settings_json.get("do_normalize", True))
        return _CtcModel(model, ids, blank, rate, getattr(model.config, "inputs_to_logits_ratio", None), normalize)
    except Exception as error:
        reason = f"{folder} cannot be loaded as a CTC model ({type(error).__name__}: {error}); give a folder like that of"
        raise ConfigError(f"{reason} Wav2Vec2ForCTC, with config.json, vocab.json and safetensors", param="aligner") from error
