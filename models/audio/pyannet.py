"""PyanNet, pyannote's segmentation network: samples become the activity of a few speakers in each frame.

Sources: arXiv 1808.00158 (SincNet: band-pass filters that are given by their two frequencies), arXiv 2104.04045 (the network),
arXiv 2310.13025 (powerset: one class per set of speakers who speak at the same time).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...callers.errors import CheckpointError
from .lstm import Lstm, lstm_from

RATE = 16_000  # hertz
_STRIDE, _TAPS, _POOL = 10, 5, 3  # samples between the first filters, taps of later convolutions, pooled frames
_MIN_HERTZ = 50.0  # the lowest frequency of a band, and its least width
_EPS = 1e-5


@dataclass(frozen=True, eq=False)
class PyanNet:
    """The network.

    Args:
        filters: `[80, 1, taps]`, the band-pass filters of the first convolution.
        convolutions: weight and bias of the others.
        norms: weight and bias of the instance norm of the samples, and of each convolution's output.
        layers: weight and bias of the linear layers; the last one gives the classes.
        sets: `[classes, speakers]`, the speakers of each class; None if each class is a speaker.
        seconds: length of the windows that it was trained with.
    """

    filters: Tensor
    convolutions: tuple[tuple[Tensor, Tensor], ...]
    norms: tuple[tuple[Tensor, Tensor], ...]
    lstm: Lstm
    layers: tuple[tuple[Tensor, Tensor], ...]
    sets: Tensor | None
    seconds: float

    @property
    def frame_step(self) -> int:
        """Samples from one frame to the next."""
        return _STRIDE * math.prod(_POOL for _ in self.norms[1:])

    @property
    def first_frame(self) -> int:
        """The sample in the middle of the first frame's receptive field."""
        size = 1
        for taps, stride in reversed(self._steps()):
            size = (size - 1) * stride + taps
        return (size - 1) // 2

    @property
    def num_speakers(self) -> int:
        return len(self.layers[-1][1]) if self.sets is None else self.sets.shape[1]

    def num_frames(self, samples: int) -> int:
        for taps, stride in self._steps():
            samples = (samples - taps) // stride + 1
        return max(0, samples)

    def _steps(self) -> list[tuple[int, int]]:
        """Return size and stride of each convolution and pooling."""
        first = [(self.filters.shape[2], _STRIDE), (_POOL, _POOL)]
        return first + [step for weight, _ in self.convolutions for step in ((weight.shape[2], 1), (_POOL, _POOL))]

    @torch.inference_mode()
    def activity(self, windows: Tensor) -> Tensor:
        """Return the probability of each speaker, 0 or 1 for networks with sets: `[n, samples] -> [n, frames, speakers]`."""
        x = _norm(windows[:, None], *self.norms[0])
        x = F.conv1d(x, self.filters, stride=_STRIDE).abs_()
        x = F.leaky_relu(_norm(F.max_pool1d(x, _POOL), *self.norms[1]))
        for (weight, bias), norm in zip(self.convolutions, self.norms[2:], strict=True):
            x = F.leaky_relu(_norm(F.max_pool1d(F.conv1d(x, weight, bias), _POOL), *norm))
        x, _ = self.lstm(x.transpose(1, 2))
        for weight, bias in self.layers[:-1]:
            x = F.leaky_relu(F.linear(x, weight, bias))
        scores = F.linear(x, *self.layers[-1])
        return scores.sigmoid_() if self.sets is None else self.sets[scores.argmax(-1)]


def pyannet(tensors: Mapping[str, Tensor], seconds: float, speakers: int | None, largest_set: int | None) -> PyanNet:
    """Return the network of a checkpoint.

    Args:
        tensors: of the checkpoint, float32.
        speakers, largest_set: of a network with sets: how many speakers it tells apart, and at most how many speak at a time.
            None: each class is a speaker.

    Raises:
        CheckpointError: a tensor is missing, or the number of classes is wrong.
    """
    try:
        bank = "sincnet.conv1d.0.filterbank"
        filters = _sinc_filters(*(tensors[f"{bank}.{name}"] for name in ("low_hz_", "band_hz_", "window_", "n_")))
        convolutions = tuple(_pair(tensors, f"sincnet.conv1d.{i}") for i in (1, 2))
        norms = (_pair(tensors, "sincnet.wav_norm1d"), *(_pair(tensors, f"sincnet.norm1d.{i}") for i in range(3)))
        numbers = sorted(int(name.split(".")[1]) for name in tensors if name.startswith("linear.") and name.endswith("weight"))
        layers = (*(_pair(tensors, f"linear.{i}") for i in numbers), _pair(tensors, "classifier"))
        lstm = lstm_from(tensors, "lstm.")
    except KeyError as error:
        raise CheckpointError(f"the segmentation network has no tensor {error}; give the checkpoint of a PyanNet") from None
    sets = None if speakers is None or largest_set is None else speaker_sets(speakers, largest_set)
    classes = len(layers[-1][1])
    if sets is not None and len(sets) != classes:
        reason = f"{speakers} speakers, at most {largest_set} at a time, make {len(sets)} classes"
        raise CheckpointError(f"the segmentation network has {classes} classes, but {reason}; give another checkpoint")
    return PyanNet(filters, convolutions, norms, lstm, layers, sets, seconds)


def speaker_sets(speakers: int, largest: int) -> Tensor:
    """Return float32 `[sets, speakers]` of 0 and 1: no speaker, each one, each pair, ... up to `largest` of them."""
    sets = [chosen for size in range(largest + 1) for chosen in combinations(range(speakers), size)]
    return torch.tensor([[float(speaker in chosen) for speaker in range(speakers)] for chosen in sets])


def _pair(tensors: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    return tensors[f"{name}.weight"], tensors[f"{name}.bias"]


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=weight, bias=bias, eps=_EPS)


def _sinc_filters(low: Tensor, band: Tensor, window: Tensor, times: Tensor) -> Tensor:
    """Return `[2 * bands, 1, 2 * half + 1]`: filters in phase with a cosine, then with a sine.

    Args:
        low, band: `[bands, 1]`, lowest frequency and width of each band in hertz, both less `_MIN_HERTZ`.
        window: `[half]`, the first half of the window.
        times: `[1, half]`, of the first half of the samples, in radians per hertz.
    """
    lowest = _MIN_HERTZ + low.abs()
    highest = (lowest + _MIN_HERTZ + band.abs()).clamp(_MIN_HERTZ, RATE / 2)
    width, (first, last) = highest - lowest, (lowest @ times, highest @ times)
    cosine = (last.sin() - first.sin()) / (times / 2) * window
    sine = (first.cos() - last.cos()) / (times / 2) * window
    even = torch.cat((cosine, 2 * width, cosine.flip(1)), 1)
    odd = torch.cat((sine, torch.zeros_like(width), -sine.flip(1)), 1)
    return (torch.cat((even, odd)) / (2 * width).repeat(2, 1))[:, None]
