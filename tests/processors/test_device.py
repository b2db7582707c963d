"""Media processing on a device: the same results as on the CPU, transfers in parts, a stream per thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import pytest
import torch
from sensorium.callers.errors import InputError
from sensorium.kernels import pixels as kernel
from sensorium.kernels.pixels.layout import PatchLayout
from sensorium.mm.geometry import patch_grid
from sensorium.mm.tiling.aspect import AspectTiles
from sensorium.mm.tiling.longest import EdgeTiles, PanAndScan
from sensorium.mm.tiling.plan import CropPad, CropPlan, Resize, TiledView
from sensorium.processors import images, mel
from sensorium.processors.device import MediaDevice, media_device, processing_on
from sensorium.processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, PixelSpec, patchify_crops
from sensorium.processors.mel import MelSpec, log_mel
from sensorium.processors.patches import PatchSpec, patchify
from waiting import LONG

CPU = torch.device("cpu")
SPEC = PixelSpec(IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD)
PLANS = {
    "tiles and a whole": AspectTiles((56, 56), 1, 6, True).plan(90, 140),
    "twice resized": EdgeTiles(200, 56).plan(90, 140),
    "crops resized": PanAndScan((56, 56), 20, 4, 1.2).plan(60, 140),
    "filled up": CropPlan((TiledView((Resize(50, 75), CropPad(-3, 0, 60, 84, (7, 8, 9)))),)),
    "a side left over": CropPlan((TiledView((Resize(50, 75),)),)),
}


def noise(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plan", PLANS)
def test_patches_are_equal(monkeypatch: pytest.MonkeyPatch, plan: str, dtype: torch.dtype) -> None:
    clip = noise(3, 90 if plan != "crops resized" else 60, 140, 3)
    wanted = patchify_crops(clip, PLANS[plan], SPEC, PatchLayout(14, 2), dtype)
    for most in (1, 64 << 20):
        monkeypatch.setattr(images, "MAX_TRANSFER_BYTES", most)
        with processing_on(MediaDevice(CPU)):
            assert torch.equal(patchify_crops(clip, PLANS[plan], SPEC, PatchLayout(14, 2), dtype), wanted)


@pytest.mark.parametrize("frames", [1, 2, 5])
def test_videos_are_transferred_in_parts_of_whole_patches(monkeypatch: pytest.MonkeyPatch, frames: int) -> None:
    spec, clip, sent = PatchSpec(), noise(frames, 80, 110, 3), []
    grid = patch_grid((80, 110), spec.policy(frames), spec.merge, frames, spec.temporal)
    wanted, whole = patchify(clip, grid, spec), kernel.preprocess_frames

    def spy(part: torch.Tensor, *rest: object) -> torch.Tensor:
        sent.append(len(part))
        return whole(part, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(kernel, "preprocess_frames", spy)
    one = max(clip[:2].nbytes, wanted.nbytes // -(-frames // 2))
    for most in (one - 1, one):  # more than that at once stays here
        monkeypatch.setattr(images, "MAX_TRANSFER_BYTES", most)
        with processing_on(MediaDevice(CPU)):
            assert torch.equal(patchify(clip, grid, spec), wanted)
    assert sent == {1: [1], 2: [2], 5: [2, 2, 1]}[frames]


def test_images_that_pillow_resizes_stay_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, picture = replace(SPEC, resample="pillow"), noise(1, 90, 140, 3)
    wanted = patchify_crops(picture, PLANS["filled up"], spec, PatchLayout(14))
    monkeypatch.delattr(kernel, "preprocess_frames")
    with processing_on(MediaDevice(CPU)):
        assert torch.equal(patchify_crops(picture, PLANS["filled up"], spec, PatchLayout(14)), wanted)


@pytest.mark.parametrize("length", [None, 9000])
def test_audio_is_processed_in_parts(monkeypatch: pytest.MonkeyPatch, length: int | None) -> None:
    sound = torch.randn(7777, generator=torch.Generator().manual_seed(0))
    wanted = log_mel(sound, MelSpec(), length)
    for some in (1, 10, 1 << 13):
        monkeypatch.setattr(mel, "_FRAMES_PER_TRANSFER", some)
        with processing_on(MediaDevice(CPU)):
            torch.testing.assert_close(log_mel(sound, MelSpec(), length), wanted, atol=1e-6, rtol=0.0)


def test_every_thread_has_a_stream_of_its_own() -> None:
    made: list[str] = []
    inside: dict[str, set[str]] = {}
    both, numbers = threading.Barrier(2, timeout=LONG), count()

    class Stream:
        def __init__(self) -> None:
            self.name = f"stream {next(numbers)}"
            made.append(self.name)

        def __enter__(self) -> None:
            inside.setdefault(threading.current_thread().name, set()).add(self.name)

        def __exit__(self, *_: object) -> None: ...

    device = MediaDevice(CPU, Stream)

    def work(_: int) -> None:
        both.wait()
        with processing_on(device):
            assert media_device() is device
        assert media_device() is None

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(6)))
    assert sorted(made) == ["stream 0", "stream 1"]
    assert sorted(map(sorted, inside.values())) == [["stream 0"], ["stream 1"]]


def test_out_of_memory_names_options_to_lower() -> None:
    def work(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(InputError, match="cpu has too little memory to process it: lower gpu_memory_fraction, "):
        MediaDevice(CPU).fill([(torch.zeros(1), torch.zeros(1))], work)


def test_an_error_resets_the_device_and_the_stream() -> None:
    left: list[str] = []

    @contextmanager
    def stream() -> Iterator[None]:
        try:
            yield
        finally:
            left.append("stream")

    with pytest.raises(ZeroDivisionError), processing_on(MediaDevice(CPU, stream)):
        _ = 1 / 0
    assert left == ["stream"]
    assert media_device() is None
