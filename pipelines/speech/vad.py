"""Voice detection in frames of 32 ms."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ...mm.errors import ConfigError, InputError, short_repr

VoiceDetector = Callable[[Tensor], Tensor]
"""Takes the next block of an audio item and returns the probability of speech for each of its frames.

Every block but the last one has `BLOCK_FRAMES` frames. The last frame of an audio item may be incomplete.
"""
FRAME_SECONDS = 0.032
BLOCK_FRAMES = 320
_SILERO_RATE, _SILERO_FRAME = 16_000, 512

_PREEMPHASIS = 0.97
_MIN_FLOOR = -70.0  # least noise floor: decibels relative to full scale, after pre-emphasis
_MARGIN = 9.0  # decibels above the noise floor at which the probability is 0.5


def frame_size(rate: float) -> int:
    """Return the samples of a frame."""
    return round(FRAME_SECONDS * rate)


def make_detector(vad: object, rate: float) -> VoiceDetector:
    """Return a detector for one audio item. `vad`: True, "silero", or a function that takes the rate and returns a detector.

    Raises:
        InputError: any other value. ConfigError: silero-vad is not installed, or does not support the rate.
    """
    if vad is True:
        return EnergyDetector(frame_size(rate))
    if vad == "silero":
        if rate != _SILERO_RATE:
            raise ConfigError(f"silero-vad takes audio of {_SILERO_RATE} Hz, this model takes {rate:g} Hz; give vad=True")
        return SileroDetector()
    if callable(vad):
        detector: VoiceDetector = vad(rate)
        return detector
    known = 'True, False, "silero" or a function that takes the sample rate and returns a detector'
    raise InputError(f"vad={short_repr(vad)} must be {known}", param="vad")


class EnergyDetector:
    """Counts a frame as speech if its energy is `_MARGIN` above the noise floor of its block.

    Steady sounds, such as hum, are part of the noise floor. Everything louder, such as music, counts as speech.
    """

    def __init__(self, frame: int) -> None:
        self._frame = frame
        self._previous = 0.0  # the last sample of the previous block

    def __call__(self, samples: Tensor) -> Tensor:
        before = torch.cat([samples.new_tensor([self._previous]), samples[:-1]])
        self._previous = float(samples[-1])
        emphasised = F.pad(samples - _PREEMPHASIS * before, (0, -len(samples) % self._frame))
        decibels = 10 * emphasised.view(-1, self._frame).square().mean(1).clamp(min=1e-12).log10()
        floor = max(_MIN_FLOOR, float(decibels.quantile(0.1)))
        smooth = F.avg_pool1d(decibels[None], 3, 1, 1, count_include_pad=False)[0]
        return torch.sigmoid((torch.maximum(decibels, smooth) - floor - _MARGIN) / 2)


class SileroDetector:
    """The network of the package silero-vad. It has a state, so each audio item needs its own detector."""

    def __init__(self) -> None:
        spec = find_spec("silero_vad")
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError("silero-vad is not installed; run pip install silero-vad, or give vad=True", param="vad")
        file = Path(spec.submodule_search_locations[0]) / "data" / "silero_vad.jit"
        self._model = torch.jit.load(str(file), "cpu")  # type: ignore[no-untyped-call]
        self._model.reset_states()

    def __call__(self, samples: Tensor) -> Tensor:
        padded = F.pad(samples, (0, -len(samples) % _SILERO_FRAME))
        with torch.inference_mode():
            frames = [self._model(frame[None], _SILERO_RATE) for frame in padded.split(_SILERO_FRAME)]
        return torch.cat(frames).flatten()
