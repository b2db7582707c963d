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
        sections: frequencies that each axis of positions turns; they add up to `dim // 2`. One entry: one axis.
        interleaved_axes: axes take turns (t h w t h w ... then t), else each takes a run of neighbours.
        neighbours: pairs are neighbouring numbers (0 1, 2 3, ...), else a half turns against the other.
        scaling: the raw rope parameters of a kind other than default ("linear", "llama3", "yarn", ...), or empty.
    """

    theta: float
    dim: int
    sections: tuple[int, ...]
    interleaved_axes: bool = False
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
    """Multi-head latent attention: the cache holds `latent + rope_dim` numbers a token, shared by all heads (arXiv 2405.04434).

    Args:
        query_latent: width that queries are squeezed through; None: they are made directly.
        nope_dim, rope_dim, value_dim: of a head: without and with positions, and of its values.
    """

    heads: int
    query_latent: int | None
    latent: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    rope: RopeSpec


@dataclass(frozen=True)
class MlpSpec:
    """`down(act(gate(x)) * up(x))`."""

    inner: int
    act: str = "silu"
    bias: bool = False


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of gated MLPs: `top_k` of `experts` per row, and a shared one for all.

    Args:
        inner: width of each expert. shared_inner: of the shared expert, 0 for none.
        shared_gate: the shared expert's output is scaled by a sigmoid gate of the row.
        scoring: "softmax" or "sigmoid" of the router's logits. normalise: the chosen weights are made to add up to 1.
        scale: factor of the chosen weights.
        correction: the router has a learned bias that takes part in the choice but not in the weights.
        groups, top_groups: experts lie in groups, of which only the best are chosen from (1: no groups).
        group_score: a group counts by its best expert ("max") or by the sum of its best two ("top2").
        kinds: sets of experts, each with its router; a row's set is told by `ForwardBatch.modality_ids`.
    """

    experts: int
    top_k: int
    inner: int
    act: str = "silu"
    shared_inner: int = 0
    shared_gate: bool = False
    scoring: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: str = "top2"
    kinds: int = 1


@dataclass(frozen=True)
class LayerSpec:
    """`sandwich`: what attention and MLP make is normed once more before it is added to the residual stream."""

    attention: AttentionSpec | LatentSpec
    mlp: MlpSpec | MoeSpec
    sandwich: bool = False


@dataclass(frozen=True)
class DecoderSpec:
    """A whole stack.

    Args:
        norm_offset: added to every norm's weight (1 where the checkpoint stores it around 0).
        embed_scale, residual_scale, logit_scale: factors of token embeddings (rounded to the model's dtype), of what each
            part adds to the residual stream, and of logits.
        logit_cap: soft cap of logits; None: untouched.
        deepstack: further levels of encoder rows, added to the residual stream after the first so many layers.
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
    deepstack: int = 0

    @property
    def rope_axes(self) -> int:
        """Axes of positions, 1 where no layer has more."""
        ropes = [layer.attention.rope for layer in self.layers]
        return max((len(rope.sections) for rope in ropes if rope is not None), default=1)
