"""Mel filters on a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_GROUP = 32  # mel filters multiplied at a time


@dataclass(frozen=True, eq=False)
class MelFilterBank:
    """The analysis window and the mel filters on one device; the filters in two sparse forms, for torch and for Triton.

    Args:
        window: float32 `[samples]`.
        groups: for each group of neighbouring filters: its bands, the frequency bins that it covers, and the weights there.
        first: int32 `[bands]`, first frequency bin of each filter.
        taps: float32 `[max_bins, bands]`: the weights of each filter from its first bin on.
    """

    window: Tensor
    groups: tuple[tuple[slice, slice, Tensor], ...]
    first: Tensor
    taps: Tensor


def make_mel_filter_bank(window: Tensor, filters: Tensor, device: torch.device) -> MelFilterBank:
    """Build the bank from `window [samples]` and `filters [samples // 2 + 1, bands]`, float32 on the CPU, mostly zero."""
    count, bands = filters.shape
    nonzero = filters != 0
    first = nonzero.int().argmax(0)
    width = max(1, int((torch.where(nonzero, torch.arange(count)[:, None], -1).amax(0) - first).max()) + 1)
    bin_index = first + torch.arange(width)[:, None]
    taps = torch.where(bin_index < count, filters.gather(0, bin_index.clamp(max=count - 1)), 0.0)
    groups = []
    for start in range(0, bands, _GROUP):
        which = slice(start, min(start + _GROUP, bands))
        rows = nonzero[:, which].any(1).nonzero()
        bins = slice(int(rows.min()), int(rows.max()) + 1) if len(rows) else slice(0, 1)
        groups.append((which, bins, filters[bins, which].contiguous().to(device)))
    return MelFilterBank(window.to(device), tuple(groups), first.int().to(device), taps.to(device))
