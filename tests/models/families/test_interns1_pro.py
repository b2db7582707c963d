"""What the parity suite cannot say of Intern-S1-Pro: the keys of its published config, and groups that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sensorium.callers.errors import ConfigError
from sensorium.models.families.interns1_pro.model import InternS1Pro

TEXT = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 32,
    "max_position_embeddings": 4096,
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
FOPE = {"rope_type": "default", "fope_init_factor": 0.5, "fope_sep_head": True, "num_inv_freq": None}


def model(**text: Any) -> InternS1Pro:
    config = {"text_config": TEXT | text, "vision_config": VISION}
    return InternS1Pro(config, torch.float32, torch.device("meta"))


def test_the_published_keys() -> None:
    older = model(rope_scaling=FOPE, rope_theta=5000000, router_n_groups=8).language_model.spec
    newer = model(rope_parameters=FOPE | {"rope_theta": 5000000}, router_n_groups=8).language_model.spec
    for spec in (older, newer):
        (rope,) = spec.ropes
        assert (rope.theta, rope.num_axes, rope.scaling["mixtures"]) == (5e6, 1, 2)
        assert not spec.deepstack
    assert [layer.mlp for layer in older.layers] == [layer.mlp for layer in newer.layers]


def test_without_its_keys_the_positions_are_plain() -> None:
    (rope,) = model().language_model.spec.ropes
    assert not rope.scaling


def test_every_group_must_give_as_many_experts() -> None:
    with pytest.raises(ConfigError, match="8 of 16 experts in 1 of 3 groups"):
        model(router_n_groups=3)
    with pytest.raises(ConfigError, match="6 of 16 experts in 1 of 4 groups"):
        model(router_n_groups=4, num_experts_per_tok=6)
