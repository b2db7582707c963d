"""The description of a decoder-only stack, layer by layer: plain data that is read from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions of one attention layer.

    Args:
        theta: base of the frequencies.
        dim: leading numbers of a head that are rotated (all of them, or a part).
        axes: for each of the `dim // 2` frequencies, the position axis it rotates by; see the three functions at the end of
            this file.
        num_axes: number of position axes. Items advance along all of them, even along one that no frequency uses.
        interleaved: rotated pairs are adjacent numbers (0 1, 2 3, ...); otherwise the two halves of a head.
        scaling: the raw rope parameters of a type other than default ("linear", "llama3", "yarn", ...), or empty.
        odd: the frequencies are those of `dim - 1` numbers. Such a config rotates the number after them too.
    """

    theta: float
    dim: int
    axes: tuple[int, ...]
    num_axes: int = 1
    interleaved: bool = False
    scaling: Mapping[str, Any] = field(default_factory=dict)
    odd: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention over the paged cache.

    Args:
        scale: factor of the scores.
        bias: the q, k, v projections have a bias. out_bias: the output projection has one.
        qk_norm: queries and keys are normed per head ("head") or over all heads together ("all") before rotation, or per head
            after it ("rotated"), or per head without a weight ("plain"), for which the order makes no difference; or
            per head by LayerNorm before it, each head with weights of its own ("centered").
        rope: None for a layer without positions.
        temperature: (growth, interval): queries at position p are multiplied by 1 + growth * log(1 + (p + 1) // interval);
            only in layers without positions. None: they are not.
        window: sliding window in keys, the row's own included; None: full attention.
        chunked: `window` is the length of chunks instead, and a row attends to keys of its own chunk only.
        soft_cap: scores s become cap * tanh(s / cap); None: no cap.
        fused: the checkpoint stores q, k and v as one matrix.
        grouped: name of such a matrix that holds, for each key head in turn, its query heads, its key and its value.
        answer_window: as in CacheSpec.
        cross: keys and values are computed from encoder rows. Sequences without an encoder input skip the layer, whose outputs
            are gated.
        sinks: each head has an attention sink, a learned score that takes a share of the softmax.
        gated: the result of each head is multiplied by the sigmoid of a gate, which q_proj computes beside the queries.
        head_gate: the result of each head is multiplied by the sigmoid of one number per head, which g_proj computes.
        value_norm: values are normed per head, without a weight.
        keys_as_values: values are the projected keys, before norm and rotation.
        source: an earlier layer whose KV cache this layer reads; it has no keys, values and cache of its own.
        in_scale: factor of the input. out_scale: of the output.
        query_latent: width of the compressed queries, which are normed and projected to all heads; None: queries are
            projected directly.
        tau: queries and values are multiplied by a factor per head, which depends on the row and its position (`text.tau`).
        clip: projected (and normed) queries, keys and values are clamped to this size; None: they are not.
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
    grouped: str | None = None
    sinks: bool = False
    gated: bool = False
    head_gate: bool = False
    temperature: tuple[float, float] | None = None
    chunked: bool = False
    value_norm: bool = False
    keys_as_values: bool = False
    source: int | None = None
    cross: bool = False
    in_scale: float = 1.0
    out_scale: float = 1.0
    query_latent: int | None = None
    clip: float | None = None
    answer_window: int | None = None
    tau: bool = False

    @property
    def projection_size(self) -> int:
        """Number of outputs of the projection, per row: gates, queries, keys and values."""
        heads = (1 + self.gated) * self.heads + (2 - self.keys_as_values) * self.kv_heads * (self.source is None)
        return heads * self.head_dim + self.heads * self.head_gate


@dataclass(frozen=True)
class IndexerSpec:
    """The choice of keys that a latent attention layer attends to (arXiv 2512.02556).

    Args:
        heads, dim: of the queries that score keys.
        top_k: number of keys that each row attends to.
        interleaved: as in RopeSpec, for these queries and their keys.
        shared: the layer attends to the keys that the nearest earlier layer with an indexer selected, and has none.
    """

    heads: int
    dim: int
    top_k: int
    interleaved: bool
    shared: bool = False


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (arXiv 2405.04434): the cache holds `latent + shared_dim` numbers per token for all heads.

    Args:
        query_latent: width of the compressed queries; None: queries are projected directly.
        nope_dim, value_dim: numbers per head of keys and of values that are expanded from the latent row.
        rope: rotary positions of the numbers of a key that all heads share; None: they are not rotated.
        unrotated_dim: how many numbers of a key all heads share, if they are not rotated.
        bias: the down projections and the output projection have a bias.
        eps: epsilon of the norms after the down projections.
        indexer: selects the keys that a row attends to; None: it attends to all.
    """

    heads: int
    query_latent: int | None
    latent: int
    nope_dim: int
    value_dim: int
    scale: float
    rope: RopeSpec | None
    bias: bool = False
    eps: float = 1e-6
    unrotated_dim: int = 0
    indexer: IndexerSpec | None = None

    @property
    def shared_dim(self) -> int:
        """How many numbers of a key all heads share."""
        return self.unrotated_dim if self.rope is None else self.rope.dim


@dataclass(frozen=True)
class ConvSpec:
    """A gated short convolution in place of attention. `taps`: inputs that it sees, the row's own included."""

    taps: int
    bias: bool = False
    path: ClassVar[str] = "conv"


@dataclass(frozen=True)
class DeltaSpec:
    """A gated delta net in place of attention.

    Args:
        heads: heads of values, each with a state `[key_dim, value_dim]`. key_heads: heads of queries and keys.
        taps: inputs that the convolution before it sees, the row's own included.
        separate: OLMo Hybrid's layer, which stores q, k, v and the gate apart.
        most_beta: the learning rate goes up to this number. act: activation after the convolution.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    taps: int
    separate: bool = False
    most_beta: float = 1.0
    act: str = "silu"
    path: ClassVar[str] = "linear_attn"


@dataclass(frozen=True)
class KdaSpec:
    """Kimi delta attention (arXiv 2510.26692) in place of attention: a gated delta net with a decay per channel of a key.

    Args:
        heads, head_dim: of queries, keys and values, each with a state `[head_dim, head_dim]`.
        taps: inputs that the convolution before it sees, the row's own included.
        act: activation after the convolution.
    """

    heads: int
    head_dim: int
    taps: int
    act: str = "silu"
    path: ClassVar[str] = "self_attn"


@dataclass(frozen=True)
class MambaSpec:
    """A Mamba 2 layer in place of attention.

    Args:
        heads, head_dim: heads of values, each with a state `[state, head_dim]`. groups: heads of queries and keys (C and B).
        taps: inputs that the convolution before it sees, the row's own included. conv_bias: it has a bias.
        bias: the input projection has a bias. out_bias: the output projection has one.
        act: activation after the convolution.
        step_limits: limits of a row's step, by which its decay and its share in the state are scaled.
        norm: the result is normed after its gate ("after"), before it ("before"), or not (None).
        multipliers: factors of the parts of the input projection (gate, x, B, C, step); empty: none. in_scale: factor of its
            input. out_scale: of the output.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    taps: int
    conv_bias: bool
    bias: bool
    out_bias: bool
    act: str
    step_limits: tuple[float, float]
    norm: str | None = "after"
    multipliers: tuple[float, ...] = ()
    in_scale: float = 1.0
    out_scale: float = 1.0
    path: ClassVar[str] = "mamba"


@dataclass(frozen=True)
class SelectiveSpec:
    """A Mamba 1 layer (arXiv 2312.00752) in place of attention: each number of its state has a decay of its own.

    Args:
        width: channels. state: numbers of the state per channel. rank: inner width of the projection of steps.
        taps: inputs that the convolution before it sees, the row's own included. conv_bias: it has a bias.
        bias: the input and output projections have a bias.
        act: activation after the convolution.
        norm_eps: steps, B and C are normed by RMSNorm without a weight, with this epsilon; None: they are not.
    """

    width: int
    state: int
    rank: int
    taps: int
    conv_bias: bool
    bias: bool
    act: str
    norm_eps: float | None = None
    path: ClassVar[str] = "mamba"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Widths of the projected step, B and C."""
        return self.rank, self.state, self.state


@dataclass(frozen=True)
class LightningSpec:
    """Lightning attention (arXiv 2501.08313) in place of softmax attention: a state `[head_dim, head_dim]` per head.

    Args:
        layer, layers: number of this layer, and how many there are. States of later layers decay more slowly.
        act: activation of queries, keys and values.
    """

    heads: int
    head_dim: int
    layer: int
    layers: int
    act: str = "silu"

    @property
    def slopes(self) -> tuple[float, ...]:
        """The negative logarithm of each head's decay."""
        factor = 1 - self.layer / (self.layers - 1 + 1e-5) + 1e-5
        return tuple(2 ** (-8 * number / self.heads) * factor for number in range(1, self.heads + 1))


StateSpec = ConvSpec | DeltaSpec | KdaSpec | MambaSpec | SelectiveSpec | LightningSpec
"""Layers with a state in place of keys and values."""


@dataclass(frozen=True)
class MlpSpec:
    """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))`.

    Args:
        fused: the checkpoint stores gate and up as one matrix.
        plain: names of up and down of an MLP without a gate.
        sparsity: share of the gate's inputs that are cut to zero, as if they had a normal distribution.
        multipliers: factors of the gate before its activation, and of the output.
    """

    inner: int
    act: str = "silu"
    bias: bool = False
    fused: bool = False
    plain: tuple[str, str] | None = None
    sparsity: float = 0.0
    multipliers: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of MLPs: `top_k` of `experts` per row, and an optional shared expert for all rows.

    Args:
        inner: width of each expert, one entry per modality.
        shared_inner: width of the shared expert, 0 for none. shared_gate: it is multiplied by a sigmoid of its own router.
        scoring: "softmax" or "sigmoid" of the router's logits, or "sparsemixer" (Phi-MoE): the weight of an expert is a
            softmax over the logits that differ from the best by at most 2 * `jitter`, relative to it.
        normalise: the weights of the chosen experts are normalised to a sum of 1.
        scale: factor of the weights.
        correction: the router has a learned bias that affects the choice but not the weights.
        groups, top_groups: experts are chosen from the best `top_groups` of `groups` groups (1: no groups).
        group_score: a group's score is that of its best expert ("max") or the sum of its best two ("top2"). "each": every group
            gives the same number of experts.
        bias: the experts' projections have biases. router_bias: the router has one.
        shared_act, shared_bias: `act` and `bias` of the shared expert; None: those of the others.
        modality_experts: names of the sets of experts, each with its own router; `ForwardBatch.modality_ids` selects a row's
            set. A single entry: all rows share one set.
        transposed: a tensor of all experts is stored as `[experts, in, out]`. Used only if in == out; else the shape decides.
        interleaved: the outputs of gate and up alternate in that tensor.
        scaled_inputs: an expert's input is multiplied by its weight, not its output.
        expert_scale: the weight of each expert is multiplied by a learned factor.
        plain: as in MlpSpec.
        latent: width of the routed experts' input and output, between two projections; 0: that of the layer.
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
    shared_act: str | None = None
    shared_bias: bool | None = None
    modality_experts: tuple[str, ...] = ("",)
    transposed: bool = False
    interleaved: bool = False
    scaled_inputs: bool = False
    expert_scale: bool = False
    plain: tuple[str, str] | None = None
    latent: int = 0

    @property
    def of_shared(self) -> MoeSpec:
        """The spec with the activation and the biases of the shared expert."""
        bias = self.bias if self.shared_bias is None else self.shared_bias
        return replace(self, act=self.shared_act or self.act, bias=bias)


Norms = tuple[str | None, str | None, str | None, str | None]
"""Names in the checkpoint of the norms before and after attention, before and after the MLP; None for no norm."""
PLAIN_NORMS: Norms = ("input_layernorm", None, "post_attention_layernorm", None)


@dataclass(frozen=True)
class LayerSpec:
    """A mixer of tokens (attention, or a layer with a state) and an MLP, or only one of the two.

    Args:
        norms: their inputs and outputs may be normed before the outputs are added to the residual stream.
        parallel: the MLP reads the normed input of the mixer, or the same input with a norm of its own if `norms` names one,
            and both outputs are added together.
        experts: a mixture of experts beside the MLP, with norms of its own.
        second: a second mixer that reads the same input; both outputs are added together.
        path: name of the mixer or MLP in the checkpoint if the layer has only one.
        residuals: factors of the mixer's normed input and of its output, and of those of the MLP. If given, their sums
            replace the residual stream.
    """

    mixer: AttentionSpec | LatentSpec | StateSpec | None
    mlp: MlpSpec | MoeSpec | None
    norms: Norms = PLAIN_NORMS
    parallel: bool = False
    experts: MoeSpec | None = None
    second: MambaSpec | None = None
    path: str | None = None
    residuals: tuple[tuple[float, float], tuple[float, float]] | None = None

    @property
    def mixers(self) -> tuple[AttentionSpec | LatentSpec | StateSpec, ...]:
        return tuple(mixer for mixer in (self.mixer, self.second) if mixer is not None)


@dataclass(frozen=True)
class PerLayerSpec:
    """A second input of every layer (Gemma 3n): a row per token from a table, plus a projection of the token embeddings.

    Args:
        vocab: rows of the table. Other tokens take row 0.
        dim: numbers per token and layer.
        act: activation of the gate that multiplies a layer's input.
        encoder_token: the token whose row encoder rows take; None: that of the placeholder.
    """

    vocab: int
    dim: int
    act: str
    encoder_token: int | None = None


@dataclass(frozen=True)
class AltUpSpec:
    """Several residual streams, of which each layer computes one and predicts the others (Gemma 3n).

    Args:
        streams: their number. active: the one that layers compute.
        scaled: the corrected active stream is scaled by a learned vector before it weighs the per-layer input.
        laurel_rank: inner width of the low-rank branch beside attention.
    """

    streams: int
    active: int
    scaled: bool
    laurel_rank: int


@dataclass(frozen=True)
class MtpSpec:
    """Layers for multi-token prediction: each predicts one token further ahead than the one before it.

    Args:
        count: their number. layer: the decoder layer in each of them.
        names: "layers" if their tensors are stored as those of decoder layers after the last one (DeepSeek, GLM), "mtp" if
            their names start with `mtp.` (Qwen), where norms and projection are those of all layers.
    """

    count: int
    layer: LayerSpec
    names: str

    @property
    def zeroes_first(self) -> bool:
        """The embedding of a row at position 0 is replaced by zeros."""
        return self.names == "layers"


@dataclass(frozen=True)
class DecoderSpec:
    """A whole decoder stack.

    Args:
        norm: "rms", "layer" (LayerNorm with a bias) or "layer without bias".
        last_norm: name of the norm after the last layer.
        norm_offset: added to every norm's weight (1 where the checkpoint stores it around 0).
        embed_scale: factor of token embeddings, rounded to the model's dtype.
        residual_scale: factor of what attention and MLP add to the residual stream.
        logit_scale: factor of logits. logit_cap: soft cap of logits; None: no cap. head_bias: the head has a bias.
        deepstack: layers after which a deepstack level of encoder rows is added to the residual stream, ascending.
        unpredicted: last tokens of the vocabulary, which have an embedding but no logit.
        first_position: row of position 0 in a table of learned positions, which are added to the input of the first layer;
            None: there is no table.
        adds_encoder_rows: encoder rows are added to token embeddings instead of replacing them.
        per_layer: second inputs of the layers; None: there are none.
        altup: several residual streams; None: there is one.
        scaled_layers: the residual stream is multiplied by a stored factor after each layer.
        mtp_layers: number of layers for multi-token prediction that checkpoints store after the others.
        mtp: layers for multi-token prediction that can be built (`models.text.mtp`); None: there are none.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    eps: float
    max_positions: int
    tied: bool
    norm: str = "rms"
    last_norm: str = "norm"
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    head_bias: bool = False
    deepstack: tuple[int, ...] = ()
    mtp_layers: int = 0
    mtp: MtpSpec | None = None
    adds_encoder_rows: bool = False
    per_layer: PerLayerSpec | None = None
    scaled_layers: bool = False
    altup: AltUpSpec | None = None
    unpredicted: int = 0
    first_position: int | None = None

    @property
    def attentions(self) -> tuple[AttentionSpec | LatentSpec, ...]:
        mixers = (mixer for layer in self.layers for mixer in layer.mixers)
        return tuple(mixer for mixer in mixers if isinstance(mixer, AttentionSpec | LatentSpec))

    @property
    def cross_attentions(self) -> tuple[AttentionSpec, ...]:
        return tuple(mixer for mixer in self.attentions if isinstance(mixer, AttentionSpec) and mixer.cross)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The distinct rotary specs, in the order of the layers."""
        ropes: list[RopeSpec] = []
        for rope in (attention.rope for attention in self.attentions):
            if rope is not None and rope not in ropes:
                ropes.append(rope)
        return tuple(ropes)

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
