"""Which layers select keys and which share them, configs that are refused, and memory of the selection."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sensorium.callers.errors import ConfigError
from sensorium.engine.setup.rank_checks import check_ranks
from sensorium.models.families.text_only.model import TextModel
from sensorium.models.interface import StepLimits
from sensorium.models.layers.ranks import Ranks

META = torch.device("meta")
SMALL = {
    "model_type": "glm_moe_dsa", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16,
    "num_hidden_layers": 4, "num_attention_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "index_n_heads": 2,
    "index_head_dim": 16, "index_topk": 8, "max_position_embeddings": 1024,
}  # fmt: skip


def build(**changes: Any) -> TextModel:
    return TextModel(SMALL | changes, torch.float32, META)


@pytest.mark.parametrize(
    ("change", "shared"),
    [
        ({}, [False] * 4),
        ({"indexer_types": ["full", "shared", "shared", "full"]}, [False, True, True, False]),
        ({"index_topk_pattern": "FFSS"}, [False, False, True, True]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 2}, [False, False, True, False]),
    ],
    ids=str,
)
def test_layers_that_share_keys(change: dict[str, Any], shared: list[bool]) -> None:
    """Each layer caches latent rows; those with an indexer cache its keys, too."""
    model = build(**change)
    assert [layer.mixer.indexer.shared for layer in model.spec.layers] == shared
    widths = [spec.head_dim for spec in model.cache_specs]
    assert widths == [width for one in shared for width in ([24] if one else [24, 16])]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q_lora_rank": None}, "index_topk in config.json needs q_lora_rank"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, "indexer_types in config.json must begin"),
        ({"index_head_dim": 4}, "index_head_dim 4 in config.json is below qk_rope_head_dim 8"),
        ({"is_causal": False}, "is_causal in config.json is false"),
    ],
    ids=str,
)
def test_configs_that_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(**change)


def test_a_stage_begins_with_a_layer_that_selects_keys() -> None:
    ranks = Ranks(0, 2, True)
    check_ranks(build(indexer_types=["full", "shared"] * 2), ranks, "GlmMoeDsaForCausalLM")
    with pytest.raises(ConfigError, match="attend to keys that a layer of another process would select"):
        check_ranks(build(indexer_types=["full", "full", "shared", "full"]), ranks, "GlmMoeDsaForCausalLM")


def test_memory_of_scores_is_planned_for_long_contexts_only() -> None:
    model = build(index_n_heads=16)
    short, long = (model.forward_bytes(StepLimits(16, keys, keys, torch.device("cpu"))) for keys in (8, 512))
    assert long - short >= 2 * 16 * 16 * 512 * 4 - short
    assert long > 2 * short
