"""Voice detection in frames of 32 ms."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ...callers.errors import ConfigError, InputError, short_repr
from ..validation import check_function
from .tones import PROTECTED_FRAMES, ToneFilter

VoiceDetector = Callable[[Tensor], Tensor]
"""Takes the next block of an audio item and returns the probability of speech for each of its frames.

Every block but the last one has `BLOCK_FRAMES` frames. The last frame of an audio item may be incomplete.
"""
FRAME_SECONDS = 0.032
BLOCK_FRAMES = 320
_SILERO_RATE, _SILERO_FRAME = 16_000, 512

_BANDS = (200.0, 1000.0, 3000.0)  # hertz; each band ends where the next one begins, the last one at half the rate
_MIN_FLOOR = -75.0  # least noise floor of a band: decibels relative to full scale
_MARGINS = 4.0, 9.0  # least and largest decibels above the noise floor at which the probability is 0.5
_SHORT = 1.5  # seconds; shorter audio may hold no noise alone, so everything audible is speech


def frame_size(rate: float) -> int:
    """Return the samples of a frame."""
    return round(FRAME_SECONDS * rate)


def make_detector(vad: object, rate: float) -> VoiceDetector:
    """Return a detector for one audio item. `vad`: True, "silero", or a function that takes the rate and returns a detector.

    Raises:
        InputError: any other value. ConfigError: silero-vad is not installed, or does not support the rate.
    """
    if vad is True:
        return EnergyDetector(rate)
    if vad == "silero":
        if rate != _SILERO_RATE:
            raise ConfigError(f"silero-vad takes audio of {_SILERO_RATE} Hz, this model takes {rate:g} Hz; give vad=True")
        return SileroDetector()
    if callable(vad):
        try:
            detector = vad(rate)
        except Exception as error:
            reason = f"<<param=>>{short_repr(vad)} failed for {rate:g} Hz: {type(error).__name__}: {error}"
            raise InputError(reason, param="vad") from error
        if not callable(detector):
            reason = f"vad returned {short_repr(detector)}; it must return a function of samples"
            raise InputError(reason, code="invalid_value", param="vad")
        return CheckedDetector(check_function("vad", detector), frame_size(rate))
    allowed = 'True, False, "silero" or a function that takes the sample rate and returns a detector'
    raise InputError(f"<<param=>>{short_repr(vad)} must be {allowed}", code="invalid_value", param="vad")


class CheckedDetector:
    """Checks what a caller's detector returns."""

    def __init__(self, detector: VoiceDetector, frame: int) -> None:
        self._detector, self._frame = detector, frame

    def __call__(self, samples: Tensor) -> Tensor:
        probabilities: object = self._detector(samples)
        count = -(-len(samples) // self._frame)
        if (
            not isinstance(probabilities, Tensor)
            or probabilities.shape != (count,)
            or probabilities.is_complex()
            or not probabilities.isfinite().all()
        ):
            shown = (
                f"a tensor of shape {tuple(probabilities.shape)}"
                if isinstance(probabilities, Tensor)
                else short_repr(probabilities)
            )
            reason = f"the detector of vad returned {shown}; it must return a tensor of {count} finite probabilities,"
            raise InputError(f"{reason} one for each {self._frame} samples", code="invalid_value", param="vad")
        return probabilities


class EnergyDetector:
    """Counts a frame as speech if the energy of one of its bands is clearly above the noise floor of this band in the block.

    The margin is half of the block's contrast, within `_MARGINS`: speech in noise has little contrast. Steady sounds, such as
    hum, are part of the noise floor, and `ToneFilter` finds tones that come and go. Everything else, such as music, counts as
    speech.
    """

    def __init__(self, rate: float) -> None:
        self._frame = frame_size(rate)
        self._window = torch.hann_window(self._frame)
        frequencies = torch.linspace(0, rate / 2, self._frame // 2 + 1)
        ends = (*_BANDS[1:], rate)
        self._bands = [(frequencies >= low) & (frequencies < high) for low, high in zip(_BANDS, ends, strict=True)]
        self._previous = torch.empty(len(_BANDS), 0)  # decibels of the previous block
        self._tones, self._probability = ToneFilter(rate, self._frame), torch.empty(0)  # of the last two blocks, tones included

    def __call__(self, samples: Tensor) -> Tensor:
        decibels = _smooth(self.levels(samples))
        is_short = decibels.shape[1] < BLOCK_FRAMES // 2  # a short last block says too little about the noise
        recent = torch.cat([self._previous, decibels], 1) if is_short else decibels
        self._previous = decibels
        self._tones.add(samples)
        self._probability = torch.cat([self._probability, _probability(decibels, recent)])[-2 * BLOCK_FRAMES :]
        return self._tones.without_tones(self._probability)[-decibels.shape[1] :]

    def levels(self, samples: Tensor) -> Tensor:
        """Return the decibels of each band and frame, `[bands, frames]`."""
        frames = F.pad(samples, (0, -len(samples) % self._frame)).view(-1, self._frame)
        power = torch.fft.rfft(frames * self._window).abs().square() * (16 / 3) / self._frame**2  # sums to the mean square
        energy = torch.stack([power[:, band].sum(1) for band in self._bands])
        return 10 * energy.clamp(min=1e-12).log10()


def _smooth(levels: Tensor) -> Tensor:
    return F.avg_pool1d(levels, 3, 1, 1, count_include_pad=False)


def _probability(decibels: Tensor, context: Tensor) -> Tensor:
    """Return the probability of speech of each frame. `context`: decibels of the frames
    from which the noise floor and the contrast are computed."""
    if context.shape[1] * FRAME_SECONDS < _SHORT:
        floor = torch.full((len(_BANDS), 1), _MIN_FLOOR)
    else:
        floor = context.quantile(0.1, 1, keepdim=True).clamp(min=_MIN_FLOOR)
    margin = ((context.amax(1, keepdim=True) - floor) / 2).clamp(*_MARGINS)
    return torch.sigmoid((decibels - floor - margin) / 2).amax(0)


class StreamDetector:
    """Voice detection in a stream. It takes any number of whole frames and judges each by the last block (10 s) of the stream.

    A function given as `vad` gets that block each time, with a new detector. Silero's network has a state of its own.

    Attributes:
        reclassified_frames: how many frames before the last block, which sounded like the start of a tone and were not speech,
            count as speech now.
    """

    def __init__(self, vad: object, rate: float) -> None:
        self._vad, self._rate, self._frame = vad, rate, frame_size(rate)
        self._silero = make_detector(vad, rate) if vad == "silero" else None
        self._energy = EnergyDetector(rate) if isinstance(vad, bool) else None
        self._known = torch.empty(len(_BANDS), 0) if self._energy else torch.empty(0)  # levels, or samples, of the last block
        self._tones, self._returned = ToneFilter(rate, self._frame), torch.empty(0)  # probabilities of the last block
        self.reclassified_frames = 0

    def __call__(self, samples: Tensor) -> Tensor:
        if self._silero is not None:
            return self._silero(samples)
        count = -(-len(samples) // self._frame)
        if self._energy is not None:
            self._known = torch.cat([self._known, self._energy.levels(samples)], 1)[:, -max(count, BLOCK_FRAMES) :]
            self._tones.add(samples)
            decibels = _smooth(self._known)
            probability = self._tones.without_tones(_probability(decibels, decibels))
            near = probability[:-count][-PROTECTED_FRAMES:]
            before = self._returned[len(self._returned) - len(near) :]
            late = ((near >= 0.5) & (before == 0.0)).nonzero()[:, 0]
            self.reclassified_frames = len(near) - int(late[0]) if len(late) else 0
            self._returned = torch.cat([self._returned, probability[-count:]])[-BLOCK_FRAMES:]
            return probability[-count:]
        self._known = torch.cat([self._known, samples])[-max(count, BLOCK_FRAMES) * self._frame :]
        return make_detector(self._vad, self._rate)(self._known)[-count:]


class SileroDetector:
    """The network of the package silero-vad. It has a state, so each audio item needs its own detector."""

    def __init__(self) -> None:
        spec = find_spec("silero_vad")
        if spec is None or not spec.submodule_search_locations:
            how = "run pip install --no-deps silero-vad, since its dependencies may replace torch, or give <<param=>>True"
            raise ConfigError(f"silero-vad is not installed; {how}", param="vad")
        file = Path(spec.submodule_search_locations[0]) / "data" / "silero_vad.jit"
        self._model = torch.jit.load(str(file), "cpu")  # type: ignore[no-untyped-call]
        self._model.reset_states()

    def __call__(self, samples: Tensor) -> Tensor:
        padded = F.pad(samples, (0, -len(samples) % _SILERO_FRAME))
        with torch.inference_mode():
            frames = [self._model(frame[None], _SILERO_RATE) for frame in padded.split(_SILERO_FRAME)]
        return torch.cat(frames).flatten()
