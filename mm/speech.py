"""Speech requests as plain data, and the removal of control tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .types import MultiModalKwargsItem

_CONTROL = re.compile(r"<\|[^<|>]*\|>")


@dataclass(frozen=True)
class TimestampRule:
    """Timestamp tokens of a speech model.

    Args:
        first: token of 0 s; each following token is `step` seconds later.
        none: token that requests no timestamps. end: token that ends the output.
        latest: limit of the first timestamp, in steps; None: no limit.
    """

    first: int
    none: int
    end: int
    step: float
    latest: int | None = None


@dataclass(frozen=True)
class AlignmentRule:
    """How cross-attention gives the times of words.

    Args:
        heads: (layer, head) pairs whose weights follow the audio.
        step: seconds per encoder row.
        sizes: number of layers with cross-attention, and of heads per layer.
    """

    heads: tuple[tuple[int, int], ...]
    step: float
    sizes: tuple[int, int]


@dataclass(frozen=True)
class FrameRule:
    """How the rows of a model without a decoder become text.

    With connectionist temporal classification (CTC), each row names a token. Equal tokens in a row are one token, unless a
    blank is between them; blanks are none. The rows of a transducer are decoded by the model.

    Args:
        blank: token without text.
        step: seconds per row.
    """

    blank: int
    step: float


@dataclass(frozen=True)
class PhonemeRule:
    """How phonemes become speech.

    Args:
        tokens: phoneme -> its token; a phoneme is one character.
        edge: token before the first phoneme and after the last one.
        max_phonemes: of one request.
        style: numbers of the style of a voice.
        rate: samples per second. frame: samples of a frame, in which durations of phonemes are counted.
    """

    tokens: Mapping[str, int]
    edge: int
    max_phonemes: int
    style: int
    rate: int
    frame: int


@dataclass(frozen=True)
class StreamRule:
    """How a model transcribes a stream: encoder row i is added to token i, and each row gives a token.

    Args:
        prompt: tokens of the first rows.
        silent: token of rows that complete no text.
        row_samples: samples per row. overlap: further samples that the last row of a chunk reads.
        before, after: samples of silence before and after the stream.
        delay: rows between a sound and its text.
        max_rows: most rows of a chunk. max_tokens: most tokens of a sequence.
        item: makes the tensors of a chunk: `(samples, stream, first row, dtype of the encoder's input)`.
    """

    prompt: tuple[int, ...]
    silent: int
    row_samples: int
    overlap: int
    before: int
    after: int
    delay: int
    max_rows: int
    max_tokens: int
    item: Callable[[Tensor, int, int, torch.dtype], MultiModalKwargsItem]


@dataclass(frozen=True)
class SpeechRequest:
    """The prompt and the token rules of a transcription.

    Args:
        prompt: trusted text, in which control tokens are recognised. It contains the audio placeholder if the model has one.
        allowed_tokens: text of a token -> its meaning (a language code); the output is one of these tokens. Empty: any token.
        suppressed, suppressed_first: tokens that are never sampled, or not as the first token.
        times: rule for timestamps in the output; None: no timestamps.
    """

    prompt: str
    allowed_tokens: Mapping[str, str] = field(default_factory=dict)
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    times: TimestampRule | None = None


def strip_control_tokens(answer: str) -> str:
    """Remove control tokens such as <|en|> and <|2.40|> from a decoded output."""
    return _CONTROL.sub("", answer)
