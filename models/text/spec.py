"""What a decoder-only stack is made of, layer by layer: plain data that a config.json is read into. Knows no family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions of one attention layer.

    Args:
        theta: base of the frequencies.
        dim: leading numbers of a head that are turned (all, or a part of them).
        axes: of each of the `dim // 2` frequencies, the axis whose position turns it; `in_runs` and `in_turns` make them.
        num_axes: of positions, more than turn a frequency where one has none: items advance along all of them.
        neighbours: pairs are neighbouring numbers (0 1, 2 3, ...), else a half turns against the other.
        scaling: the raw rope parameters of a kind other than default ("linear", "llama3", "yarn", ...), or empty.
    """

    theta: float
    dim: int
    axes: tuple[int, ...]
    num_axes: int = 1
    neighbours: bool = False
    scaling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention over the paged cache.

    Args:
        scale: factor of the scores.
        bias, out_bias: of the q, k, v products, and of the output's.
        qk_norm: queries and keys are normed per head ("head") or over all heads together ("all") before they are turned.
        rope: None for a layer without positions.
        window: a row sees only so many keys up to its own; None: all.
        soft_cap: scores s become cap * tanh(s / cap); None: untouched.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    bias: bool = False
    out_bias: bool = False
    qk_norm: str | None = None
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention: the cache holds `latent + rope.dim` numbers a token, shared by all heads (arXiv 2405.04434).

    Args:
        query_latent: width that queries are squeezed through; None: they are made directly.
        nope_dim, rope.dim, value_dim: of a head: without and with positions, and of its values.
        bias: of the products that squeeze, and of the output's.
        eps: of the norms behind them.
    """

    heads: int
    query_latent: int | None
    latent: int
    nope_dim: int
    value_dim: int
    scale: float
    rope: RopeSpec
    bias: bool = False
    eps: float = 1e-6


@dataclass(frozen=True)
class MlpSpec:
    """`down(act(gate(x)) * up(x))`. `fused`: the checkpoint stores gate and up as one matrix."""

    inner: int
    act: str = "silu"
    bias: bool = False
    fused: bool = False


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of gated MLPs: `top_k` of `experts` per row, and a shared one for all.

    Args:
        inner: width of each expert, one for each kind. shared_inner: of the shared expert, 0 for none.
        scoring: "softmax" or "sigmoid" of the router's logits. normalise: the chosen weights are made to add up to 1.
        scale: factor of the chosen weights.
        correction: the router has a learned bias that takes part in the choice but not in the weights.
        groups, top_groups: experts lie in groups, of which only the best are chosen from (1: no groups).
        group_score: a group counts by its best expert ("max") or by the sum of its best two ("top2").
        bias: the experts' products have biases.
        kinds: sets of experts, each with its router, by where the checkpoint keeps them; `ForwardBatch.modality_ids` tells a
            row's set. One without a name: all rows are alike.
        transposed: where shapes do not tell, matrices of all experts in one tensor are stored as `[in, out]`.
    """

    experts: int
    top_k: int
    inner: tuple[int, ...]
    act: str = "silu"
    shared_inner: int = 0
    scoring: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: str = "top2"
    bias: bool = False
    kinds: tuple[str, ...] = ("",)
    transposed: bool = False


PLAIN_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class LayerSpec:
    """Attention and MLP, each behind a norm.

    `norms`: their names in the checkpoint. Two: before attention and before the MLP. Four (a sandwich): before and after
    attention, before and after the MLP; what each makes is normed before it is added to the residual stream.
    """

    attention: AttentionSpec | LatentSpec
    mlp: MlpSpec | MoeSpec
    norms: tuple[str, ...] = PLAIN_NORMS

    @property
    def sandwich(self) -> bool:
        return len(self.norms) == 4


@dataclass(frozen=True)
class DecoderSpec:
    """A whole stack.

    Args:
        norm_offset: added to every norm's weight (1 where the checkpoint stores it around 0).
        embed_scale, residual_scale, logit_scale: factors of token embeddings (rounded to the model's dtype), of what each
            part adds to the residual stream, and of logits.
        logit_cap: soft cap of logits; None: untouched.
        deepstack: layers after which further levels of encoder rows are added to the residual stream, one each, rising.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    eps: float
    max_positions: int
    tied: bool
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    deepstack: tuple[int, ...] = ()

    @property
    def attentions(self) -> tuple[AttentionSpec | LatentSpec, ...]:
        return tuple(layer.attention for layer in self.layers)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different ones, in the order of the layers."""
        found: list[RopeSpec] = []
        for rope in (attention.rope for attention in self.attentions):
            if rope is not None and rope not in found:
                found.append(rope)
        return tuple(found)

    @property
    def rope_axes(self) -> int:
        """Axes of positions, 1 where no layer has more."""
        return max((rope.num_axes for rope in self.ropes), default=1)


def in_runs(sections: tuple[int, ...]) -> tuple[int, ...]:
    """Each axis turns a run of neighbouring frequencies: `(2, 1, 1)` gives 0 0 1 2."""
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def in_turns(sections: tuple[int, ...]) -> tuple[int, ...]:
    """Axes take turns while all but the first have frequencies left: `(4, 2, 2)` gives 0 1 2 0 1 2 0 0."""
    count, axes = sum(sections), len(sections)
    return tuple(i % axes if i < sections[i % axes] * axes else 0 for i in range(count))


def in_pairs(sections: tuple[int, ...]) -> tuple[int, ...]:
    """Rows and columns take turns, then comes time; sections of rows, columns, time: `(2, 2, 1)` gives 1 2 1 2 0."""
    return (1, 2) * sections[0] + (0,) * sections[2]
