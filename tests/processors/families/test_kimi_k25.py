"""Kimi-K2.5's processing against transformers' processors: equal pixels, grids and expanded tokens."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import ensure_torchvision, tokenizer
from PIL import Image
from sensorium.callers.errors import ConfigError, InputError
from sensorium.engine.frontend.media import MultiModalProcessor, MultiModalSettings
from sensorium.mm.fields import FieldElem, merge
from sensorium.mm.geometry import sample_indices
from sensorium.mm.media.chunks import image_chunk, split_header, split_video
from sensorium.mm.types import AudioItem, FramePlan, ImageItem, MediaHeader, VideoItem, VisionChunk
from sensorium.models.families.kimi_k25.processing import KimiK25ProcessingInfo, timestamp
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.spans import lay_out
from tokenizers import AddedToken, Tokenizer

MARKS = ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>", "<|kimi_k25_video_placeholder|>")
CHUNK = "vision_chunk"
SIZES = [(28, 28), (1, 1), (14, 200), (100, 140), (57, 301), (301, 57), (480, 640), (13, 1000), (29, 27)]
SMALL = {"max_patches": 64, "size": {"max_height": 20, "max_width": 20}}


def make_image(height: int, width: int, seed: int = 0) -> torch.Tensor:
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 7 + 1, width // 7 + 1, 3), dtype=np.uint8)
    return torch.from_numpy(np.ascontiguousarray(coarse.repeat(7, 0).repeat(7, 1)[:height, :width]))


def clip(frames: int, height: int, width: int, fps: float = 2.0, first: int = 0) -> VideoItem:
    pixels = torch.stack([make_image(height, width, seed) for seed in range(frames)])
    indices = tuple(range(first, first + frames))
    return VideoItem(pixels, FramePlan(indices, tuple(i / fps for i in indices), first + frames, fps))


@functools.cache
def words() -> Tokenizer:
    """Return the small tokenizer with Kimi's special tokens in their published order."""
    tok = Tokenizer.from_str(tokenizer().to_str())
    tok.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in MARKS])
    return tok


@functools.cache
def config() -> dict[str, Any]:
    begin, _, end, pad, video = (words().token_to_id(name) for name in MARKS)
    named = {"vision_start_token_id": begin, "vision_end_token_id": end, "image_token_id": pad, "video_token_id": video}
    return named | {"text_config": {"vocab_size": words().get_vocab_size()}}


def info_of(image: dict[str, Any] | None = None, video: dict[str, Any] | None = None, *options: dict[str, Any], **changes: Any):
    files = ProcessorFiles(
        config() | changes, image or {}, video or {}, encode=lambda text: words().encode(text, add_special_tokens=False).ids
    )
    return KimiK25ProcessingInfo(files, *options)


@functools.cache
def kimi() -> Any:
    ensure_torchvision()
    import transformers.models.kimi_k25 as module

    return module


def oracle(image: dict[str, Any] | None = None, video: dict[str, Any] | None = None) -> Any:
    import transformers as tf

    fast = tf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(words().to_str()), eos_token="<|im_end|>")
    return kimi().Kimi_K25Processor(
        image_processor=kimi().Kimi_K25ImageProcessor(**(image or {})),
        tokenizer=fast,
        video_processor=kimi().Kimi_K25VideoProcessor(**(video or {})),
    )


def data(elem: FieldElem) -> torch.Tensor:
    assert isinstance(elem.data, torch.Tensor)
    return elem.data


def grids(info: KimiK25ProcessingInfo, chunks: list[VisionChunk]) -> list[list[int]]:
    return [data(info.process(chunk, torch.float32)[0]["grid_thw"]).tolist() for chunk in chunks]


@pytest.mark.parametrize("limits", [{}, SMALL, {"max_patches": 7, "size": {"max_height": 512, "max_width": 512}}], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_image_equals_transformers(size, limits):
    image = make_image(*size)
    want = kimi().Kimi_K25ImageProcessor(**limits)(images=[image.permute(2, 0, 1)], return_tensors="pt")
    info = info_of(limits)
    got, geometry = info.process(image_chunk(ImageItem(image)), torch.float32)
    assert data(got["grid_thw"]).tolist() == want["image_grid_thw"][0].tolist()
    assert geometry == info.geometry(image_chunk(ImageItem(image)).header)
    assert (
        geometry.num_embeds == want["image_grid_thw"].prod().item() // 4 == len(info.span("vision_chunk", geometry).token_ids)
    )
    torch.testing.assert_close(data(got["pixel_values"]), want["pixel_values"], atol=1e-6, rtol=0)
    assert info.process(image_chunk(ImageItem(image)), torch.bfloat16)[0]["pixel_values"].data.dtype == torch.bfloat16


@pytest.mark.parametrize("size", [(28, 28), (56, 140), (420, 84)])
def test_items_that_keep_their_size_equal_transformers(size):
    image, video, kept = make_image(*size), clip(5, *size), {"do_resize": False}
    info = info_of(kept, kept)
    want = kimi().Kimi_K25ImageProcessor(**kept)(images=[image.permute(2, 0, 1)], return_tensors="pt")
    got, geometry = info.process(image_chunk(ImageItem(image)), torch.float32)
    assert data(got["grid_thw"]).tolist() == want["image_grid_thw"][0].tolist() == [1, geometry.h, geometry.w]
    torch.testing.assert_close(data(got["pixel_values"]), want["pixel_values"], atol=1e-6, rtol=0)
    frames = video.frames.permute(0, 3, 1, 2)
    want = kimi().Kimi_K25VideoProcessor(**kept)(videos=[frames], do_sample_frames=False, return_tensors="pt")
    chunks = split_video(video, info.decode_spec.frames_per_chunk)
    merged = merge([info.process(chunk, torch.float32)[0] for chunk in chunks])
    assert torch.equal(merged["grid_thw"], want["video_grid_thw"])
    torch.testing.assert_close(merged["pixel_values"], want["pixel_values_videos"], atol=1e-6, rtol=0)
    rows = geometry.num_embeds
    assert info.shrink_kwargs(CHUNK, (9, geometry.h, geometry.w), rows) == {"num_frames": 4, "fps": None}
    assert info.shrink_kwargs(CHUNK, (9, geometry.h, geometry.w), rows - 1) is None


@settings(max_examples=300)
@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 600))
def test_grids_equal_transformers_at_every_size(height, width, patches, side):
    limits = {"max_patches": patches, "size": {"max_height": side, "max_width": side}}
    want = kimi().image_processing_kimi_k25.navit_resize(height, width, 14, 2, patches, side)[1]
    geometry = info_of(limits).geometry(MediaHeader("vision_chunk", height, width))
    assert (geometry.h * 14, geometry.w * 14) == want
    assert geometry.merged == (1, geometry.h // 2, geometry.w // 2)


@pytest.mark.parametrize("frames", [1, 3, 4, 5, 11])
@pytest.mark.parametrize(("size", "limits"), [((60, 90), {}), ((120, 75), SMALL)])
def test_video_equals_transformers(frames, size, limits):
    video = clip(frames, *size)
    want = kimi().Kimi_K25VideoProcessor(**limits)(
        videos=[video.frames.permute(0, 3, 1, 2)], do_sample_frames=False, return_tensors="pt"
    )
    info = info_of({}, limits or {"max_patches": 4096})
    chunks = split_video(video, info.decode_spec.frames_per_chunk)
    assert len(chunks) == want["num_chunks_per_video"][0]
    got = merge([info.process(chunk, torch.float32)[0] for chunk in chunks])
    assert torch.equal(got["grid_thw"], want["video_grid_thw"])
    torch.testing.assert_close(got["pixel_values"], want["pixel_values_videos"], atol=1e-6, rtol=0)
    headers = split_header(video.header, "video", info.decode_spec)
    for chunk, header in zip(chunks, headers, strict=True):
        assert info.process(chunk, torch.float32)[1] == info.geometry(header)


def expanded(info: KimiK25ProcessingInfo, text: str, chunks: list[list[VisionChunk]]) -> tuple[list[int], list[bool]]:
    """Return the prompt's tokens with every placeholder replaced by its span, and the mask of embeddings."""
    inputs, ids, mask = iter(chunks), [], []
    for token in words().encode(text, add_special_tokens=False).ids:
        if token not in (info.image, info.frame):
            ids, mask = [*ids, token], [*mask, False]
            continue
        for chunk in next(inputs):
            span = info.span("vision_chunk", info.geometry(chunk.header))
            ids += span.token_ids
            mask += [True] * len(span.token_ids) if span.is_embed is None else span.is_embed.tolist()
    return ids, mask


@pytest.mark.parametrize("fps", [2.0, 24.0, 29.97, 0.01])
def test_tokens_equal_transformers_in_one_ordered_stream(fps):
    images, videos = [make_image(60, 90), make_image(30, 200, 1)], [clip(9, 60, 75, fps), clip(2, 100, 40, fps, first=7)]
    shown = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
    text = f"One {shown}<|kimi_k25_video_placeholder|><|im_end|>then{shown}\n<|im_start|><|kimi_k25_video_placeholder|>end"
    metadata = [
        {"fps": fps, "frames_indices": list(v.plan.indices), "total_num_frames": v.plan.total, "duration": 1.0} for v in videos
    ]
    want = oracle()(
        text=[text],
        images=[image.permute(2, 0, 1) for image in images],
        videos=[video.frames.permute(0, 3, 1, 2) for video in videos],
        video_metadata=metadata,
        do_sample_frames=False,
        return_tensors="pt",
    )
    info = info_of()
    pieces = [split_video(video, 4) for video in videos]
    ids, mask = expanded(
        info, text, [[image_chunk(ImageItem(images[0]))], pieces[0], [image_chunk(ImageItem(images[1]))], pieces[1]]
    )
    assert ids == want["input_ids"][0].tolist()
    ours = torch.tensor(ids)
    assert torch.equal(torch.tensor(mask), (ours == info.image) | (ours == info.frame))


def test_an_image_and_a_chunk_merge_and_a_frame_has_its_own_limit():
    info = info_of({"max_patches": 64}, {"max_patches": 16})
    image, piece = image_chunk(ImageItem(make_image(300, 200))), split_video(clip(3, 300, 200), 4)[0]
    assert grids(info, [image, piece]) == [[1, 10, 8], [3, 6, 4]]
    merged = merge([info.process(chunk, torch.float32)[0] for chunk in (image, piece)])
    assert merged["pixel_values"].shape == (80 + 72, 3, 14, 14)
    assert info.geometry(piece.header).num_embeds == 6  # the frames of a chunk share their rows
    assert info.geometry(piece.header).merged == (1, 3, 2)


def test_vision_chunks_from_input_to_prompt():
    info, pixels = info_of(), clip(20, 28, 56).frames.numpy()
    stream = [
        make_image(28, 56),
        {"type": "video", "video": (pixels, {"fps": 4.0}), "max_pixels": 14 * 28},
        {"type": "video_chunk", "video_chunk": pixels[:3], "prompt": "00:00:09.000"},
        {"type": "image", "image": pixels[0], "max_pixels": 14 * 28},
    ]
    media, placeholder = MultiModalProcessor(info, MultiModalSettings()), info.placeholder_ids["vision_chunk"]
    items = media.open({"vision_chunk": stream}, {}, {}, None)
    for item in items:
        pieces = media.process(item, None, {}).pieces
        assert [geometry for _, geometry in pieces] == [item.info.geometry(header) for header in item.headers]
    stop = words().token_to_id("<|im_end|>")
    tokens, ranges = lay_out(
        [placeholder, stop, placeholder, placeholder, stop, placeholder],
        {"vision_chunk": [i.spans for i in items]},
        info.placeholder_ids,
    ).expand()
    pad, frame = MARKS[3:]
    chunk = "{}<|media_begin|>video<|media_content|>{}<|media_end|>"
    video = "".join(chunk.format(f"00:00:0{seconds}.000", frame) for seconds in (0, 2, 4))  # 10 frames: 4, 4 and 2
    expected = f"{pad * 2}<|im_end|>{video}{chunk.format('00:00:09.000', frame * 2)}<|im_end|>{pad}"
    assert words().decode(tokens, skip_special_tokens=False) == expected
    assert [len(pieces) for pieces in ranges["vision_chunk"]] == [1, 3, 1, 1]


def test_padding_is_black():
    pixels = data(
        info_of().process(image_chunk(ImageItem(torch.full((20, 30, 3), 255, dtype=torch.uint8))), torch.float32)[0][
            "pixel_values"
        ]
    )
    assert pixels.shape == (8, 3, 14, 14)  # 28 x 56 pixels
    shown = pixels.view(2, 4, 3, 14, 14).permute(2, 0, 3, 1, 4).reshape(3, 28, 56)
    torch.testing.assert_close(shown[:, :20, :30], torch.ones(3, 20, 30), atol=1e-6, rtol=0)
    shown[:, :20, :30] = -1
    torch.testing.assert_close(shown, -torch.ones(3, 28, 56), atol=1e-6, rtol=0)


def test_timestamp():
    assert [timestamp(s) for s in (0.0, 0.5, 61.25, 3599.9999, 86399.5)] == [
        "00:00:00.000",
        "00:00:00.500",
        "00:01:01.250",
        "00:59:59.999",
        "23:59:59.500",
    ]
    assert timestamp(86400.0) == timestamp(-0.01) == "00:00:00.000"


@pytest.mark.parametrize("total", [1, 2, 7, 29, 30, 300, 1001])
def test_sampling_equals_transformers(total):
    from transformers.video_utils import VideoMetadata

    processor = kimi().Kimi_K25VideoProcessor()
    for fps in (1.0, 2.0, 23.976, 25.0, 30.0, 60.0):
        if total / fps * 2 > total:
            continue  # transformers refuses what we cut to all there is
        want = processor.sample_frames(VideoMetadata(total_num_frames=total, fps=fps))
        assert sample_indices(total, fps, info_of().decode_spec.sampling) == want.tolist()


def test_the_first_checkpoints_json():
    old = {
        "in_patch_limit": 1024, "patch_size": 14, "image_mean": [0.4] * 3, "image_std": [0.3] * 3, "merge_kernel_size": 2,
        "fixed_output_tokens": None, "patch_limit_on_one_side": 64, "in_patch_limit_each_frame": 256,
        "in_patch_limit_video": None, "sample_fps": 1.0, "max_num_frames_each_video": 32, "temporal_merge_kernel_size": 3,
    }  # fmt: skip
    parts = {"image_mean": [0.4] * 3, "image_std": [0.3] * 3, "size": {"max_height": 64, "max_width": 64}}
    video = {**parts, "max_patches": 256, "fps": 1.0, "max_frames": 32, "temporal_patch_size": 3}
    info, other = info_of({"media_proc_cfg": old}), info_of({**parts, "max_patches": 1024}, video)
    assert (info.specs[CHUNK].image.max_patches, info.specs[CHUNK].image.max_side, info.specs[CHUNK].frame.max_patches) == (
        1024,
        64,
        256,
    )
    assert (info.decode_spec.frames_per_chunk, info.decode_spec.sampling.fps, info.decode_spec.sampling.max_frames) == (
        3,
        1.0,
        32,
    )
    assert info.specs[CHUNK].frame == other.specs[CHUNK].frame
    assert info.decode_spec == other.decode_spec
    with pytest.raises(ConfigError, match="in_patch_limit_video"):
        info_of({"media_proc_cfg": {"in_patch_limit_video": 9}})


def test_published_defaults():
    info = info_of()
    image, video = kimi().Kimi_K25ImageProcessor(), kimi().Kimi_K25VideoProcessor()
    for spec, want in ((info.specs[CHUNK].image, image), (info.specs[CHUNK].frame, video)):
        assert (spec.max_patches, spec.max_side, spec.patches.patch, spec.patches.merge) == (
            want.max_patches,
            want.size["max_height"],
            want.patch_size,
            want.merge_size,
        )
        assert list(spec.patches.mean) == list(want.image_mean)
        assert list(spec.patches.std) == list(want.image_std)
    assert info.decode_spec.frames_per_chunk == video.temporal_patch_size
    assert info.decode_spec.sampling.fps == video.fps


def test_special_tokens_from_the_config():
    assert info_of().placeholder_ids == {"vision_chunk": words().token_to_id("<|media_pad|>")}
    files = ProcessorFiles({"media_placeholder_token_id": 163605}, encode=lambda text: [1, 2])
    bare = KimiK25ProcessingInfo(files)
    span = bare.span("vision_chunk", bare.geometry(split_video(clip(1, 28, 28), 4)[0].header))
    # the video token is outside the vocabulary, so the image token replaces it
    assert span.token_ids == (1, 2, 163602, 1, 2, 163603, 163605, 163604)
    assert span.is_embed is not None
    assert span.is_embed.tolist() == [False] * 6 + [True, False]
    with pytest.raises(ConfigError, match=r"image_token_id 100 in config.json is outside the vocabulary of 100"):
        info_of(text_config={"vocab_size": 100}, image_token_id=100)
    with pytest.raises(ConfigError, match="checkpoint's tokenizer"):
        KimiK25ProcessingInfo(ProcessorFiles())


def test_options():
    info = info_of().with_kwargs({"max_patches": 100, "fps": 1.0})
    assert (info.specs[CHUNK].image.max_patches, info.specs[CHUNK].frame.max_patches, info.decode_spec.sampling.fps) == (
        100,
        100,
        1.0,
    )
    assert info.with_kwargs({"vision_chunks_kwargs": {"num_frames": 8}}).decode_spec.sampling.fps is None
    assert info_of().with_kwargs({"max_pixels": 14 * 14 * 50}).specs[CHUNK].image.max_patches == 50
    assert info_of().with_kwargs({"max_pixels": 14 * 14 * 50, "max_patches": 20}).specs[CHUNK].image.max_patches == 20
    assert info_of().with_kwargs({"detail": "low"}).specs[CHUNK].frame.max_patches == 512 * 512 // 196
    assert info_of().with_kwargs({"detail": "high"}).options_key("vision_chunk") == info_of().options_key("vision_chunk")
    sizes = {"size": {"max_height": 8, "max_width": 8}}
    assert info_of().with_kwargs(sizes).geometry(MediaHeader("vision_chunk", 1000, 1000)).merged == (1, 4, 4)
    keys = {
        one.options_key("vision_chunk")
        for one in (info_of(), info, info_of().with_kwargs(sizes), info.with_kwargs({"fps": 3.0}))
    }
    assert len(keys) == 4


def test_resample_pillow():
    image, info = make_image(300, 200), info_of(SMALL).with_kwargs({"resample": "pillow"})
    pixels, grid = info.process(image_chunk(ImageItem(image)), torch.float32)
    small = np.asarray(Image.fromarray(image.numpy()).resize((93, 139), Image.Resampling.BICUBIC))
    shown = data(pixels["pixel_values"]).view(grid.h, grid.w, 3, 14, 14).permute(0, 3, 1, 4, 2).reshape(140, 112, 3)
    assert torch.equal(((shown[:139, :93] + 1) * 127.5).round().to(torch.uint8), torch.tensor(small))
    assert info.options_key("vision_chunk") != info_of(SMALL).options_key("vision_chunk")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_patch": 1}, "did you mean max_patches"),
        ({"min_pixels": 1}, "did you mean max_pixels"),
        ({"max_patches": 0}, "max_patches is 0"),
        ({"max_pixels": True}, "max_pixels is True"),
        ({"size": {"max_height": 3}}, "max_height and max_width"),
        ({"size": {"max_height": 3, "max_width": 4}}, "the same number"),
        ({"size": {"max_height": -3, "max_width": -3}}, "size is -3"),
        ({"resample": "nearest"}, "torch and pillow"),
        ({"detail": "lo"}, "auto, high, low and original"),
        ({"fps": 1.0, "num_frames": 3}, "exclude"),
    ],
)
def test_bad_options_are_named(options, text):
    with pytest.raises(ConfigError, match=text):
        info_of().with_kwargs(options)


def test_what_is_refused():
    info = info_of()
    with pytest.raises(InputError, match="no pixels"):
        info.geometry(MediaHeader("vision_chunk", 0, 5))
    with pytest.raises(InputError, match="no precomputed embeddings"):
        info.embeds_geometry(None)
    with pytest.raises(TypeError, match="neither a VisionChunk nor an image"):
        info.process(AudioItem(torch.zeros(3), 16000), torch.float32)
    kept = info_of({"do_resize": False, "max_patches": 40}, {"do_resize": False})
    for size in ((57, 56), (56, 14), (28, 28 * 11)):  # no multiples of a row, and 44 patches
        with pytest.raises(InputError, match="do_resize=false"):
            kept.geometry(MediaHeader("vision_chunk", *size))
    with pytest.raises(ConfigError, match="max_pixels resizes images"):
        kept.with_kwargs({"max_pixels": 99})


@settings(max_examples=300)
@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 40), st.integers(1, 3000))
def test_shrunk_items_fit(height, width, frames, rows):
    info = info_of()
    plan = FramePlan(tuple(range(frames)), tuple(map(float, range(frames))), frames, 1.0)
    header = MediaHeader("video", height, width, plan if frames > 1 else None)
    before = [info.geometry(h) for h in split_header(header, "video", info.decode_spec)]
    assume(rows < sum(grid.num_embeds for grid in before))
    options = info.shrink_kwargs("vision_chunk", (frames, before[0].h, before[0].w), rows)
    assert options is not None
    small = info.with_kwargs(options)
    wanted = min(small.decode_spec.sampling.num_frames or frames, frames)
    cut = FramePlan(plan.indices[:wanted], plan.timestamps[:wanted], frames, 1.0)
    header = MediaHeader("video", height, width, cut if frames > 1 else None)
    after = [small.geometry(h) for h in split_header(header, "video", small.decode_spec)]
    assert sum(grid.num_embeds for grid in after) <= max(rows, _least(height, width))


def _least(height: int, width: int) -> int:
    """Return the fewest rows that an image can shrink to: one row across, in the image's aspect ratio."""
    return -(-max(height, width) // max(1, min(height, width)))


def test_the_video_token_is_a_placeholder_except_in_expanded_chunks():
    info = info_of()
    begin, content, end, pad, video = (words().token_to_id(name) for name in MARKS)
    assert info.preprocess_prompt([1, video, video, pad], {}) == [1, pad, pad, pad]
    written = [begin, 7, content, video, video, end]
    assert info.preprocess_prompt([*written, video], {}) == [*written, pad]
    published = info_of(video_token_id=10**6)  # outside the vocabulary
    assert published.preprocess_prompt([10**6, begin, content, pad], {}) == [pad, begin, content, pad]
