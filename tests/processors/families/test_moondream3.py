"""Moondream 3's prompts, crops and config.json."""

from typing import Any

import pytest
import torch
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.embeddings import ROWS
from sensorium.mm.types import EmbeddingItem, MediaHeader
from sensorium.models.decoder_model import DecoderModel
from sensorium.models.families.moondream3.config import hub_config
from sensorium.models.families.moondream3.model import Moondream3
from sensorium.models.families.moondream3.processing import Moondream3ProcessingInfo, MoondreamTiles
from sensorium.processors.files import ProcessorFiles

SMALL = {
    "text": {"dim": 32, "ff_dim": 16, "n_layers": 2, "vocab_size": 40, "max_context": 64, "n_heads": 2, "n_kv_heads": 2,
             "moe": {"n_experts": 2, "start_layer": 1, "n_experts_per_tok": 1, "expert_inner_dim": 8}},
    "vision": {"enc_dim": 16, "enc_patch_size": 14, "enc_n_layers": 3, "enc_ff_dim": 16, "enc_n_heads": 2, "crop_size": 42,
               "overlap_margin": 1, "proj_inner_dim": 16},
}  # fmt: skip


def info_of(**config: Any) -> Moondream3ProcessingInfo:
    return Moondream3ProcessingInfo(ProcessorFiles(config={"config": config}, token_to_id={"x": 9}.get))


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((10, 10), (1, 1)),
        ((378, 2000), (1, 1)),  # one crop is high enough
        ((379, 379), (3, 3)),
        ((379, 1000), (2, 6)),
        ((1000, 379), (6, 2)),
        ((2000, 2000), (3, 3)),  # 8 x 8 would cover it
        ((5000, 700), (8, 1)),
    ],
)
def test_crops_are_as_published(size: tuple[int, int], grid: tuple[int, int]) -> None:
    assert MoondreamTiles(14, 27, (4, 4), 12).arrangement(*size) == grid


@pytest.mark.parametrize(
    ("ids", "images", "expected"),
    [
        ([7, 8], 0, [0, 7, 8]),
        ([0, 7, 8], 0, [0, 7, 8]),
        ([7, 8], 1, [5, 7, 8]),
        ([0, 5, 7], 1, [5, 7]),  # the image's span begins with the first token
        ([7, 5, 8], 1, [5, 7, 8]),
    ],
)
def test_the_image_is_first(ids: list[int], images: int, expected: list[int]) -> None:
    info = info_of()
    assert info.placeholder_ids == {"image": 5}  # the token of coordinates, as the tokenizer has none of the image
    assert list(info.preprocess_prompt(ids, {"image": images})) == expected


def test_an_image_has_the_rows_of_one_view() -> None:
    info = info_of()
    grid = info.geometry(MediaHeader("image", 900, 1200))
    assert (grid.num_embeds, grid.tiles) == (729, (2, 4))
    span = info.span("image", grid)
    assert span.num_tokens == 730
    assert list(span.token_ids)[:2] == [0, 5]
    assert info.geometry(MediaHeader("image", 1, 1)).num_embeds == 729


def test_fewer_crops_can_be_asked_for() -> None:
    files = ProcessorFiles(config={}, token_to_id={}.get)
    few = Moondream3ProcessingInfo(files, {"max_crops": 2})
    assert few.geometry(MediaHeader("image", 900, 1200)).tiles == (1, 1)
    with pytest.raises(ConfigError):
        Moondream3ProcessingInfo(files, {"max_crops": 13})


@pytest.mark.parametrize(
    "config",
    [
        {"vision": {"enc_n_layers": 26}},
        {"vision": {"enc_patch_size": 0}},
        {"vision": {"crop_size": "378"}},
        {"text": {"dim": None}},
        {"text": [1]},
    ],
)
def test_other_sizes_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        hub_config({"config": config})


@pytest.mark.parametrize("text", [{"n_heads": 3}, {"n_kv_heads": 3}, {"moe": {"n_experts": 2, "n_experts_per_tok": 3}}])
def test_other_decoders_are_refused(text: dict[str, Any]) -> None:
    config = {"config": {**SMALL, "text": {**SMALL["text"], **text}}}
    with pytest.raises(ConfigError):
        Moondream3(config, torch.float32, torch.device("cpu"))


def test_the_token_that_ends_a_question_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Moondream3({"config": SMALL}, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(DecoderModel, "compute_logits", lambda self, hidden: torch.zeros(len(hidden), 40))
    logits = model.compute_logits(torch.zeros(2, 32))
    assert logits[:, 3].tolist() == [-torch.inf] * 2
    assert not logits[:, [*range(3), *range(4, 40)]].any()


def test_rows_of_another_number_are_refused() -> None:
    info = info_of()
    with pytest.raises(InputError):
        info.embeds_geometry(EmbeddingItem("image", {ROWS: torch.zeros(728, 2048)}))
