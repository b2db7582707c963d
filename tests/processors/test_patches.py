"""Pixels to patches: bit-equal to the published processors before scaling, equal after it, in any type and thread."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from oracle import ensure_torchvision
from PIL import Image
from sensorium.callers.errors import ConfigError
from sensorium.mm.buffers import BufferPool
from sensorium.mm.geometry import patch_grid
from sensorium.processors.patches import PatchSpec, apply_size, patchify, read_patch_spec

BOUNDS = {"min_pixels": 28 * 28, "max_pixels": 168 * 168}
SIZES = [(28, 28), (30, 500), (57, 91), (168, 168), (333, 250), (480, 640), (13, 14)]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def patches(frames: torch.Tensor, spec: PatchSpec, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    grid = patch_grid(tuple(frames.shape[1:3]), spec.policy(len(frames)), spec.merge, len(frames), spec.temporal)
    return patchify(frames, grid, spec, dtype)


def published(backend: str, **options: object):
    ensure_torchvision()
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl, image_processing_qwen2_vl

    if backend == "pillow":
        return image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil(**options)
    return image_processing_qwen2_vl.Qwen2VLImageProcessor(**options)


@pytest.mark.parametrize("backend", ["torch", "pillow"])
@pytest.mark.parametrize("filter_number", [2, 3])
def test_bytes_equal_the_published_backend_before_scaling(backend, filter_number):
    plain = {"do_rescale": False, "do_normalize": False, "resample": filter_number}
    processor = published(backend, size={"shortest_edge": BOUNDS["min_pixels"], "longest_edge": BOUNDS["max_pixels"]}, **plain)
    spec = apply_size(read_patch_spec(BOUNDS | plain, PatchSpec()), {"resample": backend})
    assert spec.filter == {2: "bilinear", 3: "bicubic"}[filter_number]
    for seed, size in enumerate(SIZES):
        image = noise(*size, 3, seed=seed)
        want = processor(images=[Image.fromarray(image.numpy())], return_tensors="pt")["pixel_values"]
        got = patches(image[None], spec)
        assert torch.equal(got, want.float()), size


@pytest.mark.parametrize("backend", ["torch", "pillow"])
def test_scaled_values_equal_the_published_backend(backend):
    processor = published(backend, size={"shortest_edge": BOUNDS["min_pixels"], "longest_edge": BOUNDS["max_pixels"]})
    spec = apply_size(read_patch_spec(BOUNDS, PatchSpec()), {"resample": backend})
    for size in SIZES:
        image = noise(*size, 3)
        want = processor(images=[Image.fromarray(image.numpy())], return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(patches(image[None], spec), want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("frames", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types_are_the_float32_values_rounded(frames, dtype):
    clip, spec = noise(frames, 90, 70, 3), PatchSpec(**BOUNDS)
    assert torch.equal(patches(clip, spec, dtype), patches(clip, spec).to(dtype))


def test_an_image_fills_its_temporal_patch_and_a_video_repeats_its_last_frame():
    image, spec = noise(1, 56, 84, 3), PatchSpec(**BOUNDS)
    twice = image.expand(2, -1, -1, -1)
    assert torch.equal(patches(image, spec), patches(twice, spec))
    clip = noise(3, 56, 84, 3)
    assert torch.equal(patches(clip, spec), patches(torch.cat([clip, clip[-1:]]), spec))


def test_views_of_pixels_need_no_copy():
    spec = PatchSpec(**BOUNDS)
    image = noise(1, 100, 120, 3)
    planar = image.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    assert torch.equal(patches(planar, spec), patches(image, spec))
    grey = noise(1, 100, 120, 1)
    assert torch.equal(patches(grey.expand(-1, -1, -1, 3), spec), patches(grey.repeat(1, 1, 1, 3), spec))


def test_threads_give_the_same():
    spec = PatchSpec(max_pixels=1 << 20)
    images = [noise(1, 600 + seed, 800, 3, seed=seed) for seed in range(8)]
    want = [patches(image, spec) for image in images]
    wrong = []

    def work() -> None:
        for _ in range(3):
            wrong.extend(i for i, image in enumerate(images) if not torch.equal(patches(image, spec), want[i]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_resample_is_torch_or_pillow():
    for wrong in ("cv2", 3):
        with pytest.raises(ConfigError, match="torch and pillow"):
            apply_size(PatchSpec(), {"resample": wrong})


def test_buffers_are_reused_when_the_last_view_is_gone():
    pool = BufferPool(64 << 20)
    first = pool.take((1 << 20,), torch.float32)
    place, view = first.data_ptr(), first[5:9]
    del first
    second = pool.take((1 << 20,), torch.float32)
    assert second.data_ptr() != place  # the view still holds it
    del view
    third = pool.take((1 << 19, 2), torch.float32)
    assert third.data_ptr() == place
    assert third.shape == (1 << 19, 2)
    half = pool.take((1 << 20,), torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert len({t.data_ptr() for t in (second, third, half)}) == 3


def test_idle_buffers_are_capped_and_small_ones_left_to_the_allocator():
    pool = BufferPool(4 << 20)
    several = [pool.take((3 << 20,), torch.uint8) for _ in range(3)]
    del several
    assert pool._idle_bytes == 3 << 20
    pool.clear()
    assert pool._idle_bytes == 0
    again = pool.take((3 << 20,), torch.uint8)
    del again
    assert pool._idle_bytes == 3 << 20, "buffers come back after the pool was cleared"
    assert pool.take((10,), torch.float32).shape == (10,)
    assert pool.take((0, 5), torch.float32).numel() == 0


def test_many_threads_never_share_a_buffer():
    pool, wrong = BufferPool(64 << 20), []

    def work(value: int) -> None:
        for _ in range(50):
            tensor = pool.take((1 << 20,), torch.uint8).fill_(value)
            if not bool((tensor == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
