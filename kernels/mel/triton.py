"""Log-mel energies in Triton, after the device's own FFT."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import launch_config
from .filters import MelFilterBank

_LOG10_OF_2 = tl.constexpr(0.30102999566398120)


@triton.jit
def _bands_kernel(
    spectrum_ptr, first_ptr, taps_ptr, out_ptr, rows, bins, bands, width, least, ROWS: tl.constexpr, BANDS: tl.constexpr
):  # fmt: skip
    """spectrum `[rows, bins, 2]` (real, imaginary), out `[rows, bands]`; grid (row tiles,): all bands of some rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    band = tl.arange(0, BANDS)
    there = band < bands
    inside = (row < rows)[:, None] & there[None, :]
    first = tl.load(first_ptr + band, mask=there, other=0)
    line = spectrum_ptr + (row.to(tl.int64) * bins * 2)[:, None]
    energy = tl.zeros([ROWS, BANDS], tl.float32)
    for tap in range(width):
        weight = tl.load(taps_ptr + tap * bands + band, mask=there, other=0.0)[None, :]
        at = line + tl.minimum(first + tap, bins - 1)[None, :] * 2
        real, imaginary = tl.load(at, mask=inside, other=0.0), tl.load(at + 1, mask=inside, other=0.0)
        energy += (real * real + imaginary * imaginary) * weight
    out = out_ptr + row.to(tl.int64)[:, None] * bands + band[None, :]
    tl.store(out, tl.log2(tl.maximum(energy, least)) * _LOG10_OF_2, mask=inside)


def log_mel_energies(windows: Tensor, bank: MelFilterBank, least: float) -> Tensor:
    """Compute `mel.log_mel_energies`."""
    spectrum = torch.view_as_real(torch.fft.rfft(windows * bank.window))
    rows, bins, _ = spectrum.shape
    width, bands = bank.taps.shape
    out = torch.empty((rows, bands), device=windows.device)
    shape = launch_config.get_config("mel")
    _bands_kernel[(triton.cdiv(rows, shape["ROWS"]),)](
        spectrum, bank.first, bank.taps, out, rows, bins, bands, width, least, BANDS=triton.next_power_of_2(bands), **shape
    )
    return out
