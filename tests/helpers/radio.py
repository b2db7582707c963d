"""RADIO of transformers under the names of its publisher, for oracles that are composed of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

NAMES = {
    "embeddings.patch_projection": "model.patch_generator.embedder", "encoder.layer": "model.blocks",
    "embeddings.position_embedding": "model.patch_generator.pos_embed", "attention.o_proj": "attn.proj",
    "embeddings.cls_register_token": "model.patch_generator.cls_token.token",
}  # fmt: skip
PATCH = 8
ARGS = {
    "model": "vit_of_tests",
    "cls_token_per_teacher": True,
    "cpe_max_size": 64,
    "register_multiple": 4,
    "teachers": [{"name": "clip"}, {"name": "sam", "use_summary": False}, {"name": "dino_v2"}],
}
"""Three class rows, of which the summary has two, and one register."""

VISION = {
    "architectures": ["RADIOModel"],
    "args": ARGS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": PATCH,
}


def make_radio() -> Any:
    """Return transformers' RadioModel of `VISION`; it takes normalised pixels."""
    import transformers as tf

    shape = {key: VISION[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size")}
    tokens = {"num_cls_tokens": 3, "num_registers": 1, "summary_idxs": [0, 2], "max_img_size": ARGS["cpe_max_size"]}
    config = tf.RadioConfig(**shape, mlp_ratio=1.5, **tokens, attn_implementation="eager")
    radio = tf.RadioModel(config)
    radio.make_preprocessor_external()
    return radio


def reset_scales(radio: torch.nn.Module) -> None:
    """Set the layer scales, which the publisher's model does not have, to 1."""
    for name, tensor in radio.named_parameters():
        if "layer_scale" in name:
            tensor.data.fill_(1)


def stored(state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict, with those of the tower below `prefix` as published."""
    out = {}
    for name, tensor in state.items():
        if not name.startswith(prefix):
            out[name] = tensor
        elif "layer_scale" not in name and ".k_proj." not in name and ".v_proj." not in name:
            parts = [state[name.replace("q_proj", kind)] for kind in ("q_proj", "k_proj", "v_proj")]
            own = name.removeprefix(prefix).replace("attention.q_proj", "attn.qkv")
            for new, old in NAMES.items():
                own = own.replace(new, old)
            out[f"{prefix}radio_model.{own}"] = torch.cat(parts) if "q_proj" in name else tensor
    return out | {f"{prefix}radio_model.input_conditioner.norm_mean": torch.zeros(3, 1, 1)}


def restored(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Invert `stored`."""
    out = {}
    for name, tensor in tensors.items():
        own = name.removeprefix(f"{prefix}radio_model.")
        if own == name:
            out[name] = tensor
            continue
        for new, old in NAMES.items():
            own = own.replace(old, new)
        if "attn.qkv" in own:
            for kind, part in zip("qkv", tensor.chunk(3), strict=True):
                out[prefix + own.replace("attn.qkv", f"attention.{kind}_proj")] = part
        elif "input_conditioner" not in own:
            out[prefix + own] = tensor
    return out


def load_with_radio(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], prefix: str) -> None:
    """Load published tensors into a model whose tower is a RadioModel below `prefix`."""
    missing, surplus = model.load_state_dict(restored(tensors, prefix), strict=False)
    assert not surplus, surplus
    assert all("layer_scale" in name or "input_conditioner" in name for name in missing), missing
