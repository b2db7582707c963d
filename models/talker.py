"""The interface of a talker: a decoder that turns a thinker's prompt and answer into codes of speech, and the codes to wave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..mm.types import MultiModalFeature
from .interface import CacheSpec, ForwardBatch, StepLimits


@dataclass(frozen=True, eq=False)
class SpokenAnswer:
    """The thinker's answer, from which a talker makes speech.

    Args:
        prompt_ids, answer_ids: tokens of the prompt, expanded, and of the answer.
        hidden: the thinker's hidden states `[prompt + answer - 1, hidden]`: the last token of an answer is never computed.
        features: items of the prompt.
    """

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    hidden: Tensor
    features: Sequence[MultiModalFeature] = ()

    @property
    def is_embed(self) -> Tensor:
        """Tokens of the prompt whose embeddings are encoder rows, bool `[prompt]`."""
        found = torch.zeros(len(self.prompt_ids), dtype=torch.bool)
        for feature in self.features:
            found[feature.range.offset : feature.range.end] |= feature.range.mask()
        return found


@dataclass(frozen=True, eq=False)
class TalkerPrompt:
    """The input of a talker.

    Args:
        token_ids: tokens that repetition penalties count.
        rows: inputs of the decoder, `[tokens, hidden]`.
        following: what is added to the embedding of each generated code, `[n, width]`; the last row serves all further codes.
    """

    token_ids: Sequence[int]
    rows: Tensor
    following: Tensor


class Talker(Protocol):
    """Built as `cls(config: dict, dtype, device)` from the raw config.json.

    Attributes:
        rate: samples per second.
        vocab_size: codes are below it. max_positions: tokens of prompt and speech together, at most.
        max_codes: codes of one answer, at most.
        end_ids: codes that end the speech. forbidden: codes that must not be generated.
    """

    rate: int
    vocab_size: int
    max_positions: int
    max_codes: int
    end_ids: Sequence[int]
    forbidden: Collection[int]
    cache_specs: Sequence[CacheSpec]

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
        """Return the input for an answer of at least two tokens."""

    def next_row(self, code: int, following: Tensor) -> Tensor:
        """Return the decoder's input `[1, hidden]` after a code. `following`: the row `[1, width]` of TalkerPrompt."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return hidden states `[rows, hidden]`. The batch's `embed_rows` are the inputs, its token ids are not read."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits `[n, vocab]`."""

    def samples(self, codes: Sequence[int], voice: str, seed: int) -> Iterator[Tensor]:
        """Yield the samples of at least one code, part by part: float32 `[n]` in [-1, 1]. The seed determines the noise."""

    def peak_bytes(self, limits: StepLimits, codes: int) -> int:
        """Return an upper bound of the bytes alive in a step, or while so many codes become samples."""


def section(config: Mapping[str, Any], key: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object of config.json with the defaults of its keys; a key whose value is null has the default, too."""
    found = config.get(key)
    return {**defaults, **{name: value for name, value in (found or {}).items() if value is not None}}


def noise(shape: Sequence[int], seed: int) -> Tensor:
    """Return float32 normal numbers that depend on the seed only, on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed % 2**63))
