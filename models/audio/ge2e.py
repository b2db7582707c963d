"""The speaker encoder of arXiv 1710.10467 (GE2E), with the features and the names of Resemblyzer: speech becomes a vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ...callers.errors import CheckpointError
from .lstm import Lstm, lstm_from

RATE = 16_000  # hertz
WINDOW, HOP = 400, 160  # samples
_PART, _PART_STEP = 160, 80  # frames of mel energies that the network reads at a time
_ROUND = 8  # frames of shorter parts, so that they have few lengths, for each of which the LSTM keeps a plan
_LOUDNESS = -30.0  # decibels; quieter speech is amplified


@dataclass(frozen=True, eq=False)
class SpeakerEncoder:
    """The network.

    Args:
        weight, bias: `[dim, width]` and `[dim]`, of the layer after the LSTM.
        filters: mel filters, float32 `[bins, bands]`.
    """

    lstm: Lstm
    weight: Tensor
    bias: Tensor
    filters: Tensor

    @property
    def dim(self) -> int:
        return len(self.bias)

    def features(self, samples: Tensor) -> Tensor:
        """Return mel energies of float32 `[n]`: `[frames, bands]`, one every 10 ms, the first around the first sample."""
        spectrum = torch.stft(samples, WINDOW, HOP, window=_hann(), center=True, pad_mode="constant", return_complex=True)
        return spectrum.abs().square().T @ self.filters

    @torch.inference_mode()
    def embed(self, frames: Sequence[Tensor]) -> Tensor:
        """Return a vector of length 1 for the speech of each speaker, `frames [n, bands]` of one or more: `[speakers, dim]`.

        The vector is the mean of those of parts of 1.6 s. Speech that is shorter is one part, of a multiple of 80 ms if it
        can be.
        """
        parts, owners = list[Tensor](), list[int]()
        for owner, own in enumerate(frames):
            own = own * self._gain(own)
            if _ROUND <= len(own) < _PART:
                own = own[: len(own) // _ROUND * _ROUND]
            starts = range(0, max(1, len(own) - _PART + 1), _PART_STEP)
            parts += [own[start : start + _PART] for start in starts]
            owners += [owner] * len(starts)
        vectors = torch.empty(len(parts), self.dim)
        for length in sorted({len(part) for part in parts}):
            same = [i for i, part in enumerate(parts) if len(part) == length]
            _, hidden = self.lstm(torch.stack([parts[i] for i in same]))
            vectors[same] = F.normalize(F.linear(hidden[-1], self.weight, self.bias).relu_())
        sums = torch.zeros(len(frames), self.dim).index_add_(0, torch.tensor(owners), vectors)
        return F.normalize(sums)

    def _gain(self, frames: Tensor) -> float:
        """Return the factor of energies that makes speech as loud as `_LOUDNESS`, at least 1."""
        noise = float(_hann().square().sum() * self.filters.sum(0).mean())  # mean energy of a band for noise of variance 1
        level = float(frames.mean()) / noise
        return max(1.0, 10 ** (_LOUDNESS / 10) / level) if level > 0 else 1.0


def speaker_encoder(tensors: Mapping[str, Tensor], filters: Tensor) -> SpeakerEncoder:
    """Return the network of a checkpoint's tensors, float32. Raise CheckpointError if one is missing."""
    try:
        return SpeakerEncoder(lstm_from(tensors, "lstm."), tensors["linear.weight"], tensors["linear.bias"], filters)
    except KeyError as error:
        raise CheckpointError(f"the speaker encoder has no tensor {error}; give the checkpoint of Resemblyzer") from None


@cache
def _hann() -> Tensor:
    return torch.hann_window(WINDOW)
