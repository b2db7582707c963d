"""Measure speed and exactness of image and audio preprocessing on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from sensorium.kernels.mel import log_mel_energies
from sensorium.kernels.mel.filters import make_mel_filter_bank
from sensorium.kernels.pixels import preprocess_frames, reference
from sensorium.kernels.pixels.layout import Normalization, PatchLayout
from sensorium.mm.tiling.plan import CropPlan, Resize, TiledView
from sensorium.processors.device import MediaDevice, processing_on
from sensorium.processors.images import PixelSpec, patchify_crops
from sensorium.processors.mel import MelSpec, log_mel
from torch import Tensor

from . import exact
from .attention import timed
from .machine import Bench, of_host
from .parts import Made
from .record import Figure

_SAMPLES, _STEP = 400, 160  # window length and hop in samples
_SCALING = Normalization((0.48, 0.46, 0.41), (0.27, 0.26, 0.28))


def pixels(bench: Bench) -> Iterator[Made]:
    """Resize, normalise and patchify photos and frames; the CPU gives the same bits before normalisation."""
    full = ((1, (1080, 1920), (1092, 1932)), (1, (3024, 4032), (1204, 1596)), (32, (720, 1280), (364, 644)))
    for count, size, target in bench.pick(full, ((2, (30, 40), (16, 24)),)):
        for filter in ("bicubic", "bilinear"):
            yield partial(_picture, bench, count, size, target, filter)


def _picture(bench: Bench, count: int, size: tuple[int, int], target: tuple[int, int], filter: str) -> Iterator[Figure]:
    layout = PatchLayout(bench.pick(14, 4), 2, 2)
    frames = torch.randint(256, (count, *size, 3), dtype=torch.uint8, device=bench.device)
    name = f"{count} x {size[1]} x {size[0]} to {target[1]} x {target[0]}, {filter}"
    made = preprocess_frames(frames, target, filter, _SCALING, layout, torch.float32)
    wanted = reference.preprocess_frames(frames.cpu(), target, filter, _SCALING, layout, torch.float32)
    most = (made.cpu() - wanted).abs().max().item()
    yield Figure(f"{name}, largest difference", most, "of a scaled value", most=1e-5)
    moved = frames.nbytes + made.numel() * bench.dtype.itemsize
    yield timed(bench, name, moved, lambda: preprocess_frames(frames, target, filter, _SCALING, layout, bench.dtype))
    plan, spec, host = CropPlan((TiledView((Resize(*target),)),)), PixelSpec(filter=filter), frames.cpu()
    yield _there_and_back(bench, name, lambda: patchify_crops(host, plan, spec, layout, bench.dtype))


def _there_and_back(bench: Bench, name: str, process: Callable[[], object]) -> Figure:
    """Measure host memory to host memory, compared with one CPU thread, as in a media worker."""
    device, threads = MediaDevice(bench.device), torch.get_num_threads()

    def seconds(where: MediaDevice | None) -> float:
        with processing_on(where):
            process()
            return of_host(process, 3)

    torch.set_num_threads(1)
    there, here = seconds(device), seconds(None)
    torch.set_num_threads(threads)
    note = f"{there * 1e3:,.1f} ms, the CPU {here * 1e3:,.1f} ms"
    return Figure(f"{name}, there and back", here / there, "of a CPU thread's speed", note=note)


def mel(bench: Bench) -> Iterator[Made]:
    """Measure spectrograms of 16 kHz audio, windows of 400 samples every 160."""
    for bands, seconds in bench.pick(((80, 30), (128, 30), (128, 600)), ((80, 1),)):
        yield partial(_sound, bench, bands, seconds)


def _sound(bench: Bench, bands: int, seconds: int) -> Iterator[Figure]:
    """Compare with a transform in float64."""
    window, filters = torch.hann_window(_SAMPLES), _filters(bands)
    bank = make_mel_filter_bank(window, filters, bench.device)
    samples = bench.randn(16_000 * seconds, dtype=torch.float32) * 0.1
    windows = samples.unfold(0, _SAMPLES, _STEP)
    found = log_mel_energies(windows, bank, 1e-10)
    wanted = exact.log_mel_energies(windows, window.to(bench.device), filters.to(bench.device), 1e-10)
    worst = (found.double() - wanted).abs().max().item()
    yield Figure(f"{seconds} s, {bands} bands, largest difference", worst, "of a logarithm", most=1e-3)
    moved = samples.nbytes + found.nbytes
    yield timed(bench, f"{seconds} s, {bands} bands", moved, lambda: log_mel_energies(windows, bank, 1e-10))
    host, spec = samples.cpu(), MelSpec(bands)
    yield _there_and_back(bench, f"{seconds} s, {bands} bands", lambda: log_mel(host, spec))


def _filters(bands: int) -> Tensor:
    """Make triangular filters of growing width, `[frequencies, bands]`."""
    corners = torch.linspace(0, 1, bands + 2) ** 2 * (_SAMPLES // 2)
    place = torch.arange(_SAMPLES // 2 + 1)[:, None]
    rise = (place - corners[:-2]) / (corners[1:-1] - corners[:-2])
    return torch.minimum(rise, (corners[2:] - place) / (corners[2:] - corners[1:-1])).clamp(min=0.0)
