"""Configs and tensor names of DeBERTa and DeBERTa V2 (which V3 shares).

Sources: the classes of transformers 5.23; arXiv 2006.03654 and 2111.09543.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....callers.errors import ConfigError, short_repr
from ....checkpoints.config import check_activation, positive_int

DEBERTA: dict[str, Any] = {
    "vocab_size": 50265, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 0, "layer_norm_eps": 1e-7, "pad_token_id": 0,
    "pooler_hidden_act": "gelu",
}  # fmt: skip
DEBERTA_V2 = DEBERTA | {
    "vocab_size": 128100, "hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 24, "intermediate_size": 6144,
}  # fmt: skip
DEBERTA_NAMES = (
    (".attention.self.query_proj.", ".self_attn.q_proj."),
    (".attention.self.key_proj.", ".self_attn.k_proj."),
    (".attention.self.value_proj.", ".self_attn.v_proj."),
    (".attention.self.pos_proj.", ".self_attn.pos_key_proj."),
    (".attention.self.pos_q_proj.", ".self_attn.pos_query_proj."),
    (".attention.self.", ".self_attn."),
    ("encoder.rel_embeddings.", "distances."),
    ("encoder.LayerNorm.", "distance_norm."),
    ("encoder.conv.conv.", "layers.0.conv."),
    ("encoder.conv.LayerNorm.", "layers.0.after_conv."),
)


@dataclass(frozen=True)
class DistanceSpec:
    """What attention knows of distances between tokens.

    Args:
        span: distances from `-span` to `span - 1` have a vector; further ones take that of the nearest.
        buckets: distances beyond half of `span` share vectors, up to `furthest`; False: each distance has its own.
        furthest: the distance that the last bucket stands for.
        from_content, to_content: scores have a product of the row with the key's distance ("c2p"), and of the key with the
            row's distance ("p2c").
        shared: distances go through the projections of queries and keys; False: through projections of their own.
        normed: the vectors are normed.
    """

    span: int
    buckets: bool
    furthest: int
    from_content: bool
    to_content: bool
    shared: bool
    normed: bool


@dataclass(frozen=True)
class InputConvolutionSpec:
    """The convolution beside the first layer: number of inputs that it sees, and its activation."""

    taps: int
    act: str


def distance_spec(text: Mapping[str, Any]) -> DistanceSpec | None:
    """Read a config with defaults; None if attention knows of no distances.

    Raises:
        ConfigError: a value is not supported.
    """
    kinds = text.get("pos_att_type") or []
    kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    if unknown := {kind.strip() for kind in kinds} - {"c2p", "p2c"}:
        raise ConfigError(f"pos_att_type {short_repr(min(unknown))} in config.json is not supported; known are c2p and p2c")
    if not text.get("relative_attention"):
        if kinds:
            raise ConfigError("pos_att_type in config.json needs relative_attention")
        return None
    furthest = text.get("max_relative_positions", -1)
    furthest = furthest if furthest >= 1 else positive_int(text, "max_position_embeddings")
    buckets = text.get("position_buckets", -1)
    is_second = text.get("model_type") != "deberta"
    names = {kind.strip() for kind in kinds}
    return DistanceSpec(
        span=buckets if is_second and buckets > 0 else furthest,
        buckets=is_second and buckets > 0,
        furthest=furthest,
        from_content="c2p" in names,
        to_content="p2c" in names,
        shared=is_second and bool(text.get("share_att_key")),
        normed=is_second and "layer_norm" in str(text.get("norm_rel_ebd", "none")).lower(),
    )


def convolution_spec(text: Mapping[str, Any]) -> InputConvolutionSpec | None:
    """Read a config with defaults; None if there is no convolution. ConfigError if it is not supported."""
    if text.get("model_type") == "deberta" or not text.get("conv_kernel_size"):
        return None
    if text.get("conv_groups", 1) != 1 or positive_int(text, "conv_kernel_size") % 2 == 0:
        raise ConfigError("conv_groups and an even conv_kernel_size in config.json of a DeBERTa are not supported")
    return InputConvolutionSpec(
        positive_int(text, "conv_kernel_size"), check_activation("conv_act", text.get("conv_act", "tanh"))
    )


def check_widths(text: Mapping[str, Any]) -> None:
    """Raise ConfigError if embeddings, heads or the pooler have another width than the layers."""
    width = positive_int(text, "hidden_size")
    heads = positive_int(text, "num_attention_heads")
    for key, expected in (("embedding_size", width), ("pooler_hidden_size", width), ("attention_head_size", width // heads)):
        if text.get(key, expected) != expected:
            raise ConfigError(
                f"{key} {short_repr(text[key])} in config.json of a DeBERTa is not supported; it must be {expected}"
            )
