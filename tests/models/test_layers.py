"""The house rules of models/: named slices, config checks, the tower's layout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from sensorium.mm.errors import ConfigError
from sensorium.models.config import text_config
from sensorium.models.layers.linear import Linear
from sensorium.models.vision.qwen_vit import plan_layout

MODELS = Path(__file__).parents[2] / "models"
TEXT = {
    "vocab_size": 10,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
}


def test_models_multiply_only_through_linear() -> None:
    """Products with weights outside layers/ would escape packing, quantisation and sharding."""
    for file in MODELS.rglob("*.py"):
        if "layers" not in file.parts:
            assert not re.search(r"F\.linear|nn\.Linear|\.matmul\(|addmm|@ ", file.read_text()), file


def test_linear_fills_slices_and_drops_the_original() -> None:
    layer = Linear(4, {"q": 3, "k": 2}, True, torch.float32, torch.device("cpu"))
    views = dict(layer.tensors("attn."))
    assert list(views) == ["attn.q.weight", "attn.q.bias", "attn.k.weight", "attn.k.bias"]
    for i, view in enumerate(views.values()):
        view.fill_(i + 1.0)
    layer.pack()
    assert layer.weight is None
    assert layer(torch.ones(1, 4)).tolist() == [[6.0, 6.0, 6.0, 16.0, 16.0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"type": "yarn"}}, "yarn"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "relu"}, "relu"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}, "adds up to 3"),
        ({"vocab_size": None}, "lacks 'vocab_size'"),
    ],
)
def test_contradictions_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        text_config(TEXT | change)


def test_flat_and_nested_configs_read_the_same() -> None:
    flat = text_config(TEXT | {"rope_theta": 5e5, "tie_word_embeddings": True})
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 5e5}
    nested = text_config({"text_config": {**TEXT, "rope_scaling": None, "rope_parameters": rope}, "tie_word_embeddings": True})
    assert flat == nested
    assert flat.rope_theta == 5e5
    assert flat.tied


def test_layout_example() -> None:
    layout = plan_layout([(1, 4, 6)], 2, 2)
    assert layout.order is not None
    assert layout.order.tolist() == [0, 1, 3, 4, 2, 5]
    assert (layout.frames, layout.windows) == ([24], [16, 8])
    assert layout.h[:8].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert layout.w[:8].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert layout.w[16:20].tolist() == [4, 5, 4, 5]


def test_layout_without_windows_is_natural() -> None:
    layout = plan_layout([(2, 4, 4), (1, 2, 2)], 2, 0)
    assert layout.order is None
    assert layout.frames == layout.windows == [16, 16, 4]
