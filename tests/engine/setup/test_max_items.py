"""Max items: the result equals that of trying every size; the engine accepts them, and refuses or resizes larger ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import ConfigError, InputError, SensoriumError
from sensorium.engine.config import make_config
from sensorium.engine.model_files import load_model_files
from sensorium.engine.setup.doctor import explain
from sensorium.engine.setup.max_items import ItemLimits, MaxItem, find_max_item, last_true, max_rows, num_rows
from sensorium.engine.setup.memory import max_sizes
from sensorium.engine.setup.resolve import load_processing
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.types import ItemGeometry, MediaHeader
from sensorium.models.families.idefics3.processing import Idefics3ProcessingInfo
from sensorium.models.families.llava.processing import LlavaProcessingInfo
from sensorium.models.families.pixtral.processing import Mistral3ProcessingInfo
from sensorium.models.families.qwen2_vl.processing import Qwen2VLProcessingInfo
from sensorium.models.families.qwen3_vl.processing import MAX_FRAMES, Qwen3VLProcessingInfo
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.interface import ProcessingInfo

TINY_VL = Path(__file__).parents[3] / "assets" / "tiny-vl"
IMAGE, VIDEO = 353, 354
PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
SMALL: dict[str, Any] = {"max_num_seqs": 1, "device": "cpu"}


def processing(folder: Path, **options: Any) -> ProcessingInfo:
    files = load_model_files(folder)
    return load_processing(files, options)


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.build_checkpoint(tmp_path_factory.mktemp("audio"), "qwen2_audio")


def max_item(folder: Path, modality: str, **options: Any) -> MaxItem:
    return next(item for item in explain(make_config(folder, SMALL | options)).max_items if item.modality == modality)


def refused(llm: LLM, prompt: dict[str, Any]) -> bool:
    """Return whether `plan` and `generate` refuse the prompt; they have to agree."""
    (output,) = llm.generate(prompt, PARAMS, use_tqdm=False)
    try:
        llm.plan(prompt)
    except SensoriumError:
        assert output.error is not None
        return True
    assert output.error is None, output.error
    return False


def test_no_audio_fits(audio: Path) -> None:
    limits = ItemLimits(0, "max_model_len", 1 << 30, 512, MediaPolicy())
    assert str(find_max_item("audio", processing(audio), limits)) == "no audio fits, limited by max_model_len"
    too_short = {"max_audio_seconds": 1e-4}
    assert str(max_item(audio, "audio", media=too_short)) == "no audio fits, limited by media.max_audio_seconds"


def test_no_image_fits() -> None:
    assert str(max_item(TINY_VL, "image", max_model_len=2)) == "no image fits, limited by max_model_len"


def test_last_true() -> None:
    for last in range(1, 40):
        assert last_true(lambda n, last=last: n <= last, 1, 100) == last
    assert last_true(lambda n: True, 1, 100) == 100
    assert last_true(lambda n: False, 1, 100) == 0


@pytest.mark.parametrize("limits", [(1024, 65536), (4096, 4096), (256, 12000), (30000, 30000)])
def test_max_rows_are_close_to_trying_all_sizes(limits: tuple[int, int]) -> None:
    info = processing(TINY_VL, min_pixels=limits[0], max_pixels=limits[1])
    sides = [*range(1, 400, 3), *range(400, 4000, 40)]
    sizes = [(h, w) for h in sides for w in sides if h * w <= 200_000]
    real = max(num_rows(info, MediaHeader("image", h, w)) for h, w in sizes)
    found = max_rows(info, "image", MediaPolicy(max_pixels=200_000), 1 << 20)
    assert found >= 0.96 * real
    assert max_rows(info, "image", MediaPolicy(max_pixels=200_000), 7) == 7


def test_videos_are_tried_up_to_the_processors_maximum_of_frames() -> None:
    """The length of the context does not matter."""
    info = Qwen3VLProcessingInfo(ProcessorFiles(video={"size": {"longest_edge": 1 << 17, "shortest_edge": 4096}}))
    tried: list[int] = []
    real = info.geometry

    def geometry(header: MediaHeader) -> ItemGeometry:
        assert header.frames is not None
        tried.append(len(header.frames.indices))
        return real(header)

    info.geometry = geometry  # type: ignore[method-assign]
    found = max_rows(info, "video", MediaPolicy(max_pixels=10_000), 1 << 18)
    assert MAX_FRAMES // 2 <= found < 1 << 18
    assert max(tried) == 2 * MAX_FRAMES
    assert max_rows(info, "video", MediaPolicy(max_pixels=1), 4) == 4


def test_the_default_encoder_cache_holds_four_max_items(tmp_path: Path) -> None:
    info = processing(TINY_VL, images_kwargs={"max_pixels": 1 << 20})
    config = make_config(TINY_VL, {"limit_mm_per_prompt": {"video": 0}})
    assert max_sizes(config, info, 512, 2048).encoder_cache_bytes == 128 << 20
    assert max_sizes(config, info, 1 << 16, 2048).encoder_cache_bytes == 4 * 2047 << 16
    rows = max_rows(info, "image", config.media, 1 << 20)
    assert max_sizes(config, info, 1 << 16, 1 << 20).encoder_cache_bytes == 4 * rows << 16
    few = make_config(TINY_VL, {"limit_mm_per_prompt": {"video": 0}, "encoder_cache_bytes": 2047 * 512})
    assert max_sizes(few, info, 512, 2048).encoder_cache_bytes == 2047 * 512
    with pytest.raises(ConfigError, match=r"encoder_cache_bytes=1048064 is too small: the largest image has 2048"):
        max_sizes(few, info, 512, 2049)


def image_prompt(side: int) -> dict[str, Any]:
    return {"prompt_token_ids": [IMAGE], "multi_modal_data": {"image": np.zeros((side, side, 3), np.uint8)}}


def test_the_max_image_is_limited_by_max_model_len() -> None:
    options = {"max_model_len": 300, "mm_processor_kwargs": {"max_pixels": 1 << 22}}
    item = max_item(TINY_VL, "image", **options)
    assert (item.limit, item.refused, item.rows) == ("max_model_len", True, 289)  # 17 x 17, 18 x 18 are too many
    llm = LLM(TINY_VL, **SMALL, **options)
    assert not refused(llm, image_prompt(item.size[0]))
    assert refused(llm, image_prompt(item.size[0] + 1))


def test_the_max_image_is_limited_by_the_media_policy() -> None:
    options = {"media": MediaPolicy(max_pixels=10_000)}
    item = max_item(TINY_VL, "image", **options)
    assert (item.limit, item.refused, item.size) == ("media.max_pixels", True, (100, 100))
    llm = LLM(TINY_VL, **SMALL, **options)
    assert not refused(llm, image_prompt(100))
    assert refused(llm, image_prompt(101))


def test_the_max_image_is_limited_by_the_processor() -> None:
    item = max_item(TINY_VL, "image")
    assert (item.limit, item.refused, item.rows) == ("mm_processor_kwargs max_pixels", False, 256)
    llm = LLM(TINY_VL, **SMALL)
    (at,), (below,), (above,) = (llm.plan(image_prompt(item.size[0] + more)) for more in (0, -1, 1000))
    assert at.num_embeds == above.num_embeds == 256 > below.num_embeds


def test_the_max_image_of_a_processor_that_refuses_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    info, room = processing(TINY_VL), ItemLimits(500, "max_model_len", 1 << 30, 512, MediaPolicy())
    expected, geometry = find_max_item("image", info, room), info.geometry

    def picky(header: MediaHeader) -> Any:
        if min(header.size) < 15:
            raise InputError("too small")
        return geometry(header)

    monkeypatch.setattr(info, "geometry", picky)
    assert find_max_item("image", info, room) == expected
    assert expected.rows > 0


def test_settings_that_limit_the_max_image() -> None:
    big = {"mm_processor_kwargs": {"max_pixels": 1 << 24}}
    assert max_item(TINY_VL, "image", **big).limit.startswith("max_position_embeddings")
    block = explain(make_config(TINY_VL, SMALL | {"max_model_len": 16})).kv_cache
    tight = max_item(TINY_VL, "image", kv_cache_memory_bytes=30 * block, **big)
    assert (tight.limit, tight.rows) == ("kv_cache_memory_bytes", 21**2)  # 480 tokens


def video_prompt(frames: int, size: tuple[int, int]) -> dict[str, Any]:
    return {"prompt_token_ids": [VIDEO], "multi_modal_data": {"video": np.zeros((frames, *size, 3), np.uint8)}}


def test_the_max_video() -> None:
    options = {
        "max_model_len": 500,
        "mm_processor_kwargs": {"videos_kwargs": {"max_pixels": 128 * 128}},
        "media": MediaPolicy(max_pixels=200 * 200),
    }
    item = max_item(TINY_VL, "video", **options)
    assert (item.limit, item.refused, item.size) == ("max_model_len", True, (200, 200))
    llm = LLM(TINY_VL, **SMALL, **options)
    assert not refused(llm, video_prompt(item.frames, item.size))
    assert refused(llm, video_prompt(item.frames + 1, item.size))
    bytes_ = MediaPolicy(max_pixels=200 * 200, max_video_bytes=4 * 200 * 200 * 3)
    few = max_item(TINY_VL, "video", **options | {"media": bytes_})
    assert (few.limit, few.refused, few.frames) == ("media.max_video_bytes", True, 4)
    llm = LLM(TINY_VL, **SMALL, **options | {"media": bytes_})
    assert not refused(llm, video_prompt(4, (200, 200)))
    assert refused(llm, video_prompt(5, (200, 200)))
    asked = options | {"mm_processor_kwargs": {"videos_kwargs": {"max_pixels": 128 * 128, "num_frames": 6}}}
    assert max_item(TINY_VL, "video", **asked).limit == "mm_processor_kwargs num_frames"


def audio_prompt(samples: int, token: int) -> dict[str, Any]:
    return {"prompt_token_ids": [token], "multi_modal_data": {"audio": (np.zeros(samples, np.float32), 16000)}}


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, "the model"),
        ({"max_model_len": 50}, "max_model_len"),
        ({"media": MediaPolicy(max_audio_seconds=1.5)}, "media.max_audio_seconds"),
    ],
)
def test_the_max_audio(audio: Path, options: dict[str, Any], limit: str) -> None:
    item = max_item(audio, "audio", **options)
    assert (item.limit, item.refused) == (limit, True)
    llm, token = LLM(audio, **SMALL, **options), json.loads((audio / "config.json").read_text())["audio_token_index"]
    samples = round(item.seconds * 16000)
    assert not refused(llm, audio_prompt(samples, token))
    assert refused(llm, audio_prompt(samples + 1, token))


def test_a_processor_that_enlarges_every_image_to_one_size() -> None:
    files = ProcessorFiles({"vision_config": {"image_size": 364, "patch_size": 14}}, encode=lambda text: [1])
    item = find_max_item(
        "image", Idefics3ProcessingInfo(files), ItemLimits(100_000, "max_model_len", 1 << 40, 2, MediaPolicy())
    )
    assert item.size == (1, 1)
    assert str(item).startswith(f"a square of any size: {item.rows} rows, limited by mm_processor_kwargs size (all are")


KEPT = {"do_resize": False}


def llava() -> ProcessingInfo:
    config = {"vision_config": {"patch_size": 14, "image_size": 28}, "image_token_index": 5}
    sizes = {"size": {"height": 28, "width": 28}, "do_center_crop": False}
    return LlavaProcessingInfo(ProcessorFiles(config, {**KEPT, **sizes}))


def pixtral() -> ProcessingInfo:
    config = {"vision_config": {"patch_size": 14}, "image_token_index": 5, "spatial_merge_size": 2}
    return Mistral3ProcessingInfo(ProcessorFiles(config, {**KEPT, "size": {"longest_edge": 1400}}, token_to_id=lambda text: 4))


@pytest.mark.parametrize(
    ("info", "size", "rows"),
    [
        (lambda: Qwen2VLProcessingInfo(ProcessorFiles({}, KEPT, KEPT)), (1792, 1792), 4096),
        (pixtral, (1400, 1400), 2500),
        (llava, (28, 28), 4),
    ],
    ids=["qwen2_vl", "mistral3", "llava"],
)
def test_the_largest_image_of_a_model_that_keeps_sizes(info: Any, size: tuple[int, int], rows: int) -> None:
    """Few sizes are admitted: multiples of a merged patch, or a single one."""
    processing_info, limits = info(), ItemLimits(4096, "max_model_len", 1 << 30, 512, MediaPolicy())
    item = find_max_item("image", processing_info, limits)
    assert (item.size, item.rows, item.refused) == (size, rows, True)
    assert num_rows(processing_info, MediaHeader("image", *size)) == rows
    assert max_rows(processing_info, "image", MediaPolicy(), rows) == rows


def test_the_longest_video_of_a_model_that_keeps_sizes() -> None:
    limits = ItemLimits(4096, "max_model_len", 1 << 30, 512, MediaPolicy())
    item = find_max_item("video", Qwen2VLProcessingInfo(ProcessorFiles({}, KEPT, KEPT)), limits)
    assert (item.size, item.frames, item.rows) == ((700, 1260), 6, 3375)
