"""Log-mel energies in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linear.mkl import multiply_padded, pad_rows
from .filters import MelFilterBank

_CHUNK = 512  # windows transformed at a time, to stay in the CPU's cache


def log_mel_energies(windows: Tensor, bank: MelFilterBank, least: float) -> Tensor:
    """Compute `mel.log_mel_energies`."""
    out = torch.empty(len(windows), len(bank.first), device=windows.device)
    for start in range(0, len(windows), _CHUNK):
        spectrum = torch.fft.rfft(windows[start : start + _CHUNK] * bank.window)
        power = pad_rows(torch.addcmul(spectrum.real * spectrum.real, spectrum.imag, spectrum.imag))
        for which, bins, filters in bank.groups:  # a live stream's energies must not depend on the number of windows at a time
            out[start : start + _CHUNK, which] = multiply_padded(power[:, bins], filters.T)[: len(spectrum)]
    return out.clamp_(min=least).log10_()
