"""Idefics2's prompts against transformers' own: text beside images, images side by side, prompts that are already expanded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import ensure_torchvision, fast_tokenizer, small_tokenizer
from PIL import Image
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.embeddings import ROWS
from sensorium.mm.types import EmbeddingItem, MediaHeader
from sensorium.models.families.idefics2.processing import Idefics2ProcessingInfo
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.spans import lay_out

SPECIALS = ["<image>", "<fake_token_around_image>", "<end_of_utterance>"]
JSON = {"size": {"shortest_edge": 42, "longest_edge": 112}}
TOK = small_tokenizer(SPECIALS)
PROMPTS = [
    "What is <image>shutil's path? <image> <image>\nand <image><b>",
    "<image><image><image>",
    "<image>path.join(os.path)<end_of_utterance>\nUser: <image>",
    "a <fake_token_around_image><image><fake_token_around_image>b",
    "<image>\u4f60\u597d \U0001f600<image>\U0001f600",
    "<image>\u00a0path<image>  two",
]


def info_of(*options: dict[str, Any], **image: Any) -> Idefics2ProcessingInfo:
    config = {
        "image_token_id": TOK.token_to_id("<image>"),
        "vision_config": {"image_size": 112, "patch_size": 14},
        "perceiver_config": {"resampler_n_latents": 4},
        "text_config": {"hidden_size": 64, "vocab_size": TOK.get_vocab_size()},
    }
    files = ProcessorFiles(
        config, {**JSON, **image}, encode=lambda text: TOK.encode(text, add_special_tokens=False).ids,
        token_to_id=TOK.token_to_id, decode=lambda ids: TOK.decode(ids, skip_special_tokens=True),
    )  # fmt: skip
    return Idefics2ProcessingInfo(files, *options)


def expand(info: Idefics2ProcessingInfo, ids: list[int], images: int) -> list[int]:
    spans = [[info.span("image", info.geometry(MediaHeader("image", 60, 90)))]] * images
    return list(lay_out(info.preprocess_prompt(ids, {"image": images}), {"image": spans}, info.placeholder_ids).expand()[0])


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("text", PROMPTS)
def test_tokens_equal(text, split):
    ensure_torchvision()
    from transformers import Idefics2ImageProcessor, Idefics2Processor

    words = fast_tokenizer(SPECIALS, eos_token="<end_of_utterance>", pad_token="<end_of_utterance>")
    oracle = Idefics2Processor(Idefics2ImageProcessor(**JSON, do_image_splitting=split), words, image_seq_len=4)
    count, info = text.count("<image>"), info_of(do_image_splitting=split)
    want = oracle(text=text, images=[[Image.new("RGB", (90, 60))] * count])["input_ids"][0]
    assert expand(info, TOK.encode(text).ids, count) == want
    assert expand(info, want, count) == want


def test_options_and_limits():
    header, split = MediaHeader("image", 400, 300), info_of(do_image_splitting=True)
    assert split.geometry(header).num_embeds == 20
    assert info_of({"do_image_splitting": True}).geometry(header).num_embeds == 20
    assert info_of({"detail": "low"}, do_image_splitting=True).geometry(header).num_embeds == 4
    assert split.shrink_kwargs("image", (5, 1, 4), 19) == {"do_image_splitting": False}
    assert split.shrink_kwargs("image", (5, 1, 4), 3) is None
    assert info_of().geometry(MediaHeader("image", 1, 1)).num_embeds == 4
    for size in ({"longest_edge": 126}, {"shortest_edge": 126}, {"height": 56, "width": 126}, {"height": 56}, 56):
        with pytest.raises(ConfigError):
            info_of({"size": size})


def test_precomputed_rows_are_whole_images():
    info = info_of()
    assert info.embeds_geometry(EmbeddingItem("image", {ROWS: torch.zeros(20, 64)})).t == 5
    with pytest.raises(InputError, match="4 rows"):
        info.embeds_geometry(EmbeddingItem("image", {ROWS: torch.zeros(5, 64)}))


def test_images_that_keep_their_size() -> None:
    files = ProcessorFiles(
        {"vision_config": {"image_size": 112, "patch_size": 14}, "text_config": {"vocab_size": 40000}},
        JSON | {"do_resize": False},
        token_to_id=TOK.token_to_id,
        encode=lambda text: TOK.encode(text).ids,
    )
    whole = Idefics2ProcessingInfo(files)
    cut = whole.with_kwargs({"do_image_splitting": True})
    for info, size in ((whole, (13, 50)), (whole, (113, 20)), (cut, (27, 50)), (cut, (50, 113))):
        with pytest.raises(InputError, match="do_resize=false"):
            info.geometry(MediaHeader("image", *size))
    assert [info.geometry(MediaHeader("image", 28, 112)).t for info in (whole, cut)] == [1, 5]
    with pytest.raises(ConfigError, match="size resizes images"):
        whole.with_kwargs({"size": {"longest_edge": 100}})


def test_a_stored_size_in_another_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="size is 98; give shortest_edge"):
        info_of({"size": {"longest_edge": 98}}, size=98)
