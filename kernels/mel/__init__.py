"""Log-mel energies: windows of samples -> log10 of the energy in each mel band."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import implementation
from .filters import MelFilterBank


def log_mel_energies(windows: Tensor, bank: MelFilterBank, least: float) -> Tensor:
    """Return log10 of each band's energy, at least `least`: `windows [n, samples]` float32, any strides -> `[n, bands]`."""
    energies: Tensor = implementation("mel", windows.device, windows.dtype).log_mel_energies(windows, bank, least)
    return energies
