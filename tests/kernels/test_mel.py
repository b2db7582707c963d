"""Log-mel energies, and both forms of a filter bank."""

from __future__ import annotations

import torch
from sensorium.kernels.mel import log_mel_energies
from sensorium.kernels.mel.filters import make_mel_filter_bank

CPU = torch.device("cpu")


def test_both_forms_hold_the_table() -> None:
    filters = torch.rand(33, 40) * (torch.rand(33, 40) < 0.1)
    filters[:, 7] = 0.0
    bank = make_mel_filter_bank(torch.ones(64), filters, CPU)
    dense, sparse = torch.zeros_like(filters), torch.zeros(33 + len(bank.taps), 40)
    for which, bins, table in bank.groups:
        dense[bins, which] = table
    for tap, weights in enumerate(bank.taps):
        sparse[bank.first + tap, torch.arange(40)] += weights
    assert torch.equal(dense, filters)
    assert torch.equal(sparse[:33], filters)


def test_bands_by_their_definition() -> None:
    audio, window, filters = torch.randn(2000), torch.hann_window(64), torch.rand(33, 5)
    windows = audio.unfold(0, 64, 3)  # more windows than one chunk
    power = torch.fft.rfft(windows.double() * window).abs() ** 2
    wanted = (power @ filters.double()).clamp(min=1e-10).log10().float()
    torch.testing.assert_close(
        log_mel_energies(windows, make_mel_filter_bank(window, filters, CPU), 1e-10), wanted, atol=1e-5, rtol=1e-5
    )


def test_energies_do_not_depend_on_the_number_of_windows() -> None:
    filters = torch.rand(201, 80) * (torch.rand(201, 80) > 0.9)
    bank, windows = make_mel_filter_bank(torch.hann_window(400), filters, CPU), torch.randn(600, 400)
    whole = log_mel_energies(windows, bank, 1e-10)
    counts = (1, 2, 5, 11, 12, 16, 47, 49, 511, 513, 519, 599)
    assert [n for n in counts if not torch.equal(log_mel_energies(windows[:n], bank, 1e-10), whole[:n])] == []
