"""Molmo's processor and model beyond the parity suite: the published JSON, prompts, options, limits."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.tiling.overlapped import PaddedOverlappedTiles
from sensorium.mm.types import MediaHeader
from sensorium.models.families.molmo.model import Molmo
from sensorium.models.families.molmo.processing import MolmoProcessingInfo
from sensorium.models.registry import FAMILIES, architecture_key, find_architecture
from sensorium.models.text.spec import MoeSpec
from sensorium.models.weights import named_layers
from sensorium.processors.files import ProcessorFiles

CONFIG: dict[str, Any] = {
    "attention_layer_norm": False, "clip_qkv": None, "embedding_size": 152064, "hidden_size": 3584, "intermediate_size": 37888,
    "layer_norm_eps": 1e-6, "layer_norm_type": "rms", "max_position_embeddings": 4096, "norm_after": False,
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "qkv_bias": True, "rope_theta": 1000000.0,
    "tie_word_embeddings": False, "use_position_ids": True, "vocab_size": 152064, "weight_tying": False,
}  # fmt: skip
"""Part of the published config.json of Molmo-7B-D-0924."""
OLMO = {
    "attention_layer_norm": True, "norm_after": True, "qkv_bias": False, "embedding_size": 100352, "vocab_size": 100278,
    "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": None, "rope_theta": 500000.0,
}  # fmt: skip
OLMOE = {
    "architectures": ["OLMoForCausalLM"], "model_type": "molmo", "activation_type": "swiglu", "additional_vocab_size": 128,
    "alibi": False, "attention_layer_norm": True, "attention_layer_norm_with_affine": True, "attn_logit_softcapping": None,
    "bias_for_layer_norm": False, "block_type": "moe", "clip_qkv": None, "d_model": 2048, "embedding_size": 50304,
    "final_logit_softcapping": None, "head_dim": None, "image_padding_embed": "pad_and_partial_pad",
    "image_pooling_2d": "attention-meanq", "image_projector": "mlp", "include_bias": False, "layer_norm_eps": 1e-5,
    "layer_norm_type": "rms", "max_position_embeddings": 32768, "max_sequence_length": 4096, "mlp_hidden_size": None,
    "mlp_ratio": 1, "moe_interleave": False, "moe_num_experts": 64, "moe_shared_expert": False, "moe_top_k": 8,
    "multi_query_attention": None, "n_heads": 16, "n_kv_heads": None, "n_layers": 16, "norm_after": False,
    "normalize_input_embeds": False, "qkv_bias": False, "query_pre_attn_scalar": 224, "rope_impl": "llama",
    "rope_theta": 10000.0, "scale_logits": False, "use_cls_feature": False, "vit_layers": [-2, -9], "vocab_size": 50280,
    "vision_backbone": {
        "image_default_input_size": [336, 336], "image_emb_dim": 1024, "image_head_dim": 64,
        "image_mlp_activations": "quick_gelu", "image_mlp_dim": 4096, "image_model_type": "openai", "image_norm_eps": 1e-5,
        "image_num_heads": 16, "image_num_key_value_heads": 16, "image_num_layers": 23, "image_num_pos": 577,
        "image_patch_size": 14, "image_pos_patch_size": 14,
    },
    "weight_tying": False,
}  # fmt: skip
"""Part of the published config.json of MolmoE-1B-0924."""
IMAGE = {
    "base_image_input_size": [336, 336], "do_normalize": True, "image_padding_mask": True, "image_patch_size": 14,
    "image_token_length_h": 12, "image_token_length_w": 12, "max_crops": 12, "overlap_margins": [4, 4],
}  # fmt: skip
START, END, PATCH, COLUMN, PLACEHOLDER = range(152064, 152069)
TOKENS = {"<im_start>": START, "<im_end>": END, "<im_patch>": PATCH, "<im_col>": COLUMN, "<|image|>": PLACEHOLDER}
FILES = ProcessorFiles(
    CONFIG,
    IMAGE,
    encode=lambda text: [ord(one) for one in text],
    decode=lambda ids: "".join(map(chr, ids)),
    token_to_id=TOKENS.get,
)


def test_the_published_config_builds() -> None:
    model = Molmo(CONFIG, torch.bfloat16, torch.device("meta"))
    assert (model.tower.spec.features, model.feature_order) == ((15, 22), (1, 0))
    assert (model.vocab_size, model.spec.unpredicted, model.spec.eps) == (152064 + 128, 128, 1e-6)
    shapes = {name: view.shape for _, views in named_layers(model).values() for name, view in views.items()}
    assert shapes["patch_pooling.k_proj.weight"] == (1024, 2048)
    assert shapes["pad_embed"] == (2, 2048)
    assert shapes["tower.positional_embedding"] == (577, 1024)
    assert shapes["projector.down_proj.weight"] == (3584, 18944)
    assert shapes["language_model.layers.0.mlp.down_proj.weight"] == (3584, 18944)
    assert shapes["head.lm_head.weight"] == (152064, 3584)
    assert model.is_unused("model.vision_backbone.image_vit.transformer.resblocks.22.attention.wq.weight")


def test_the_published_olmo_builds() -> None:
    model = Molmo({**CONFIG, **OLMO}, torch.bfloat16, torch.device("meta"))
    shapes = {name: view.shape for _, views in named_layers(model).values() for name, view in views.items()}
    assert shapes["language_model.layers.0.self_attn.q_norm.weight"] == (4096,)
    assert shapes["head.lm_head.weight"] == (100352, 4096)
    assert model.vocab_size == 100352 + 128


def test_the_published_mixture_builds() -> None:
    model = Molmo(OLMOE, torch.bfloat16, torch.device("meta"))
    shapes = {name: view.shape for _, views in named_layers(model).values() for name, view in views.items()}
    assert shapes["language_model.layers.0.self_attn.q_norm.weight"] == (2048,)
    assert shapes["language_model.layers.15.mlp.gate.weight"] == (64, 2048)
    assert shapes["language_model.layers.15.mlp.experts.63.down_proj.weight"] == (2048, 1024)
    assert shapes["projector.down_proj.weight"] == (2048, 1024)
    assert shapes["head.lm_head.weight"] == (50304, 2048)
    mixture, attention = model.spec.layers[0].mlp, model.spec.attentions[0]
    assert isinstance(mixture, MoeSpec)
    assert (mixture.top_k, mixture.normalise, attention.scale, model.spec.eps) == (8, False, 128**-0.5, 1e-5)
    tokens = dict(zip(TOKENS, range(50280, 50285), strict=True))
    assert MolmoProcessingInfo(replace(FILES, config=OLMOE, token_to_id=tokens.get)).embed_width == 2048


def test_only_molmo_of_the_architecture_is_served() -> None:
    assert find_architecture(architecture_key("OLMoForCausalLM", OLMOE)).family == "molmo"
    assert architecture_key("OLMoForCausalLM", {"model_type": "hf_olmo"}) not in FAMILIES
    assert architecture_key("OlmoForCausalLM", {"model_type": "olmo"}) not in FAMILIES


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("moe_shared_expert", True),
        ("rope_impl", "cockatoo"),
        ("clip_qkv", 8.0),
        ("layer_norm_type", "default"),
        ("image_pooling_2d", "none"),
    ],
)
def test_other_decoders_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        Molmo({**CONFIG, key: value}, torch.bfloat16, torch.device("meta"))


def test_tokens_of_both_views() -> None:
    info = MolmoProcessingInfo(FILES)
    grid = info.geometry(MediaHeader("image", 800, 1000))
    span = info.span("image", grid)
    tall, wide = (3 * 16 + 8) // 2, (4 * 16 + 8) // 2
    assert (grid.tiles, grid.h, grid.w) == ((3, 4), tall, wide)
    assert span.num_tokens == span.num_embeds == grid.num_embeds == 2 + 12 * 13 + 2 + tall * (wide + 1)
    ids = span.token_ids
    assert (ids[0], ids[1], ids[13], ids[157], ids[158], ids[-1]) == (START, PATCH, COLUMN, END, START, END)


def test_images_come_before_the_text_and_a_space() -> None:
    info = MolmoProcessingInfo(FILES)
    info.bos = 1
    ids = [*map(ord, "User: a"), PLACEHOLDER, ord("b"), PLACEHOLDER]
    expected = [1, PLACEHOLDER, PLACEHOLDER, *map(ord, " User: ab")]
    assert info.preprocess_prompt(ids, {"image": 2}) == expected
    assert info.preprocess_chat(expected, {"image": 2}) == expected
    assert info.preprocess_prompt([*map(ord, "a")], {"image": 1}) == [1, PLACEHOLDER, *map(ord, " a")]
    assert info.preprocess_prompt(ids, {"image": 1}) == [1, *ids], "left to the check of the number of items"


def test_padding_is_counted_by_patch() -> None:
    tiles = PaddedOverlappedTiles(14, 24)
    kinds = tiles.padding(100, 300)
    assert kinds.shape == (1, 24, 24)
    assert [np.unique(line).tolist() for line in kinds[0, 7:10]] == [[1], [0], [0]]
    assert tiles.padding(336, 336).max() == 0
    assert 2 in tiles.padding(100, 290)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("overlap_margins", [3, 3]),
        ("base_image_input_size", [336, 350]),
        ("image_token_length_w", 24),
        ("image_padding_mask", False),
        ("max_crops", 13),
    ],
)
def test_other_preprocessors_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        MolmoProcessingInfo(replace(FILES, image={**IMAGE, key: value}))


def test_limits_of_images() -> None:
    info = MolmoProcessingInfo(FILES)
    with pytest.raises(InputError, match="too narrow"):
        info.geometry(MediaHeader("image", 1, 400))
    grid = info.geometry(MediaHeader("image", 800, 1000))
    assert info.shrink_kwargs("image", (1, grid.h, grid.w), 500) == {"max_crops": 1}
    assert info.with_kwargs({"max_crops": 1}).geometry(MediaHeader("image", 800, 1000)).tiles == (1, 1)
