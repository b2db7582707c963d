"""Qwen2-VL's processor compared with transformers' default (torchvision): equal tensors, grids and token counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import build_processor, load_processor
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.fields import FieldElem, merge
from sensorium.mm.geometry import FrameSampling, ResizePolicy, sample_indices, smart_resize
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.media.video import decode_video, probe_video
from sensorium.mm.types import FramePlan, ImageItem, ItemGeometry, MediaHeader, VideoItem
from sensorium.models.families.qwen2_vl.processing import Qwen2VLProcessingInfo, Qwen25VLProcessingInfo
from sensorium.processors.files import ProcessorFiles, read_preprocessors

SIZES = [(28, 28), (56, 57), (100, 140), (63, 300), (300, 61), (112, 112), (480, 640), (333, 777), (5, 900), (1, 1), (2, 2)]


def make_image(height: int, width: int, seed: int = 0) -> np.ndarray:
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 7 + 1, width // 7 + 1, 3), dtype=np.uint8)
    return np.ascontiguousarray(coarse.repeat(7, 0).repeat(7, 1)[:height, :width])


def info_of(path: Path, cls: type = Qwen25VLProcessingInfo, *options: dict) -> Qwen2VLProcessingInfo:
    return cls(read_preprocessors(path), *options)


def made(
    image: dict | None = None, video: dict | None = None, *options: dict, config: dict | None = None
) -> Qwen2VLProcessingInfo:
    return Qwen2VLProcessingInfo(ProcessorFiles(config or {}, image or {}, video or {}), *options)


def still(pixels: np.ndarray) -> ImageItem:
    return ImageItem(torch.from_numpy(pixels))


def clip_of(frames: object, **sampling: object) -> VideoItem:
    return decode_video(frames, FrameSampling(**sampling), MediaPolicy())


@pytest.fixture(scope="module")
def oracle(checkpoint: Path):
    return load_processor(checkpoint)


def data(elem: FieldElem) -> torch.Tensor:
    assert isinstance(elem.data, torch.Tensor)
    return elem.data


@pytest.mark.parametrize("size", SIZES)
def test_image_equals_transformers(checkpoint, oracle, size):
    image = make_image(*size)
    want = oracle.image_processor(images=[image], input_data_format="channels_last", return_tensors="pt")
    got, geometry = info_of(checkpoint).process(still(image), torch.float32)
    assert data(got["image_grid_thw"]).tolist() == want["image_grid_thw"][0].tolist()
    assert geometry.num_embeds == want["image_grid_thw"].prod().item() // 4
    torch.testing.assert_close(data(got["pixel_values"]), want["pixel_values"], atol=1e-6, rtol=0)


def test_several_images_merge_to_the_published_batch(checkpoint, oracle):
    images = [make_image(h, w, seed=h) for h, w in SIZES[:5]]
    want = oracle.image_processor(images=images, return_tensors="pt")
    info = info_of(checkpoint)
    got = merge([info.process(still(image), torch.float32)[0] for i, image in enumerate(images)])
    assert torch.equal(got["image_grid_thw"], want["image_grid_thw"])
    torch.testing.assert_close(got["pixel_values"], want["pixel_values"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("frames", [1, 2, 3, 6])
@pytest.mark.parametrize("size", [(56, 84), (120, 90)])
def test_video_equals_transformers(checkpoint, oracle, frames, size):
    clip = np.stack([make_image(*size, seed=i) for i in range(frames)])
    want = oracle.video_processor(videos=[clip], return_tensors="pt")
    item = decode_video(clip, info_of(checkpoint).decode_spec.sampling, MediaPolicy())
    got, geometry = info_of(checkpoint).process(item, torch.float32)
    assert data(got["video_grid_thw"]).tolist() == want["video_grid_thw"][0].tolist()
    assert geometry.t == -(-frames // 2)
    torch.testing.assert_close(data(got["pixel_values_videos"]), want["pixel_values_videos"], atol=1e-6, rtol=0)


def test_video_budget_over_all_frames_equals_transformers():
    options = {"cap_pixels_per_frame": True, "max_video_tokens": 64, "size": {"shortest_edge": 3136, "longest_edge": 200704}}
    clip = np.stack([make_image(200, 300, seed=i) for i in range(8)])
    expected = type(build_processor().video_processor)(**options)(videos=[clip], return_tensors="pt")
    got, _ = made({}, options).process(clip_of(clip), torch.float32)
    assert data(got["video_grid_thw"]).tolist() == expected["video_grid_thw"][0].tolist()
    torch.testing.assert_close(data(got["pixel_values_videos"]), expected["pixel_values_videos"], atol=1e-6, rtol=0)


VARIATIONS = [
    {"do_normalize": False},
    {"do_rescale": False},
    {"resample": 2},
    {"rescale_factor": 1 / 127.5, "image_mean": [0.5] * 3, "image_std": [0.5, 0.4, 0.3]},
    {"patch_size": 16, "merge_size": 1},
    {"temporal_patch_size": 1},
    {"temporal_patch_size": 3},
]


@pytest.mark.parametrize("variation", VARIATIONS)
def test_every_field_of_the_json_counts(variation):
    processor = build_processor()
    image, clip = make_image(90, 120), np.stack([make_image(60, 90, seed=i) for i in range(5)])
    info = made({"min_pixels": 3136, "max_pixels": 12544} | variation)
    json_files = {"size": {"shortest_edge": 3136, "longest_edge": 12544}, **variation}
    want = type(processor.image_processor)(**json_files)(images=[image], return_tensors="pt")
    got, _ = info.process(still(image), torch.float32)
    assert data(got["image_grid_thw"]).tolist() == want["image_grid_thw"][0].tolist()
    tolerance = 1e-6 * max(1.0, float(want["pixel_values"].abs().max()))
    torch.testing.assert_close(data(got["pixel_values"]), want["pixel_values"], atol=tolerance, rtol=0)
    want = type(processor.video_processor)(**json_files, cap_pixels_per_frame=False)(videos=[clip], return_tensors="pt")
    got, _ = info.process(clip_of(clip), torch.float32)
    assert data(got["video_grid_thw"]).tolist() == want["video_grid_thw"][0].tolist()
    torch.testing.assert_close(data(got["pixel_values_videos"]), want["pixel_values_videos"], atol=tolerance, rtol=0)


def test_images_that_are_not_resized_need_whole_patches():
    info = made({"do_resize": False})
    assert info.geometry(MediaHeader("image", 280, 2800)) == ItemGeometry(1, 20, 200, 2)
    with pytest.raises(InputError, match="multiples of 28 pixels, not 100x56"):
        info.geometry(MediaHeader("image", 56, 100))


def test_tokens_of_the_published_sizes():
    info = made({"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280})
    for size, tokens in [((28, 28), 4), ((224, 224), 64), ((480, 640), 391), ((1080, 1920), 1222)]:
        geometry = info.geometry(MediaHeader("image", *size))
        assert geometry.num_embeds == tokens == len(info.span("image", geometry).token_ids)


def test_seconds_per_grid_step(checkpoint):
    clip = (np.zeros((6, 56, 56, 3), np.uint8), {"fps": 2.0, "total_num_frames": 6, "frames_indices": list(range(6))})
    item = clip_of(clip)
    assert info_of(checkpoint).process(item, torch.float32)[1].time_step == 2.0  # 2 tokens a second, 1 s per grid step
    assert info_of(checkpoint, Qwen2VLProcessingInfo).process(item, torch.float32)[1].time_step == 1.0
    bare = clip_of(clip[0])
    assert info_of(checkpoint).process(bare, torch.float32)[1].time_step == pytest.approx(2 * 2 / 24)


def test_both_forms_of_the_pixel_range_and_the_class_defaults():
    forms = [{"min_pixels": 3136, "max_pixels": 50176}, {"size": {"shortest_edge": 3136, "longest_edge": 50176}}]
    forms += [{"size": {"min_pixels": 3136, "max_pixels": 50176}, "min_pixels": None}]
    keys = {made(form).options_key("image") for form in forms}
    assert len(keys) == 1
    info = made(forms[0])
    assert info.specs["video"] == info.specs["image"]  # one file serves both where the second is missing
    bare = made()
    assert (bare.specs["image"].max_pixels, bare.specs["video"].min_pixels) == (1003520, 100352)


def test_options_override_and_are_scoped():
    info = made({}, {}, {"size": {"shortest_edge": 64}, "images_kwargs": {"size": {"longest_edge": 1024}}})
    assert (info.specs["image"].min_pixels, info.specs["image"].max_pixels) == (64, 1024)
    assert (info.specs["video"].min_pixels, info.specs["video"].max_pixels) == (64, 28 * 28 * 768)
    base = made()
    tuned = base.with_kwargs({"videos_kwargs": {"max_pixels": 200704}})
    assert tuned.options_key("image") == base.options_key("image")
    assert tuned.options_key("video") != base.options_key("video")
    frames = base.with_kwargs({"fps": 1.0})
    assert frames.options_key("image") == base.options_key("image")
    assert frames.options_key("video") != base.options_key("video")
    assert base.with_kwargs({"fps": None, "images_kwargs": None}).options_key("video") == base.options_key("video")


def test_later_options_override_earlier_ones():
    info = made({}, {}, {"max_pixels": 50176}, {"images_kwargs": {"max_pixels": 12544}}).with_kwargs({"min_pixels": 784})
    assert (info.specs["image"].min_pixels, info.specs["image"].max_pixels) == (784, 12544)
    assert (info.specs["video"].min_pixels, info.specs["video"].max_pixels) == (784, 50176)
    assert (made({}, {}, {"max_pixels": 784}).specs["video"].min_pixels) == 784  # takes the default with it
    assert (made({}, {}, {"min_pixels": 1 << 21}).specs["image"].max_pixels) == 1 << 21
    low = made().with_kwargs({"images_kwargs": {"detail": "low"}})
    assert low.specs["image"].max_pixels == 512 * 512
    assert low.specs["video"] == made().specs["video"]
    assert made().with_kwargs({"detail": "high"}).options_key("image") == made().options_key("image")


def test_fps_and_num_frames_replace_each_other():
    assert made({}, {"num_frames": 8}, {"fps": 1.0}).decode_spec.sampling.num_frames is None
    sampling = made({}, {"fps": 4.0}, {"num_frames": 8}).decode_spec.sampling
    assert (sampling.fps, sampling.num_frames, sampling.multiple) == (None, 8, 2)
    assert made({}, {}, {"fps": 4.0}, {"num_frames": 8}, {"fps": 3.0}).decode_spec.sampling.fps == 3.0
    assert made().decode_spec.sampling.fps == 2.0
    assert made({}, {}, {"max_duration": 9}).decode_spec.sampling.max_duration == 9


def test_the_grid_of_a_header_equals_that_of_the_item():
    info = made({"min_pixels": 28 * 28, "max_pixels": 112 * 112}, {"min_pixels": 28 * 28, "max_pixels": 84 * 84})
    sides = [1, 2, 13, 14, 27, 28, 29, 41, 42, 43, 55, 56, 70, 84, 97, 98, 111, 112, 113, 140, 199, 333]
    for height in sides:
        for width in sides:
            if max(height, width) > 200 * min(height, width):
                continue
            item = ImageItem(torch.zeros(height, width, 3, dtype=torch.uint8))
            kwargs, grid = info.process(item, torch.float32)
            assert grid == info.geometry(MediaHeader("image", height, width))
            assert data(kwargs["pixel_values"]).shape[0] == grid.t * grid.h * grid.w
    for count in (1, 2, 3, 7):
        plan = FramePlan(tuple(range(count)), tuple(float(i) for i in range(count)), count, 1.0)
        clip = VideoItem(torch.zeros(count, 50, 90, 3, dtype=torch.uint8), plan)
        kwargs, grid = info.process(clip, torch.float32)
        assert grid == info.geometry(MediaHeader("video", 50, 90, plan))
        assert data(kwargs["pixel_values_videos"]).shape[0] == grid.t * grid.h * grid.w


def test_an_item_can_shrink_to_a_number_of_rows():
    info = made()
    header = MediaHeader("image", 1080, 1920)
    grid = info.geometry(header)
    for rows in (1000, 300, 17, 4, 1):
        options = info.shrink_kwargs("image", (grid.t, grid.h, grid.w), rows)
        small = info.with_kwargs({"images_kwargs": options}).geometry(header)
        assert rows * 0.5 <= small.num_embeds <= rows
    plan = FramePlan(tuple(range(40)), tuple(map(float, range(40))), 40, 1.0)
    options = info.shrink_kwargs("video", (20, 26, 46), 100)
    assert options["num_frames"] == 12  # 6 temporal patches of at least 16 rows
    fewer = MediaHeader("video", 1080, 1920, FramePlan(plan.indices[:12], plan.timestamps[:12], 12, 1.0))
    assert 60 <= info.with_kwargs({"videos_kwargs": options}).geometry(fewer).num_embeds <= 100


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_pixel": 1}, "max_pixels"),
        ({"images_kwargs": {"sise": {}}}, "size"),
        ({"min_pixels": 9, "max_pixels": 4}, "the first must not be larger"),
        ({"fps": 1, "num_frames": 4}, "exclude"),
        ({"size": {"height": 3}}, "longest_edge"),
        ({"images_kwargs": {"fps": 2.0}}, "unknown processing option 'fps' for images"),
        ({"images_kwargs": 5}, "holds options by name"),
        ({"detail": "medium"}, "auto, high, low and original"),
        ({"max_duration": 0}, "max_duration is 0"),
        ({"num_frames": 2.5}, "num_frames is 2.5"),
        ({"fps": True}, "fps is True"),
        ({"fps": 10**5000}, "fps is over the limit of 1,000;"),
        ({"num_frames": 10**10}, "num_frames is over the limit"),
        ({"images_kwargs": {"min_pixels": 10**400}}, "min_pixels is over the limit"),
    ],
)
def test_bad_options_are_named(options, text):
    with pytest.raises(ConfigError, match=text):
        made().with_kwargs(options)


def test_a_tower_of_another_patch_size_is_refused():
    with pytest.raises(ConfigError, match="patch_size is 16"):
        made({"patch_size": 14}, config={"vision_config": {"patch_size": 16}})


def test_an_item_of_more_rows_than_any_context_is_refused_before_its_tokens_are_made():
    with pytest.raises(InputError, match="the limit is 4,194,304"):
        made().with_kwargs({"min_pixels": 10**13}).geometry(MediaHeader("image", 40, 60))


def test_extreme_shape_is_refused():
    with pytest.raises(InputError, match="200:1"):
        made().geometry(MediaHeader("image", 4, 2000))


@pytest.mark.parametrize(
    ("frames", "total", "least", "most"), [(8, 200 * 28 * 28, 128, 768), (64, 800 * 28 * 28, 16, 300), (5, 28 * 28, 4, 768)]
)
def test_total_pixels_bound_a_frame_as_in_qwen_vl_utils(frames, total, least, most):
    info = made({}).with_kwargs({"total_pixels": total, "min_pixels": least * 784, "max_pixels": most * 784})
    bound = min(most * 784, max(min(768 * 784, total / frames * 2), int(least * 784 * 1.05)))
    tall, wide = smart_resize(1000, 1500, ResizePolicy(28, least * 784, int(bound)))
    grid = info.geometry(MediaHeader("video", 1000, 1500, FramePlan(tuple(range(frames)), (0.0,) * frames, frames, 2.0)))
    assert (grid.h * 14, grid.w * 14) == (tall, wide)


def test_resized_height_and_width_replace_the_items_size():
    info = made({}).with_kwargs({"resized_height": 100, "resized_width": 310})
    for header in (MediaHeader("image", 900, 90), MediaHeader("video", 900, 90, FramePlan((0, 1), (0.0, 0.5), 2, 2.0))):
        own = MediaHeader(header.modality, 100, 310, header.frames)
        assert info.geometry(header) == made({}).geometry(own) != made({}).geometry(header)
    with pytest.raises(ConfigError, match="resized_height and resized_width belong together; give both"):
        made({}).with_kwargs({"resized_height": 100})
    still_pixels, geometry = info.process(still(make_image(64, 64)), torch.float32)
    assert len(data(still_pixels["pixel_values"])) == geometry.h * geometry.w


@pytest.mark.parametrize(
    ("options", "count"),
    [({}, 60), ({"max_frames": 11}, 10), ({"min_frames": 81}, 82), ({"fps": 1, "min_frames": 5}, 30), ({"num_frames": 7}, 8)],
)
def test_bounds_of_the_number_of_frames(options, count):
    sampling = made({}).with_kwargs(options).decode_spec.sampling
    assert len(sample_indices(300, 10.0, sampling)) == count  # 30 s at 2 frames per second


def test_video_start_and_end():
    info = Qwen25VLProcessingInfo(ProcessorFiles({}, {}, {}), {"video_start": 1.0, "video_end": 2.95})
    header = probe_video((np.zeros((40, 56, 56, 3), np.uint8), {"fps": 10.0}), info.decode_spec.sampling, MediaPolicy())
    assert header.frames.indices == (10, 15, 20, 25)
    assert info.geometry(header).time_step == 4.0  # 4 positions a second, a second per grid step
    assert info.with_kwargs({"video_end": None, "video_start": 2}).decode_spec.sampling.start == 2
    with pytest.raises(ConfigError, match=r"video_start is 3 and video_end is 2.95; the first must not be larger"):
        info.with_kwargs({"video_start": 3})


def test_bounds_of_frames_that_contradict_each_other():
    with pytest.raises(ConfigError, match="min_frames is 8 and max_frames is 4; the first must not be larger"):
        made({}).with_kwargs({"min_frames": 8, "max_frames": 4})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resized_height", {"resized_height": 56, "resized_width": 56}),
        ("max_pixels", {"max_pixels": 3136}),
        ("min_pixels", {"min_pixels": 3136}),
        ("size", {"size": {"longest_edge": 3136}}),
        ("detail", {"detail": "low"}),
        ("total_pixels", {"videos_kwargs": {"total_pixels": 3136}}),
    ],
)
def test_options_that_resize_are_refused_where_sizes_are_kept(name, options):
    info = made({"do_resize": False}, {"do_resize": False})
    with pytest.raises(ConfigError, match=f"{name} resizes images and frames") as caught:
        info.with_kwargs(options)
    assert caught.value.info.param == name
    assert info.with_kwargs({"detail": "high", "resample": "pillow"}).specs["image"].resample == "pillow"


def test_items_that_keep_their_size_shrink_by_frames_alone():
    info = made({"do_resize": False}, {"do_resize": False})
    assert info.shrink_kwargs("image", (1, 20, 20), 50) is None
    assert info.shrink_kwargs("video", (4, 20, 20), 250) == {"num_frames": 4}
    assert info.shrink_kwargs("video", (4, 20, 20), 99) is None
