"""Tells tones from speech: dial, ring and busy tones, DTMF, beeps, the tones of fax machines, buzzers, bells and sirens.

Speech changes all the time: its pitch glides, and its spectrum follows the mouth. A tone has its energy in a few lines, or the
same spectrum for long. A frame counts as tonal if one of these holds (the shares and limits were chosen on speech of several
speakers and voices, quiet, noisy, over the telephone and in rooms, and on 36 kinds of tones):

- Lines: three lines have nearly all energy of 64 ms. Vowels have this, too, but not for long.
- High lines: two lines above 600 Hz have most energy of 32 ms. A vowel always has energy below.
- Steady: the spectrum of 64 ms is that of the 64 ms before or after them.

Speech may go on under a tone. Lines that keep their power for 0.9 s are therefore taken out of the spectrum; a frame is no tone
if the rest is no tone itself, is clearly above its own floor, and has more energy than the tone leaks into other lines.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_LOBE = 2  # bins on each side of a line that its energy spreads to, with a Hann window
_LINES, _LINES_SHARE = 3, 0.9
_HIGH_LINES, _HIGH_SHARE = 2, 0.8
_MIN_HIGH, _AUDIBLE = 600.0, 0.02  # hertz of high lines; a line with a smaller share of the energy is not counted
_STEADY = 0.975  # least cosine of the magnitudes of two spectra that count as the same
_LOWEST = 95.0  # hertz; below is hum
_NEAR = 8  # frames before and after a frame whose tonal share decides
_TONAL_POWER, _TONAL_COUNT = 0.8, 0.6  # least shares of power and of loud frames that are tonal around a tone's frame
_LOUD = 0.05  # of the power of the loudest frame around; softer frames, such as edges of tones, are not counted
_AUDIBLE_PROBABILITY = 0.5
_MIN_FRAMES, _MIN_SHARE = 4, 0.5  # frames that are no tone, and their share of the audible ones; fewer are no speech
_LASTING, _STAYS = 28, 10.0  # frames in which a line that is taken out keeps its power, within these decibels
_LINE_CONTRAST, _BESIDE, _REACH = 10.0, 15, 3  # decibels above the mean of the bins beside; bins on each side; bins taken out
_LEAST_REST, _MOST_REST = 0.03, 0.8  # share of the power that speech under a tone has
_REST_MARGIN = 6.0  # decibels of such speech above the floor of what is left without the tone
_REST_FRAMES = 320  # frames from which the floor is computed
_UNDECIDED = 8  # frames; an audible sound that is going on, and partly tonal, is not judged before
PROTECTED_FRAMES = 31  # frames (1 s) around speech in which everything audible stays speech
HISTORY = 640  # frames that are kept


class ToneFilter:
    """Takes the samples of an audio item in order, and says which of their last frames are no tone."""

    def __init__(self, rate: float, frame: int) -> None:
        self._frame, self._bin = frame, rate / frame
        self._short, self._long = torch.hann_window(frame), torch.hann_window(2 * frame)
        self._last = torch.zeros(frame)  # the frame before
        self._spectra = torch.zeros(2, frame + 1)  # unit magnitudes of the last two frames, each with the frame before it
        self._tonal, self._power = torch.zeros(0, dtype=torch.bool), torch.zeros(0)
        self._recent = torch.zeros(_LASTING, frame + 1)  # power of the last frames, each with the frame before it
        self._rests = torch.zeros(2, frame + 1)  # as `_spectra`, without lasting lines
        self._rest_levels, self._under = torch.zeros(0), torch.zeros(0, dtype=torch.bool)  # decibels; speech under a tone

    def add(self, samples: Tensor) -> None:
        """Take more samples. The last frame may be incomplete if no more will come."""
        frames = F.pad(samples, (0, -len(samples) % self._frame)).view(-1, self._frame)
        if not len(frames):
            return
        pairs = torch.cat([torch.cat([self._last[None], frames[:-1]]), frames], 1)
        spectra = self._spectrum(pairs * self._long, self._bin / 2)
        magnitudes = torch.cat([self._spectra, F.normalize(spectra.sqrt(), dim=1)])
        same = (magnitudes[2:] * magnitudes[:-2]).sum(1) >= _STEADY  # [frames]; as two frames before
        tonal = same | (_line_share(spectra, _LINES)[0] >= _LINES_SHARE) | self._has_high_lines(frames)
        tonal = torch.cat([self._tonal, tonal])
        before = tonal[:-2][-len(frames) :]
        before |= same[len(same) - len(before) :]
        self._tonal = tonal[-HISTORY:]
        self._under = torch.cat([self._under, self._is_under_tone(spectra)])[-HISTORY:]
        self._power = torch.cat([self._power, frames.square().mean(1)])[-HISTORY:]
        self._last, self._spectra = frames[-1], magnitudes[-2:]

    def _is_under_tone(self, spectra: Tensor) -> Tensor:
        """Return which frames have speech under a tone, `[frames]`. `spectra`: power `[frames, bins]`."""
        recent = torch.cat([self._recent, spectra])
        self._recent = recent[-len(self._recent) :]
        lines = _lasting_lines(recent)[-len(spectra) :]
        rest = spectra.masked_fill(lines, 0.0)
        power = rest.sum(1)
        levels = torch.cat([self._rest_levels, 10 * power.clamp(min=1e-12).log10()])[-HISTORY:]
        self._rest_levels = levels
        floor = levels[-max(_REST_FRAMES, len(spectra)) :].quantile(0.1)
        magnitudes = torch.cat([self._rests, F.normalize(rest.sqrt(), dim=1)])
        self._rests = magnitudes[-2:]
        same = (magnitudes[2:] * magnitudes[:-2]).sum(1) >= _STEADY
        is_tone = same | (_line_share(rest, _LINES)[0] >= _LINES_SHARE)
        is_tone[:-2] |= same[2:]
        share = power / (spectra.sum(1) + 1e-12)
        is_heard = (share >= _LEAST_REST) & (levels[-len(spectra) :] >= floor + _REST_MARGIN)
        return is_heard & (share <= _MOST_REST) & ~is_tone

    def without_tones(self, probability: Tensor) -> Tensor:
        """Return the probability of speech of the last frames, `[frames]`: as given, but 0 for tones, and 1 under a tone."""
        under = self._under[-len(probability) :]
        audible = (probability >= _AUDIBLE_PROBABILITY) | under
        tonal, power = self._tonal[-len(audible) :] & ~under, self._power[-len(audible) :] * audible
        loud = audible & (power >= _LOUD * F.max_pool1d(power[None], 2 * _NEAR + 1, 1, _NEAR)[0])
        count = _around(loud.float())
        is_tone = _around(power * tonal) >= _TONAL_POWER * _around(power)
        is_tone &= _around((loud & tonal).float()) >= _TONAL_COUNT * count
        speech = audible & ~is_tone
        speech &= _around(speech.float()) >= (_MIN_SHARE * _around(audible.float())).clamp(min=_MIN_FRAMES)
        last = audible.flip(0).cumprod(0).flip(0).bool()  # the sound that is going on
        if last.sum() < _UNDECIDED and (last & tonal).any():
            speech &= ~last
        near = F.max_pool1d(speech[None].float(), 2 * PROTECTED_FRAMES + 1, 1, PROTECTED_FRAMES)[0] > 0
        return torch.where(audible & ~near, 0.0, torch.where(under & near, 1.0, probability))

    def _spectrum(self, frames: Tensor, width: float) -> Tensor:
        """Return the power of each bin, `[frames, bins]`, without hum. `width`: hertz of a bin."""
        power: Tensor = torch.fft.rfft(frames).abs().square()
        power[:, : int(_LOWEST / width)] = 0.0
        return power

    def _has_high_lines(self, frames: Tensor) -> Tensor:
        share, lowest = _line_share(self._spectrum(frames * self._short, self._bin), _HIGH_LINES)
        return (share >= _HIGH_SHARE) & (lowest * self._bin >= _MIN_HIGH)


def _lasting_lines(power: Tensor) -> Tensor:
    """Return the bins of lines that keep their power up to a frame, `[frames, bins]`, from the power of frames in order."""
    least = -F.max_pool1d(-power.T[None], _LASTING, 1)[0].T  # [frames - _LASTING + 1, bins]
    levels = 10 * least.clamp(min=1e-9).log10()
    beside = F.avg_pool1d(levels[None], 2 * _BESIDE + 1, 1, _BESIDE, count_include_pad=False)[0]
    now = 10 * power[_LASTING - 1 :].clamp(min=1e-9).log10()
    is_line = (levels >= beside + _LINE_CONTRAST) & (levels >= now - _STAYS)
    return F.max_pool1d(is_line.float()[None], 2 * _REACH + 1, 1, _REACH)[0] > 0


def _line_share(power: Tensor, lines: int) -> tuple[Tensor, Tensor]:
    """Return the share of the power in the strongest lines, and the bin of the lowest one that is audible, `[frames]` each."""
    total, left, share = power.sum(1) + 1e-12, power.clone(), torch.zeros(len(power))
    lowest = torch.full((len(power),), power.shape[1])
    for _ in range(lines):
        peak = left.argmax(1)
        lobe = (peak[:, None] + torch.arange(-_LOBE, _LOBE + 1)).clamp(0, power.shape[1] - 1)  # [frames, bins]
        part = left.gather(1, lobe)
        part = part.sum(1) - (part[:, 1:] * (lobe[:, 1:] == lobe[:, :-1])).sum(1)  # bins that the clamp doubles count once
        lowest = torch.where(part >= _AUDIBLE * total, torch.minimum(lowest, peak), lowest)
        share += part / total
        left.scatter_(1, lobe, 0.0)
    return share, lowest


def _around(values: Tensor) -> Tensor:
    """Return the sum of the values of the frames around each frame."""
    return F.avg_pool1d(values[None], 2 * _NEAR + 1, 1, _NEAR)[0] * (2 * _NEAR + 1)
