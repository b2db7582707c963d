"""Pictures to patches and sounds to spectra on the device: how fast, and how exact."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sensorium.kernels.mel import log_bands, make_bank
from sensorium.kernels.pixels import Layout, Scaling, laid_out, laid_out_reference

from . import exact
from .attention import bandwidth
from .machine import Bench
from .record import Figure

_SCALING = Scaling((0.48, 0.46, 0.41), (0.27, 0.26, 0.28))


def pixels(bench: Bench) -> Iterator[Figure]:
    """Photos and frames resized, scaled, laid out as patches; the same filter on the CPU has the same bits before scaling."""
    layout = Layout(14, 2, 2) if not bench.tiny else Layout(4, 2, 2)
    full = ((1, (1080, 1920), (1092, 1932)), (1, (3024, 4032), (1204, 1596)), (32, (720, 1280), (364, 644)))
    for count, size, target in bench.pick(full, ((2, (30, 40), (16, 24)),)):
        frames = torch.randint(256, (count, *size, 3), dtype=torch.uint8, device=bench.device)
        for filter in ("bicubic", "bilinear"):
            name = f"{count} x {size[1]} x {size[0]} to {target[1]} x {target[0]}, {filter}"
            made = laid_out(frames, target, filter, _SCALING, layout, torch.float32)
            wanted = laid_out_reference(frames.cpu(), target, filter, _SCALING, layout, torch.float32)
            most = (made.cpu() - wanted).abs().max().item()
            yield Figure(f"{name}, largest difference", most, "of a scaled value", most=1e-5)
            run = lambda f=frames, t=target, k=filter: laid_out(f, t, k, _SCALING, layout, bench.dtype)  # noqa: E731
            moved = frames.nbytes + made.numel() * bench.dtype.itemsize
            yield bandwidth(bench, name, moved, bench.seconds(run), None)


def mel(bench: Bench) -> Iterator[Figure]:
    """Thirty seconds at 16 kHz, windows of 400 samples every 160, against a transform in float64."""
    samples, step = 400, 160
    for bands, seconds_ in bench.pick(((80, 30), (128, 30), (128, 600)), ((80, 1),)):
        corners = torch.linspace(0, 1, bands + 2) ** 2 * (samples // 2)
        place = torch.arange(samples // 2 + 1)[:, None]
        rise = (place - corners[:-2]) / (corners[1:-1] - corners[:-2])
        filters = torch.minimum(rise, (corners[2:] - place) / (corners[2:] - corners[1:-1])).clamp(min=0.0)
        window = torch.hann_window(samples)
        bank = make_bank(window, filters, bench.device)
        sound = bench.randn(16_000 * seconds_, dtype=torch.float32) * 0.1
        windows = sound.unfold(0, samples, step)
        found = log_bands(windows, bank, 1e-10)
        wanted = exact.log_bands(windows, window.to(bench.device), filters.to(bench.device), 1e-10)
        heard = (filters > 0).any(0).to(bench.device)
        worst = (found.double() - wanted)[:, heard].abs().max().item()
        yield Figure(f"{seconds_} s, {bands} bands, largest difference", worst, "of a logarithm", most=1e-3)
        took = bench.seconds(lambda windows=windows, bank=bank: log_bands(windows, bank, 1e-10))
        moved = sound.nbytes + found.nbytes
        yield bandwidth(bench, f"{seconds_} s, {bands} bands", moved, took, None)
