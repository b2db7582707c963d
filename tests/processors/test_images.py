"""Resizing, cutting and scaling: bit-equal to the published processors before scaling, equal after it, in any type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sensorium.callers.errors import ConfigError
from sensorium.kernels.pixels.layout import PatchLayout
from sensorium.mm.tiling.aspect import AspectTiles
from sensorium.mm.tiling.canvas import AnyResTiles
from sensorium.mm.tiling.longest import EdgeTiles, PanAndScan
from sensorium.mm.tiling.plan import CropPad, CropPlan, TiledView
from sensorium.mm.tiling.whole import BoundedResize, CenterCrop, FixedSize
from sensorium.processors.images import (
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    PixelSpec,
    apply_resample,
    patchify_crops,
    read_pixel_spec,
)
from sensorium.processors.patches import PatchSpec, apply_size, read_patch_spec

SIZES = [(64, 64), (30, 500), (57, 91), (333, 250), (480, 640), (13, 14)]
PLAIN = PixelSpec((0.0,) * 3, (1.0,) * 3, 1.0)
BARE = {"do_rescale": False, "do_normalize": False}
FILTERS = ["lanczos", "bilinear", "bicubic"]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def planes(frames: torch.Tensor, plan: CropPlan, spec: PixelSpec, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return patches of one pixel as images `[n * tiles, 3, height, width]`."""
    tall, wide = plan.views[0].tile_size
    return patchify_crops(frames, plan, spec, PatchLayout(1), dtype).view(-1, tall, wide, 3).permute(0, 3, 1, 2)


def aspect(**options: Any) -> Any:
    from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor

    return GotOcr2ImageProcessor(size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=6, **options)


def pinpoints(**options: Any) -> Any:
    from transformers.models.llava_onevision.image_processing_llava_onevision import LlavaOnevisionImageProcessor

    sizes = [[48, 96], [96, 48], [96, 96], [48, 144]]
    return LlavaOnevisionImageProcessor(size={"height": 48, "width": 48}, image_grid_pinpoints=sizes, **options)


def edges(**options: Any) -> Any:
    from transformers.models.idefics3.image_processing_idefics3 import Idefics3ImageProcessor

    return Idefics3ImageProcessor(size={"longest_edge": 200}, max_image_size={"longest_edge": 56}, **options)


def pan(**options: Any) -> Any:
    from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor

    crops = {"pan_and_scan_min_crop_size": 20, "pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2}
    return Gemma3ImageProcessor(size={"height": 56, "width": 56}, do_pan_and_scan=True, **crops, **options)


def bounded(**options: Any) -> Any:
    from transformers.models.pixtral.image_processing_pixtral import PixtralImageProcessor

    return PixtralImageProcessor(size={"longest_edge": 200}, patch_size={"height": 16, "width": 16}, **options)


def middle(**options: Any) -> Any:
    from transformers.models.clip.image_processing_clip import CLIPImageProcessor

    return CLIPImageProcessor(size={"shortest_edge": 60}, crop_size={"height": 56, "width": 70}, **options)


WAYS = {
    "aspect": (aspect, AspectTiles((56, 56), 1, 6)),
    "pinpoints": (pinpoints, AnyResTiles((48, 48), (48, 48), ((48, 96), (96, 48), (96, 96), (48, 144)))),
    "edges": (edges, EdgeTiles(200, 56)),
    "pan": (pan, PanAndScan((56, 56), 20, 4, 1.2)),
    "bounded": (bounded, BoundedResize((200, 200), (16, 16))),
    "middle": (middle, CenterCrop(60, (56, 70))),
}


@pytest.mark.parametrize("kernel", FILTERS)
@pytest.mark.parametrize("way", WAYS)
def test_bytes_equal_the_published_processors_before_scaling(way, kernel):
    make, policy = WAYS[way]
    number = {"lanczos": 1, "bilinear": 2, "bicubic": 3}[kernel]
    processor, spec = make(resample=number, **BARE), read_pixel_spec(BARE | {"resample": number}, PixelSpec(), {})
    assert spec == PixelSpec((0.0,) * 3, (1.0,) * 3, 1.0, kernel)
    for seed, size in enumerate(SIZES):
        image = noise(*size, 3, seed=seed)
        want = processor(images=[Image.fromarray(image.numpy())], return_tensors="pt")["pixel_values"]
        got = planes(image[None], policy.plan(*size), spec)
        assert torch.equal(got, want.reshape(-1, *want.shape[-3:]).float()), size


@pytest.mark.parametrize("way", WAYS)
def test_scaled_values_equal_the_published_processors(way):
    make, policy = WAYS[way]
    processor = make()
    json = {"image_mean": processor.image_mean, "image_std": processor.image_std, "resample": int(processor.resample)}
    spec = read_pixel_spec(json, PixelSpec(), {})
    for size in SIZES:
        image = noise(*size, 3)
        want = processor(images=[Image.fromarray(image.numpy())], return_tensors="pt")["pixel_values"]
        got = planes(image[None], policy.plan(*size), spec)
        assert torch.equal(got, want.reshape(-1, *want.shape[-3:])), size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", [AspectTiles((56, 56), 1, 6), FixedSize((58, 71)), EdgeTiles(200, 56)])
def test_patches_times_a_weight_are_a_convolution(policy, dtype):
    clip, spec = noise(2, 90, 140, 3), PixelSpec(IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD)
    plan, weight = policy.plan(90, 140), torch.randn(5, 3, 14, 14, dtype=torch.float64)
    pieces = planes(clip, plan, spec, dtype)
    want = F.conv2d(pieces.double(), weight, stride=14).flatten(2).transpose(1, 2).reshape(-1, 5)
    rows = patchify_crops(clip, plan, spec, PatchLayout(14), dtype)
    assert rows.dtype == dtype
    torch.testing.assert_close(rows.double() @ weight.flatten(1).T, want)
    tall, wide = (side // 14 for side in plan.views[0].tile_size)
    if tall % 2 == wide % 2 == 0:
        squares = rows.view(-1, tall // 2, 2, wide // 2, 2, rows.shape[1]).transpose(2, 3).reshape(rows.shape)
        assert torch.equal(patchify_crops(clip, plan, spec, PatchLayout(14, 2), dtype), squares)
    assert torch.equal(pieces, planes(clip, plan, spec).to(dtype))
    alone = torch.cat([planes(frame[None], plan, spec, dtype) for frame in clip])
    assert torch.equal(pieces, alone)  # a frame's pieces lie side by side


@pytest.mark.parametrize(
    "window", [CropPad(-2, -3, 9, 10, (7, 8, 9)), CropPad(1, 2, 2, 2), CropPad(-1, 1, 3, 9), CropPad(2, -1, 3, 3)]
)
def test_windows_crop_and_fill(window):
    image = noise(1, 5, 6, 3)
    got = planes(image, CropPlan((TiledView((window,)),)), PLAIN)[0]
    for row in range(window.height):
        for column in range(window.width):
            y, x = row + window.top, column + window.left
            want = image[0, y, x] if 0 <= y < 5 and 0 <= x < 6 else torch.tensor(window.fill)
            assert torch.equal(got[:, row, column], want.float())


def test_missing_json_keys_keep_the_default():
    default = PixelSpec(IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, filter="lanczos")
    assert read_pixel_spec({}, default, {}) == default
    assert read_pixel_spec({"do_normalize": False}, default, {}) == PixelSpec((0.0,) * 3, (1.0,) * 3, filter="lanczos")
    spec = read_pixel_spec({"image_mean": 0.25, "image_std": [1, 2, 3], "rescale_factor": 0.5, "resample": 2}, default, {})
    assert spec == PixelSpec((0.25,) * 3, (1, 2, 3), 0.5, "bilinear")


@pytest.mark.parametrize("json", [{"do_resize": False}, {"resample": 6}, {"resample": True}, {"image_mean": [0.5, 0.5]}])
def test_unsupported_json_is_refused(json):
    with pytest.raises(ConfigError, match="preprocessor JSON"):
        read_pixel_spec(json, PixelSpec(), {})


@pytest.mark.parametrize(("number", "kind"), [(0, "nearest"), (4, "box"), (5, "hamming")])
def test_pillow_gives_the_pixels_of_its_other_filters(number, kind):
    """Pillow always computes the box and hamming filters, which torch does not have."""
    image, plan = noise(40, 60, 3), FixedSize((21, 33)).plan(40, 60)
    json = {"resample": number, "do_rescale": False, "do_normalize": False}
    spec = read_pixel_spec(json, PixelSpec(), {"resample": "pillow"} if kind == "nearest" else {})
    assert (spec.filter, spec.resample) == (kind, "pillow")
    want = np.array(Image.fromarray(image.numpy()).resize((33, 21), Image.Resampling(number)))
    assert torch.equal(planes(image[None], plan, spec)[0], torch.from_numpy(want).permute(2, 0, 1).float())
    with pytest.raises(ConfigError, match="torch does not compute"):
        read_pixel_spec(json, PixelSpec(antialias=False), {})


@pytest.mark.parametrize("mean", [True, "abc", ["a"], [0.5, float("nan"), 0.5], float("inf"), {"r": 1}])
def test_means_are_numbers(mean):
    with pytest.raises(ConfigError, match="image_mean"):
        read_pixel_spec({"image_mean": mean}, PixelSpec(), {})


@pytest.mark.parametrize("mean", [0, 0.0, [0]])
def test_a_mean_of_zero_is_no_missing_mean(mean):
    assert read_pixel_spec({"image_mean": mean}, PixelSpec(), {}).mean == (0, 0, 0)
    assert read_pixel_spec({"image_mean": None, "image_std": []}, PixelSpec(), {}) == PixelSpec()


@pytest.mark.parametrize("number", [4, 5])
def test_torch_is_refused_for_filters_that_it_lacks(number):
    """In one way for families of tiles and of patches, by the name of the option."""
    with pytest.raises(ConfigError) as caught:
        read_pixel_spec({"resample": number}, PixelSpec(), {"resample": "torch"})
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_config", "resample")
    assert caught.value.info.param == "resample"
    with pytest.raises(ConfigError) as caught:
        apply_size(read_patch_spec({"resample": number}, PatchSpec()), {"resample": "torch"})
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_config", "resample")
    assert read_pixel_spec({"resample": number}, PixelSpec(), {"resample": "pillow"}).resample == "pillow"


def test_an_image_is_resized_unless_the_family_can_keep_its_size():
    with pytest.raises(ConfigError, match="do_resize is false"):
        read_patch_spec({"do_resize": False}, PatchSpec())
    assert read_patch_spec({"do_resize": False}, PatchSpec(can_keep_size=True)).keeps_size


def test_pillow_gives_its_own_pixels():
    image, plan = noise(40, 60, 3), FixedSize((21, 33)).plan(40, 60)
    spec = apply_resample(PixelSpec((0.0,) * 3, (1.0,) * 3, 1.0, "lanczos"), {"resample": "pillow"})
    want = np.array(Image.fromarray(image.numpy()).resize((33, 21), Image.Resampling.LANCZOS))
    assert torch.equal(planes(image[None], plan, spec)[0], torch.from_numpy(want).permute(2, 0, 1).float())
    with pytest.raises(ConfigError, match="torch and pillow"):
        apply_resample(spec, {"resample": "cv2"})


@pytest.mark.parametrize(
    ("json", "text"),
    [
        ({"rescale_factor": 0}, "rescale_factor in the preprocessor JSON is 0; it must be above zero"),
        ({"rescale_factor": float("nan")}, "rescale_factor in the preprocessor JSON is nan"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std in the preprocessor JSON is 0.5, 0.0, 0.5"),
        ({"image_std": 0}, "image_std in the preprocessor JSON is 0, 0, 0; it must be above zero"),
        ({"rescale_factor": "abc"}, "rescale_factor in the preprocessor JSON is 'abc'; give numbers"),
        ({"rescale_factor": True}, "rescale_factor in the preprocessor JSON is True; give numbers"),
    ],
)
def test_divisors_are_checked_when_read(json, text):
    with pytest.raises(ConfigError, match=text):
        read_pixel_spec(json, PixelSpec(), {})
    assert read_pixel_spec(json | {"do_rescale": False, "do_normalize": False}, PixelSpec(), {}).rescale == 1.0
