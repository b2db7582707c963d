"""Launches for half a minute of audio, in the bands of published encoders."""

from __future__ import annotations

import torch
from sensorium.kernels.mel import triton as mel
from sensorium.kernels.mel.filters import make_mel_filter_bank

HOT = {"_bands_kernel"}


def launches() -> None:
    for bands in (80, 128):
        bank = make_mel_filter_bank(torch.ones(400), torch.eye(201, bands), torch.device("cpu"))
        mel.log_mel_energies(torch.zeros(480_240).unfold(0, 400, 160), bank, 1e-10)
