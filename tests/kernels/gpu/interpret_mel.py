"""The mel kernel against torch, for spectra from loud to silent."""

from __future__ import annotations

import pytest
import torch
from sensorium.kernels import dispatch
from sensorium.kernels.mel import log_mel_energies
from sensorium.kernels.mel import triton as mel
from sensorium.kernels.mel.filters import make_mel_filter_bank
from sensorium.processors.mel import MelSpec, log_mel
from torch import Tensor

CPU = torch.device("cpu")


def triangles(bins: int, bands: int) -> Tensor:
    """Return overlapping filters of growing width, and one that is zero."""
    corners = torch.linspace(0, 1, bands + 2) ** 2 * (bins - 1)
    place = torch.arange(bins)[:, None]
    rise = (place - corners[:-2]) / (corners[1:-1] - corners[:-2])
    fall = (corners[2:] - place) / (corners[2:] - corners[1:-1])
    table = torch.minimum(rise, fall).clamp(min=0.0)
    table[:, bands // 2] = 0.0
    return table


@pytest.mark.parametrize(("samples", "bands", "count"), [(400, 80, 21), (400, 128, 3), (64, 5, 40), (512, 1, 2)])
def test_bands(samples: int, bands: int, count: int) -> None:
    bank = make_mel_filter_bank(torch.hann_window(samples), triangles(samples // 2 + 1, bands), CPU)
    audio = torch.randn(samples + count * 10) * torch.logspace(-9, 2, samples + count * 10)
    windows = audio.unfold(0, samples, 10)
    found = mel.log_mel_energies(windows, bank, 1e-10)
    torch.testing.assert_close(found, log_mel_energies(windows, bank, 1e-10), atol=2e-6, rtol=2e-6)
    assert found.min() == torch.tensor(1e-10).log10()


@pytest.mark.parametrize("mels", [80, 128])
def test_the_spectrogram_of_audio(mels: int) -> None:
    """The audio grows from a whisper to clipping; silence follows."""
    time = torch.arange(16_000) / 16_000
    audio = torch.sin(2 * torch.pi * (200 + 900 * time) * time) * time**2 + torch.randn(16_000) * 3e-3
    wanted = log_mel(audio, MelSpec(mels), 24_000)
    with dispatch.use_backends("mel=triton"):
        found = log_mel(audio, MelSpec(mels), 24_000)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0.0)
