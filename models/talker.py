"""The interface of a talker: a decoder that turns a thinker's prompt and answer into codes of speech, and the codes to wave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from ..mm.positions import PlacedItem
from ..mm.types import MultiModalFeature
from .interface import CacheSpec, ForwardBatch, StepLimits
from .text.decoder import Decoder
from .text.spec import DecoderSpec

T = TypeVar("T")
Division = Literal["whole", "exact", "windows"]
"""How samples are divided into parts: "whole": when all frames are there; "exact": as early as they are those of "whole";
"windows": earlier, from windows of frames, where the code-to-wave model would wait for many later frames to be exact."""


@dataclass(frozen=True, eq=False)
class SpokenAnswer:
    """The thinker's answer, from which a talker makes speech.

    Args:
        prompt_ids, answer_ids: tokens of the prompt, expanded, and of the answer.
        hidden: the thinker's hidden states, as `Talker.layer` says: `[prompt + answer - 1, hidden]`, since the last token of an
            answer is never computed, or `[prompt, hidden]`, or none for a prompt without items.
        features: items of the prompt.
    """

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    hidden: Tensor
    features: Sequence[MultiModalFeature] = ()

    @property
    def is_embed(self) -> Tensor:
        """Tokens of the prompt whose embeddings are encoder rows, bool `[prompt]`."""
        mask = torch.zeros(len(self.prompt_ids), dtype=torch.bool)
        for feature in self.features:
            mask[feature.range.offset : feature.range.end] |= feature.range.mask()
        return mask


@dataclass(frozen=True, eq=False)
class TalkerPrompt:
    """The input of a talker.

    Args:
        token_ids: tokens that repetition penalties count.
        rows: inputs of the decoder, `[tokens, hidden]`.
        following: what is added to the embedding of each generated frame, `[n, width]`; the last row serves all further frames.
        items: places of the items in `rows`.
    """

    token_ids: Sequence[int]
    rows: Tensor
    following: Tensor
    items: Sequence[PlacedItem]


class CodePredictor(Protocol):
    """A decoder that predicts the other codes of a frame, one by one, from the talker's hidden state and its code.

    Attributes:
        count: codes that it predicts per frame.
        sampling: how the published model samples them, unless the talker is greedy.
    """

    count: int
    sampling: Mapping[str, float]
    cache_specs: Sequence[CacheSpec]

    def first_rows(self, hidden: Tensor, code: int) -> Tensor:
        """Return the first inputs `[2, hidden]` of a frame. `hidden`: the talker's, `[1, hidden]`. `code`: what it chose."""

    def next_row(self, index: int, code: int) -> Tensor:
        """Return the input `[1, hidden]` after the predicted code with this index."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return hidden states `[rows, hidden]`, as `Talker.forward`."""

    def compute_logits(self, hidden: Tensor, index: int) -> Tensor:
        """Return float32 logits `[n, vocab]` of the code with this index."""


class Talker(Protocol):
    """Built as `cls(config: dict, dtype, device)` from the raw config.json.

    Attributes:
        rate: samples per second.
        vocab_size: codes are below it. max_positions: tokens of prompt and speech together, at most.
        max_codes: frames of one answer, at most; a frame is one code, and those of the predictor.
        end_ids: codes that end the speech. forbidden: codes that must not be generated.
        layer: the talker reads the thinker's hidden states after so many layers, of prompts with items only. None: it reads
            the final ones of prompt and answer.
        sampling: how the published model samples codes, as arguments of SamplingParams.
        predictor: predicts the other codes of a frame; None if a frame is one code.
    """

    rate: int
    vocab_size: int
    max_positions: int
    max_codes: int
    end_ids: Sequence[int]
    forbidden: Collection[int]
    layer: int | None
    sampling: Mapping[str, float]
    cache_specs: Sequence[CacheSpec]

    @property
    def predictor(self) -> CodePredictor | None: ...

    @property
    def voices(self) -> Sequence[str]:
        """Names of the speakers, known after `load`."""

    def load(self, folder: Path, weights: Iterable[tuple[str, Tensor]], embed: Callable[[Sequence[int]], Tensor]) -> None:
        """Fill all weights and read the voices. `embed` returns the thinker's token embeddings.

        Raises:
            CheckpointError: missing, surplus or misshapen tensors, or no readable voices.
        """

    def is_unused(self, name: str) -> bool:
        """Return True for a stored tensor that is not the talker's."""

    def prompt(self, answer: SpokenAnswer, voice: str) -> TalkerPrompt:
        """Return the input for an answer of at least two tokens. Raise InputError for a prompt that it cannot speak after."""

    def next_row(self, frame: Sequence[int], following: Tensor) -> Tensor:
        """Return the decoder's input `[1, hidden]` after a frame. `following`: the row `[1, width]` of TalkerPrompt."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return hidden states `[rows, hidden]`. The batch's `embed_rows` are the inputs, its token ids are not read."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits `[n, vocab]`."""

    def samples(self, frames: Iterable[Sequence[int]], voice: str, seed: int, division: Division = "exact") -> Iterator[Tensor]:
        """Yield the samples part by part, float32 `[n]` in [-1, 1]. The seed determines noise.

        A model whose samples depend on few later frames may divide them in the same way always.
        """

    def kept_bytes(self, longest: int) -> int:
        """Return an upper bound of the bytes that an answer holds between two parts, besides its KV caches.

        `longest`: tokens of prompt and speech together.
        """

    def peak_bytes(self, limits: StepLimits, codes: int) -> int:
        """Return an upper bound of the bytes alive in a step, or while so many frames become samples."""


class InputDecoder(Decoder):
    """A decoder without a table, whose inputs are given as `embed_rows`."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        del self.embed_tokens

    def embed(self, batch: ForwardBatch) -> Tensor:
        assert batch.embed_rows is not None
        return batch.embed_rows


def section(config: Mapping[str, Any], key: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object of config.json with the defaults of its keys; a key whose value is null has the default, too."""
    stated = config.get(key)
    return {**defaults, **{name: value for name, value in (stated or {}).items() if value is not None}}


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield each item and whether it is the last one, so an item comes when the next one is known."""
    rest = iter(items)
    for item in rest:
        for following in rest:
            yield item, False
            item = following
        yield item, True


def noise(shape: Sequence[int], seed: int) -> Tensor:
    """Return float32 normal numbers that depend on the seed only, on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed % 2**63))
