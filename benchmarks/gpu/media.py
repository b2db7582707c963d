"""Pictures to patches and sounds to spectra on the device: how fast, and how exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from sensorium.kernels.mel import log_bands, make_bank
from sensorium.kernels.pixels import Layout, Scaling, laid_out, laid_out_reference
from sensorium.mm.tiling import CropPlan, Resize, View
from sensorium.processors.device import MediaDevice, processing_on
from sensorium.processors.mel import MelSpec, log_mel
from sensorium.processors.pictures import PixelSpec, patch_rows
from torch import Tensor

from . import exact
from .attention import timed
from .machine import Bench, of_host
from .parts import Made
from .record import Figure

_SAMPLES, _STEP = 400, 160  # of a window, and from one to the next
_SCALING = Scaling((0.48, 0.46, 0.41), (0.27, 0.26, 0.28))


def pixels(bench: Bench) -> Iterator[Made]:
    """Photos and frames resized, scaled, laid out as patches; the same filter on the CPU has the same bits before scaling."""
    full = ((1, (1080, 1920), (1092, 1932)), (1, (3024, 4032), (1204, 1596)), (32, (720, 1280), (364, 644)))
    for count, size, target in bench.pick(full, ((2, (30, 40), (16, 24)),)):
        for filter in ("bicubic", "bilinear"):
            yield partial(_picture, bench, count, size, target, filter)


def _picture(bench: Bench, count: int, size: tuple[int, int], target: tuple[int, int], filter: str) -> Iterator[Figure]:
    layout = Layout(bench.pick(14, 4), 2, 2)
    frames = torch.randint(256, (count, *size, 3), dtype=torch.uint8, device=bench.device)
    name = f"{count} x {size[1]} x {size[0]} to {target[1]} x {target[0]}, {filter}"
    made = laid_out(frames, target, filter, _SCALING, layout, torch.float32)
    wanted = laid_out_reference(frames.cpu(), target, filter, _SCALING, layout, torch.float32)
    most = (made.cpu() - wanted).abs().max().item()
    yield Figure(f"{name}, largest difference", most, "of a scaled value", most=1e-5)
    moved = frames.nbytes + made.numel() * bench.dtype.itemsize
    yield timed(bench, name, moved, lambda: laid_out(frames, target, filter, _SCALING, layout, bench.dtype))
    plan, spec, host = CropPlan((View((Resize(*target),)),)), PixelSpec(filter=filter), frames.cpu()
    yield _there_and_back(
        bench, name, lambda: patch_rows(host, plan, spec, layout.patch, layout.merge, bench.dtype, layout.temporal)
    )


def _there_and_back(bench: Bench, name: str, process: Callable[[], object]) -> Figure:
    """From the host's memory to the host's memory, beside one thread of the CPU, as a worker has it."""
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
    """Sounds at 16 kHz, windows of 400 samples every 160."""
    for bands, seconds in bench.pick(((80, 30), (128, 30), (128, 600)), ((80, 1),)):
        yield partial(_sound, bench, bands, seconds)


def _sound(bench: Bench, bands: int, seconds: int) -> Iterator[Figure]:
    """Against a transform in float64."""
    window, filters = torch.hann_window(_SAMPLES), _filters(bands)
    bank = make_bank(window, filters, bench.device)
    sound = bench.randn(16_000 * seconds, dtype=torch.float32) * 0.1
    windows = sound.unfold(0, _SAMPLES, _STEP)
    found = log_bands(windows, bank, 1e-10)
    wanted = exact.log_bands(windows, window.to(bench.device), filters.to(bench.device), 1e-10)
    worst = (found.double() - wanted).abs().max().item()
    yield Figure(f"{seconds} s, {bands} bands, largest difference", worst, "of a logarithm", most=1e-3)
    moved = sound.nbytes + found.nbytes
    yield timed(bench, f"{seconds} s, {bands} bands", moved, lambda: log_bands(windows, bank, 1e-10))
    host, spec = sound.cpu(), MelSpec(bands)
    yield _there_and_back(bench, f"{seconds} s, {bands} bands", lambda: log_mel(host, spec))


def _filters(bands: int) -> Tensor:
    """Triangles that get wider, `[frequencies, bands]`."""
    corners = torch.linspace(0, 1, bands + 2) ** 2 * (_SAMPLES // 2)
    place = torch.arange(_SAMPLES // 2 + 1)[:, None]
    rise = (place - corners[:-2]) / (corners[1:-1] - corners[:-2])
    return torch.minimum(rise, (corners[2:] - place) / (corners[2:] - corners[1:-1])).clamp(min=0.0)
