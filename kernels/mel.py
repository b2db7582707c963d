"""From windows of samples to the logarithms of bands of their spectrum. Knows no sound, no scale of pitch and no model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import backend

_CHUNK = 512  # windows transformed at a time, so that they stay in the CPU's cache
_GROUP = 32  # filters multiplied at a time


@dataclass(frozen=True, eq=False)
class Bank:
    """Weights of samples and of frequencies, on one device, in the two forms that are read.

    Args:
        window: float32 `[samples]`.
        groups: of neighbouring filters: which, the frequencies that any of them hears, and their table there.
        first: int32 `[bands]`, the first frequency that a filter hears.
        taps: float32 `[most, bands]`, its weights from there on.
    """

    window: Tensor
    groups: tuple[tuple[slice, slice, Tensor], ...]
    first: Tensor
    taps: Tensor


def make_bank(window: Tensor, filters: Tensor, device: torch.device) -> Bank:
    """From `window [samples]` and `filters [samples // 2 + 1, bands]`, float32 on a CPU; most of the table is zero."""
    count, bands = filters.shape
    heard = filters != 0
    first = heard.int().argmax(0)
    width = max(1, int((torch.where(heard, torch.arange(count)[:, None], -1).amax(0) - first).max()) + 1)
    reach = first + torch.arange(width)[:, None]
    taps = torch.where(reach < count, filters.gather(0, reach.clamp(max=count - 1)), 0.0)
    groups = []
    for start in range(0, bands, _GROUP):
        which = slice(start, min(start + _GROUP, bands))
        rows = heard[:, which].any(1).nonzero()
        bins = slice(int(rows.min()), int(rows.max()) + 1) if len(rows) else slice(0, 1)
        groups.append((which, bins, filters[bins, which].contiguous().to(device)))
    return Bank(window.to(device), tuple(groups), first.int().to(device), taps.to(device))


def log_bands(windows: Tensor, bank: Bank, least: float) -> Tensor:
    """`windows [n, samples]`, float32, any view -> `[n, bands]`: log10 of each band's energy, at least of `least`."""
    if backend("mel", windows.device, windows.dtype) == "triton":
        from .gpu import mel

        return mel.log_bands(windows, bank, least)
    out = torch.empty(len(windows), len(bank.first), device=windows.device)
    for start in range(0, len(windows), _CHUNK):
        spectrum = torch.fft.rfft(windows[start : start + _CHUNK] * bank.window)
        power = torch.addcmul(spectrum.real * spectrum.real, spectrum.imag, spectrum.imag)
        for which, bins, filters in bank.groups:
            torch.matmul(power[:, bins], filters, out=out[start : start + _CHUNK, which])
    return out.clamp_(min=least).log10_()
