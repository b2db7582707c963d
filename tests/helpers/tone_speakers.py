"""Stand-ins for the networks that tell speakers apart: a speaker is a tone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sensorium.engine.speaker_networks import RATE, SpeakerNetworks
from torch import Tensor
from torch.nn import functional as F

PITCHES = (200.0, 450.0, 900.0, 1_700.0)  # hertz


@dataclass(frozen=True)
class ToneNet:
    """A segmentation network that hears tones: the first of a window is its first speaker, and so on, up to three."""

    seconds: float = 5.0
    frame_step: int = 270
    first_frame: int = 495
    num_speakers: int = 3

    def num_frames(self, samples: int) -> int:
        return (samples - 2 * self.first_frame - 1) // self.frame_step + 1

    def activity(self, windows: Tensor) -> Tensor:
        found = torch.zeros(len(windows), self.num_frames(windows.shape[1]), 3)
        for window, out in zip(windows, found, strict=True):
            heard = levels(window.unfold(0, 2 * self.first_frame + 1, self.frame_step)) > 0.1
            order = sorted((int(own.int().argmax()), number) for number, own in enumerate(heard.T) if own.any())
            for place, (_, number) in enumerate(order[:3]):
                out[:, place] = heard[:, number].float()
        return found


class ToneVoices:
    """A speaker encoder whose vectors are the levels of the tones."""

    dim = len(PITCHES)

    def features(self, samples: Tensor) -> Tensor:
        return levels(F.pad(samples, (200, 200)).unfold(0, 400, 160))

    def embed(self, frames: list[Tensor]) -> Tensor:
        return F.normalize(torch.stack([own.mean(0) for own in frames]))


def levels(windows: Tensor) -> Tensor:
    """Return the amplitude of each tone in `[n, samples]`: `[n, tones]`."""
    count = windows.shape[1]
    phases = 2 * torch.pi * torch.outer(torch.arange(count) / RATE, torch.tensor(PITCHES))
    return 2 / count * torch.hypot(windows @ phases.cos(), windows @ phases.sin())


def conversation(seconds: float, turns: Sequence[tuple[float, float, int]]) -> Tensor:
    """Return samples in which tone `number` sounds from `start` to `end`, for each `(start, end, number)`."""
    times, samples = torch.arange(round(seconds * RATE)) / RATE, torch.zeros(round(seconds * RATE))
    for start, end, number in turns:
        samples += torch.where((times >= start) & (times < end), 0.3 * (2 * torch.pi * PITCHES[number] * times).sin(), 0.0)
    return samples


NETWORKS: Any = SpeakerNetworks(ToneNet(), ToneVoices())  # type: ignore[arg-type]
