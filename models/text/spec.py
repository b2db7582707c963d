"""The description of a decoder-only stack, layer by layer: plain data that is read from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions of one attention layer.

    Args:
        theta: base of the frequencies.
        dim: leading numbers of a head that are rotated (all of them, or a part).
        axes: for each of the `dim // 2` frequencies, the position axis it rotates by; see the three functions at the end of
            this file.
        num_axes: number of position axes, also of those that no frequency rotates by: items advance along all of them.
        interleaved: rotated pairs are adjacent numbers (0 1, 2 3, ...); otherwise the two halves of a head.
        scaling: the raw rope parameters of a type other than default ("linear", "llama3", "yarn", ...), or empty.
    """

    theta: float
    dim: int
    axes: tuple[int, ...]
    num_axes: int = 1
    interleaved: bool = False
    scaling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention over the paged cache.

    Args:
        scale: factor of the scores.
        bias: the q, k, v projections have a bias. out_bias: the output projection has one.
        qk_norm: queries and keys are normed per head ("head") or over all heads together ("all") before rotation, or per head
            after it ("rotated").
        rope: None for a layer without positions.
        window: sliding window in keys, the row's own included; None: full attention.
        soft_cap: scores s become cap * tanh(s / cap); None: no cap.
        fused: the checkpoint stores q, k and v as one matrix.
        sinks: each head has an attention sink, a learned score that takes a share of the softmax.
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
    fused: bool = False
    sinks: bool = False


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (arXiv 2405.04434): the cache holds `latent + rope.dim` numbers per token for all heads.

    Args:
        query_latent: width of the compressed queries; None: queries are projected directly.
        nope_dim, rope.dim, value_dim: numbers per head: of keys without positions, of keys with positions, of values.
        bias: the down projections and the output projection have a bias.
        eps: epsilon of the norms after the down projections.
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
    """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))`.

    Args:
        fused: the checkpoint stores gate and up as one matrix.
        plain: names of up and down of an MLP without a gate.
    """

    inner: int
    act: str = "silu"
    bias: bool = False
    fused: bool = False
    plain: tuple[str, str] | None = None


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of gated MLPs: `top_k` of `experts` per row, and an optional shared expert for all rows.

    Args:
        inner: width of each expert, one entry per modality.
        shared_inner: width of the shared expert, 0 for none. shared_gate: it is multiplied by a sigmoid of its own router.
        scoring: "softmax" or "sigmoid" of the router's logits, or "sparsemixer" (Phi-MoE), which uses `jitter`: experts whose
            logits are further from the best than this share, twice, take no part in its weight.
        normalise: the weights of the chosen experts are normalised to a sum of 1.
        scale: factor of the weights.
        correction: the router has a learned bias that affects the choice but not the weights.
        groups, top_groups: experts are chosen from the best `top_groups` of `groups` groups (1: no groups).
        group_score: a group's score is that of its best expert ("max") or the sum of its best two ("top2").
        bias: the experts' projections have biases. router_bias: the router has one.
        modality_experts: names of the sets of experts, each with its own router; `ForwardBatch.modality_ids` selects a row's
            set. A single entry: all rows share one set.
        transposed: a tensor of all experts is stored as `[experts, in, out]`. Used only if in == out; else the shape decides.
        interleaved: the outputs of gate and up alternate in that tensor.
    """

    experts: int
    top_k: int
    inner: tuple[int, ...]
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
    jitter: float = 0.0
    bias: bool = False
    router_bias: bool = False
    modality_experts: tuple[str, ...] = ("",)
    transposed: bool = False
    interleaved: bool = False


Norms = tuple[str | None, str | None, str | None, str | None]
"""Names in the checkpoint of the norms before and after attention, before and after the MLP; None for no norm."""
PLAIN_NORMS: Norms = ("input_layernorm", None, "post_attention_layernorm", None)


@dataclass(frozen=True)
class LayerSpec:
    """Attention and MLP. Their outputs are normed before they are added to the residual stream.

    `parallel`: the MLP reads the normed input of attention, and both outputs are added together.
    """

    attention: AttentionSpec | LatentSpec
    mlp: MlpSpec | MoeSpec
    norms: Norms = PLAIN_NORMS
    parallel: bool = False


@dataclass(frozen=True)
class DecoderSpec:
    """A whole decoder stack.

    Args:
        norm: "rms", "layer" (LayerNorm with a bias) or "layer without bias".
        norm_offset: added to every norm's weight (1 where the checkpoint stores it around 0).
        embed_scale: factor of token embeddings, rounded to the model's dtype.
        residual_scale: factor of what attention and MLP add to the residual stream.
        logit_scale: factor of logits. logit_cap: soft cap of logits; None: no cap. head_bias: the head has a bias.
        deepstack: layers after which a deepstack level of encoder rows is added to the residual stream, ascending.
        mtp_layers: layers for multi-token prediction, which checkpoints store after the others. They are not used.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    eps: float
    max_positions: int
    tied: bool
    norm: str = "rms"
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    head_bias: bool = False
    deepstack: tuple[int, ...] = ()
    mtp_layers: int = 0

    @property
    def attentions(self) -> tuple[AttentionSpec | LatentSpec, ...]:
        return tuple(layer.attention for layer in self.layers)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The distinct rotary specs, in the order of the layers."""
        found: list[RopeSpec] = []
        for rope in (attention.rope for attention in self.attentions):
            if rope is not None and rope not in found:
                found.append(rope)
        return tuple(found)

    @property
    def rope_axes(self) -> int:
        """Number of position axes."""
        return max((rope.num_axes for rope in self.ropes), default=1)


def chunked_sections(sections: tuple[int, ...]) -> tuple[int, ...]:
    """Give each axis adjacent frequencies: `(2, 1, 1)` gives 0 0 1 2."""
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def interleaved_sections(sections: tuple[int, ...]) -> tuple[int, ...]:
    """Let axes alternate until all but the first are used up: `(4, 2, 2)` gives 0 1 2 0 1 2 0 0."""
    count, axes = sum(sections), len(sections)
    return tuple(i % axes if i < sections[i % axes] * axes else 0 for i in range(count))


def hw_interleaved_sections(sections: tuple[int, ...]) -> tuple[int, ...]:
    """Let height and width alternate before time; sections are height, width, time: `(2, 2, 1)` gives 1 2 1 2 0."""
    return (1, 2) * sections[0] + (0,) * sections[2]
