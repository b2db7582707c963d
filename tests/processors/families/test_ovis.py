"""Ovis in its publisher's layouts: published values, placeholders as text or tokens, and configs that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.types import ItemGeometry, MediaHeader
from sensorium.models.families.ovis.model import Ovis, Ovis25
from sensorium.models.families.ovis.processing import Ovis25ProcessingInfo, OvisProcessingInfo
from sensorium.processors.files import ProcessorFiles

PAD, IMAGE, VIDEO = 7, 8, 9
SHAPE = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
NORMALIZED = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
OVIS = {"llm_config": {"vocab_size": 20}, "visual_tokenizer_config": {"hidden_stride": 2, "backbone_config": SIGLIP}}
OVIS25 = {"llm_config": {"vocab_size": 20}, "vit_config": {"patch_size": 16, "hidden_stride": 2}}


def files(config: dict[str, Any], image: dict[str, Any], known: Mapping[str, int] = {}) -> ProcessorFiles:
    tokens = {"<|image_pad|>": PAD, "<unused0>": PAD + 3, **known}
    texts = {1: "Look: ", 2: "<image>", 3: "<vi", 4: "deo>"}
    ids = {"Look: ": [1], "<video>": [3, 4], "": []}
    return ProcessorFiles(
        config=config,
        image={**NORMALIZED, **image},
        token_to_id=tokens.get,
        encode=lambda text: ids[text],
        decode=lambda ids: "".join(texts.get(token, "") for token in ids),
    )


def test_published_sizes_of_a_siglip_tower_are_padded_to_whole_squares() -> None:
    info = OvisProcessingInfo(files(OVIS, {"size": {"height": 384, "width": 384}}))
    assert info.geometry(MediaHeader("image", 300, 300)) == ItemGeometry(1, 14, 14, extra=3)
    cut = info.geometry(MediaHeader("image", 700, 1100))
    assert cut.num_embeds == (1 + cut.tiles[0] * cut.tiles[1]) * 14 * 14 + 2 + cut.tiles[0] * cut.tiles[1]
    assert info.with_kwargs({"max_partition": 1}).geometry(MediaHeader("image", 700, 1100)).tiles == (0, 0)
    with pytest.raises(InputError, match="crop the image"):
        info.geometry(MediaHeader("image", 1, 900))


def test_published_bounds_of_ovis2_5() -> None:
    info = Ovis25ProcessingInfo(files(OVIS25, {"size": {"height": 512, "width": 512}}))
    assert info.geometry(MediaHeader("image", 100, 100)) == ItemGeometry(1, 28, 28, 2, extra=2)
    assert info.geometry(MediaHeader("image", 4000, 3000)) == ItemGeometry(1, 112, 84, 2, extra=2)
    assert info.decode_spec.sampling.num_frames == 8


@pytest.mark.parametrize(("width", "most"), [(2048, 1344 * 1792), (4096, 1792**2)])
def test_the_larger_ovis2_5_has_another_bound(width: int, most: int) -> None:
    config = {**OVIS25, "llm_config": {"vocab_size": 20, "hidden_size": width}}
    info = Ovis25ProcessingInfo(files(config, {"size": {"height": 512, "width": 512}}))
    grid = info.geometry(MediaHeader("image", 5000, 5000))
    assert most - 64 * 1792 < grid.h * grid.w * 16**2 <= most
    assert Ovis25ProcessingInfo(files(config, {"max_pixels": 10**6})).specs["image"].max_pixels == 10**6


@pytest.mark.parametrize("known", [{}, {"<image>": IMAGE, "<video>": VIDEO}])
def test_placeholders_are_texts_or_tokens(known: dict[str, int]) -> None:
    info = Ovis25ProcessingInfo(files(OVIS25, {}, known))
    video = known.get("<video>", 20)
    assert info.placeholder_ids == {"image": PAD, "video": video}
    assert info.text_placeholders == ({} if known else {"<image>": PAD, "<video>": 20})
    prompts = {"image": [1, IMAGE] if known else [1, 2], "video": [1, VIDEO] if known else [1, 3, 4]}
    for modality, prompt in prompts.items():
        assert list(info.preprocess_prompt(prompt, {modality: 1})) == [1, PAD if modality == "image" else video]
        assert list(info.preprocess_prompt(prompt, {})) == prompt
    assert info.span("video", ItemGeometry(2, 2, 2, 2, extra=2)).token_ids == (PAD,) * 4


@pytest.mark.parametrize("items", [{"video": 2}, {"video": 1, "image": 1}])
def test_ovis2_5_takes_images_or_one_video(items: dict[str, int]) -> None:
    info = Ovis25ProcessingInfo(files(OVIS25, {}))
    for preprocess in (info.preprocess_prompt, info.preprocess_chat):
        with pytest.raises(InputError, match="images, or one video"):
            preprocess([1], items)
        assert list(preprocess([1], {"image": 3})) == [1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_patches", "1024"), ("num_patches", None), ("fullatt_block_indexes", "7|x"),
        ("fullatt_block_indexes", [0, "x"]), ("fullatt_block_indexes", [-1]), ("fullatt_block_indexes", 7),
    ],
)  # fmt: skip
def test_bad_values_of_ovis2_5s_tower_are_refused(key: str, value: object) -> None:
    text = {**SHAPE, "model_type": "qwen3", "vocab_size": 20, "num_key_value_heads": 1}
    config = {"llm_config": text, "vit_config": {**SHAPE, "hidden_size": 16, key: value}, "visual_vocab_size": 20}
    with pytest.raises(ConfigError, match=key):
        Ovis25(config, torch.float32, torch.device("meta"))


def test_the_token_of_rows_depends_on_the_decoder() -> None:
    config = {**OVIS, "llm_config": {"vocab_size": 20, "model_type": "gemma2"}}
    info = OvisProcessingInfo(files(config, {}))
    assert (info.atom, info.marks) == (PAD + 3, (PAD + 3,) * 5)


def test_sizes_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="image_size is 384 in backbone_config"):
        OvisProcessingInfo(files(OVIS, {"size": {"shortest_edge": 448}}))
    with pytest.raises(ConfigError, match="the limit is 64"):
        OvisProcessingInfo(files(OVIS, {}), {"max_partition": 65})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"hd_booster": "s2wrapper"}, "hd_booster"),
        ({"use_indicators": True}, "use_indicators"),
        ({"backbone_config": {"model_type": "clip_vision_model"}}, "drop_cls_token=true"),
        ({"backbone_config": None}, "backbone_config"),
        ({"vocab_size": 5}, "no room for 5 marks"),
        ({"tokenize_function": "st_argmax"}, "known is softmax"),
    ],
)
def test_configs_that_are_not_supported_are_refused(words: dict[str, Any], said: str) -> None:
    text = {**SHAPE, "model_type": "qwen2", "vocab_size": 20, "num_key_value_heads": 1}
    tower = {**SHAPE, "model_type": "aimv2", "image_size": 28}
    config = {"llm_config": text, "visual_tokenizer_config": {"backbone_config": tower, "vocab_size": 20, **words}}
    with pytest.raises(ConfigError, match=said):
        Ovis(config, torch.float32, torch.device("meta"))
