"""A prompt that cannot fit is refused before tokens, masks or pixels of its items are made."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from infos import INFOS, ITEMS
from PIL import Image
from sensorium.callers.errors import InputError, MediaError
from sensorium.engine.frontend.input_processor import InputProcessor
from sensorium.engine.frontend.media import MultiModalSettings
from sensorium.models.families.ernie4_5_vl.processing import Ernie45VLProcessingInfo
from sensorium.models.families.qwen2_vl.processing import Qwen2VLProcessingInfo
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.interface import ProcessingInfo, Span

IMAGES = 40
HUGE = 1 << 31  # pixels; about 2.7 million rows an image


def inputs(info: ProcessingInfo) -> InputProcessor:
    tokenizer: Any = None  # prompts are token ids
    return InputProcessor(info, tokenizer, MultiModalSettings(limits={"image": IMAGES}), max_model_len=4096)


def prompt(info: ProcessingInfo, **more: object) -> dict[str, object]:
    tiny = [Image.new("RGB", (8, 8), (value, 0, 0)) for value in range(IMAGES)]
    ids = [token for _ in range(IMAGES) for token in (info.placeholder_ids["image"], 5)]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": tiny}, **more}


@contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


@pytest.fixture
def no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make any attempt to write the tokens or the mask of a span fail."""

    def fail(span: Span) -> None:
        raise AssertionError(f"a span of {span.num_tokens} tokens was written")

    for name in ("token_ids", "is_embed"):
        monkeypatch.setattr(Span, name, property(fail))


@pytest.mark.parametrize("family", [Qwen2VLProcessingInfo, Ernie45VLProcessingInfo])
def test_a_prompt_that_is_too_long_is_refused_from_counts(family: Any, no_tokens: None) -> None:
    info = family(ProcessorFiles())
    kwargs = {"min_pixels": HUGE, "max_pixels": HUGE}
    with at_most(4 << 20), pytest.raises(MediaError, match=r"the prompt takes 1[0-9]{8} tokens, but max_model_len is 4096"):
        inputs(info).process(prompt(info, mm_processor_kwargs=kwargs))


def test_images_that_are_shrunk_to_fit_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    info, written = Qwen2VLProcessingInfo(ProcessorFiles()), []
    read = Span.token_ids.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Span, "token_ids", property(lambda span: written.append(span.num_tokens) or read(span)))
    done = inputs(info).process(prompt(info, mm_processor_kwargs={"min_pixels": HUGE, "max_pixels": HUGE}, fit="context"))
    assert len(written) == IMAGES
    assert len(done.token_ids) == sum(written) + IMAGES < 4096


MOST_ROWS = {
    "min_pixels": HUGE,
    "max_pixels": HUGE,
    "max_patches": 4096,
    "min_patches": 4096,
    "num_frames": -1,
    "do_pan_and_scan": True,
    "pan_and_scan_max_num_crops": 4096,
    "pan_and_scan_min_crop_size": 1,
    "pan_and_scan_min_ratio_to_activate": 0.001,
}
"""Options that make as many rows as an item can have."""
TILES_WITH_TEXT = ("NvlmDProcessingInfo", "Ovis2ProcessingInfo")
"""Families that write text between the tiles of an item, so that the prompt takes memory for each tile."""
TOO_MANY_ROWS = "rows, the limit is 4,194,304"
ONE_VIDEO = "this model takes images, or one video, per prompt"
ONE_AUDIO = r"At most 1 audio\(s\) may be provided"
ONE_IMAGE = r"At most 1 image\(s\) may be provided"
OTHER_REASONS = {
    ("ClipProcessingInfo", "image"): "a text or one image",
    ("EagleVLProcessingInfo", "video"): "takes at most 10 per prompt",
    ("Ernie45VLProcessingInfo", "video"): TOO_MANY_ROWS,
    ("Exaone45ProcessingInfo", "video"): TOO_MANY_ROWS,
    ("HyperClovaXV2ProcessingInfo", "video"): TOO_MANY_ROWS,
    ("Keye15ProcessingInfo", "video"): TOO_MANY_ROWS,
    ("KeyeProcessingInfo", "video"): TOO_MANY_ROWS,
    ("LlavaOnevision2ProcessingInfo", "video"): TOO_MANY_ROWS,
    ("Molmo2ProcessingInfo", "video"): ONE_VIDEO,
    ("Moondream3ProcessingInfo", "image"): ONE_IMAGE,
    ("Ovis25ProcessingInfo", "video"): ONE_VIDEO,
    ("NemotronAsrStreamingProcessingInfo", "audio"): ONE_AUDIO,
    ("OpenPanguVLProcessingInfo", "video"): TOO_MANY_ROWS,
    ("OpenVLAProcessingInfo", "image"): r"At most 1 image\(s\) may be provided",
    ("ParakeetProcessingInfo", "audio"): ONE_AUDIO,
    ("ParakeetTransducerProcessingInfo", "audio"): ONE_AUDIO,
    ("Qwen25OmniProcessingInfo", "video"): TOO_MANY_ROWS,
    ("Qwen25VLProcessingInfo", "video"): TOO_MANY_ROWS,
    ("Qwen2VLProcessingInfo", "video"): TOO_MANY_ROWS,
    ("Qwen3OmniProcessingInfo", "video"): TOO_MANY_ROWS,
    ("SiglipProcessingInfo", "image"): "a text or one image",
    ("VideoLlama3ProcessingInfo", "image"): TOO_MANY_ROWS,
    ("VideoLlama3ProcessingInfo", "video"): TOO_MANY_ROWS,
}
"""Why many items are refused, if it is not the length of the prompt."""


@pytest.mark.parametrize("name", [name for name in sorted(INFOS) if INFOS[name].placeholder_ids])  # others take no tokens
def test_many_small_items_of_any_family_are_refused_from_counts(name: str, no_tokens: None) -> None:
    info, tokenizer = INFOS[name], cast(Any, None)
    for modality in info.valid_kwargs.keys() & info.modalities:  # a model may have fewer encoders than its family
        known = info.valid_kwargs[modality]
        most = MOST_ROWS | ({"max_patches": 64, "min_patches": 64} if name in TILES_WITH_TEXT else {})
        options = {f"{modality}s_kwargs": {key: value for key, value in most.items() if key in known}}
        processor = InputProcessor(info, tokenizer, MultiModalSettings(), max_model_len=200)
        given = {
            "prompt_token_ids": [info.placeholder_ids[modality]] * IMAGES,
            "multi_modal_data": {modality: ITEMS[modality][-1:] * IMAGES},
            "mm_processor_kwargs": options,
        }
        refused = OTHER_REASONS.get((name, modality), "max_model_len is 200")
        for ask in (processor.process, processor.plan):
            with (
                at_most(24 << 20),
                pytest.raises(InputError, match=refused),
            ):
                ask(given)


def test_decoded_pixels_count_for_the_engine_while_an_item_is_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    info: ProcessingInfo = Qwen2VLProcessingInfo(ProcessorFiles())
    processor = inputs(info)
    process, seen = processor.media.process, []

    def spy(*args: Any) -> Any:
        seen.append(processor.media.budget.num_bytes)
        return process(*args)

    monkeypatch.setattr(processor.media, "process", spy)
    one = {"prompt_token_ids": [info.placeholder_ids["image"]], "multi_modal_data": {"image": Image.new("RGB", (300, 200))}}
    processor.process(one)
    assert seen == [3 * 300 * 200]
    assert processor.media.budget.num_bytes == 0
