"""The decoder-only stack over a paged KV cache, built from a DecoderSpec."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from ...kernels.activation import activation
from ...kernels.metadata import AttentionMetadata
from ...kernels.scatter import scatter_rows_
from ..interface import CacheSpec, ForwardBatch, HiddenCapture, StepLimits
from ..layers.adapter import NO_ADAPTERS, AdapterBytes
from ..layers.basic import AddResidual, EmbeddingTable, Norm, Scale, ScaledNorm, TensorModule
from ..layers.builder import StoredTensor
from ..layers.indexer import kept_bytes
from ..layers.kda import KimiDeltaAttention, kda_bytes
from ..layers.linear import Linear
from ..layers.mla import LatentAttention, latent_attention_bytes
from ..layers.mlp import GatedMlp, PlainMlp, gated_mlp_bytes, plain_mlp_bytes
from ..layers.moe import Mixture, MixtureBeside, ModalityMixture, mixture_bytes
from ..layers.ranks import current_ranks
from ..layers.recurrent import GatedDeltaNet, LightningAttention, Mamba1, Mamba2, ShortConv, recurrent_bytes
from ..memory_formulas import SMALL, OpBytes
from .attention import CrossAttention, DecoderAttention, attention_bytes
from .fourier import build_rotary, rotary_bytes
from .rope import CosSin, Temperature
from .spec import (
    AttentionSpec,
    ConvSpec,
    DecoderSpec,
    DeltaSpec,
    KdaSpec,
    LatentSpec,
    LayerSpec,
    LightningSpec,
    MlpSpec,
    MoeSpec,
    SelectiveSpec,
    StateSpec,
)


class CrossLayer(TensorModule):
    """Cross-attention and MLP, both gated (Mllama). Rows before the item's token get the output of attention alone."""

    def __init__(self, spec: LayerSpec, stack: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        assert isinstance(spec.mixer, AttentionSpec)
        assert spec.mlp is not None
        self.cross_attn = CrossAttention(spec.mixer, stack, dtype, device)
        self.mixers = (self.cross_attn,)
        self.mlp = build_mlp(spec.mlp, stack, dtype, device)
        self.before_attention, self.before_mlp = (build_norm(stack, dtype, device, spec.norms[i]) for i in (0, 2))
        self.cross_attn_attn_gate, self.cross_attn_mlp_gate = (StoredTensor((1,), dtype, device) for _ in range(2))

    def forward(
        self, x: Tensor, add: Tensor | None, rows: Tensor | None, mask: Tensor, cache: Tensor, attn: AttentionMetadata
    ) -> Tensor:
        """Update the residual stream as DecoderLayer does. `rows`, `mask`: `cross_rows` and `cross_mask` of ForwardBatch."""
        hidden = ~mask[..., None]
        add = self.cross_attn(self.before_attention(x, add), rows, cache, attn)
        add = add.mul_(self.cross_attn_attn_gate.weight.tanh()).masked_fill_(hidden[0], 0)
        add = self.mlp(self.before_mlp(x, add), None)
        return add.mul_(self.cross_attn_mlp_gate.weight.tanh()).masked_fill_(hidden[1], 0)


class AbsentLayer(TensorModule):
    """A layer that another rank holds.

    Attributes:
        layers: the layer, without memory, in a tuple, so that it is not registered as a submodule.
        mixers: its mixers, which say what they cache.
    """

    def __init__(self, layer: CrossLayer | DecoderLayer) -> None:
        super().__init__()
        self.layers, self.mixers = (layer,), layer.mixers


def modules_of_all_ranks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the paths and modules of a model, with those of layers that other ranks hold."""
    for path, module in model.named_modules():
        yield path, module
        if isinstance(module, AbsentLayer):
            yield from module.layers[0].named_modules(prefix=path)


def _caches_of(mixer: nn.Module) -> Sequence[CacheSpec]:
    """Return the formats of a mixer's caches: keys and values or a state, and those of an indexer."""
    return (cast(CacheSpec, mixer.cache_spec), *getattr(mixer, "further_caches", ()))


Mixer = (
    DecoderAttention | LatentAttention | ShortConv | GatedDeltaNet | KimiDeltaAttention | Mamba1 | Mamba2 | LightningAttention
)


class DecoderLayer(TensorModule):
    """Mixers of tokens and an MLP, or one of them, with norms before or after each; some stacks scale their outputs."""

    def __init__(self, spec: LayerSpec, stack: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.mixers = tuple(_mixer(mixer, stack, dtype, device) for mixer in spec.mixers)  # registered by names in checkpoints
        for mixer, module in zip(spec.mixers, self.mixers, strict=True):
            self.add_module(str(spec.path or getattr(mixer, "path", "self_attn")), module)
        self.mlps: tuple[TensorModule, ...] = () if spec.mlp is None else (build_mlp(spec.mlp, stack, dtype, device),)
        for mlp in self.mlps:
            self.add_module(spec.path or "mlp", mlp)
        moe = spec.experts
        self.beside = None if moe is None else MixtureBeside(stack.hidden_size, moe, stack.eps, dtype, device)
        self.parallel, self.norms_parallel_input = spec.parallel, spec.parallel and spec.norms[2] is not None
        self.stream_scales, scales = None, [stack.residual_scale] * 2
        factors = (1.0, scales[0], 1.0, scales[1])  # of the norms' results
        norms = [
            None if name is None else build_norm(stack, dtype, device, name, factor)
            for name, factor in zip(spec.norms, factors, strict=True)
        ]
        self.before_attention, self.before_mlp = norms[0] or AddResidual(), norms[2] or AddResidual()
        self.adjusts_outputs = norms[1] is not None or stack.residual_scale != 1.0
        if spec.residuals is not None:
            self.stream_scales, scales = ([pair[i] for pair in spec.residuals] for i in range(2))
            self.adjusts_outputs = True
        if self.adjusts_outputs:
            self.after_attention = norms[1] or Scale(scales[0])
            self.after_mlp = norms[3] or Scale(scales[1])
        self.layer_scalar = StoredTensor((1,), dtype, device) if stack.scaled_layers else None
        self.per_layer = stack.per_layer
        if self.per_layer is not None:
            dim, hidden = self.per_layer.dim, stack.hidden_size
            self.per_layer_gate = Linear(hidden, {"per_layer_input_gate": dim}, False, dtype, device)
            self.per_layer_out = Linear(dim, {"per_layer_projection": hidden}, False, dtype, device)
            self.after_per_layer = build_norm(stack, dtype, device, "post_per_layer_input_norm")

    def forward(
        self,
        x: Tensor,
        add: Tensor | None,
        cos_sin: CosSin | None,
        cache: Tensor,
        attn: AttentionMetadata,
        modality_ids: Tensor | None,
        per_layer: Tensor | None = None,
        *more: tuple[Tensor, AttentionMetadata],
    ) -> Tensor:
        """Update the residual stream `x` in place, first by `add`. Return the last output, which the next layer adds.

        Args:
            cache, attn: of the first mixer. A layer without mixers does not read them.
            per_layer: the layer's second input `[rows, dim]`.
            more: cache and metadata of each further cache of the mixers, in order.
        """
        if self.mixers:
            normed = self._normed(x, add, 0)
            add = self._mix(normed, cos_sin, (cache, attn), *more)
            if self.parallel:
                normed = self.before_mlp(x) if self.norms_parallel_input else normed
                return add.add_(self.mlps[0](normed, modality_ids))
            del normed
        for mlp in self.mlps:
            add = mlp(self._normed(x, add, 1), modality_ids)
            if self.beside is not None:
                add = self.beside(x, add)
            add = self.after_mlp(add) if self.adjusts_outputs else add
        assert add is not None
        if per_layer is not None:
            add = self.project_per_layer(x.add_(add), per_layer)
        if self.layer_scalar is not None:
            x.mul_(self.layer_scalar.weight)
            add.mul_(self.layer_scalar.weight)
        return add

    def _mix(self, normed: Tensor, cos_sin: CosSin | None, *caches: tuple[Tensor, AttentionMetadata]) -> Tensor:
        first, left = None, iter(caches)
        for mixer in self.mixers:
            cache, *more = islice(left, len(_caches_of(mixer)))
            out = mixer(normed, cos_sin, *cache, *more)
            first = out if first is None else first.add_(out)
        assert first is not None
        return self.after_attention(first) if self.adjusts_outputs and not self.parallel else first

    def _normed(self, x: Tensor, add: Tensor | None, part: int) -> Tensor:
        """Return the normed input of the mixers (0) or the MLP (1); some stacks replace the residual stream by it."""
        normed: Tensor = (self.before_mlp if part else self.before_attention)(x, add)
        if self.stream_scales is not None:
            x.copy_(normed).mul_(self.stream_scales[part])
        return normed

    def project_per_layer(self, x: Tensor, per_layer: Tensor) -> Tensor:
        """Weigh the second input by a gate of `x`, and project it to the width of the residual stream."""
        assert self.per_layer is not None
        gate = activation(self.per_layer.act, self.per_layer_gate(x))
        return self.after_per_layer(self.per_layer_out(gate.mul_(per_layer)))


class Decoder(TensorModule):
    """ForwardBatch -> normed hidden states `[rows, hidden]`.

    Attributes:
        local_layers: numbers of the layers that this rank holds.
        absent: canonical paths, below this module, of the layers and experts that other ranks hold.
        absent_caches: entries of `cache_specs` that belong to layers of other ranks.
    """

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = EmbeddingTable(spec.vocab_size, spec.hidden_size, dtype, device, spec.embed_scale)
        is_cross = [isinstance(layer.mixer, AttentionSpec) and layer.mixer.cross for layer in spec.layers]
        classes = [CrossLayer if cross else self.layer_class for cross in is_cross]
        self.ranks = ranks = current_ranks(layers=True)
        # see rank_traffic: the residual stream, and the output to be added to it
        self.sent_bytes = 0 if ranks is None else 2 * spec.hidden_size * dtype.itemsize
        self.local_layers = range(len(classes)) if ranks is None else ranks.range_of(ranks.rank, len(classes))
        if spec.first_position is not None:
            positions = spec.max_positions + spec.first_position
            self.embed_positions = EmbeddingTable(positions, spec.hidden_size, dtype, device)
        layers: list[CrossLayer | DecoderLayer | AbsentLayer] = [
            make(layer, spec, dtype, device)
            if i in self.local_layers
            else AbsentLayer(make(layer, spec, dtype, torch.device("meta")))
            for i, (make, layer) in enumerate(zip(classes, spec.layers, strict=True))
        ]
        self.layers = nn.ModuleList(layers)
        self.norm: Norm | AddResidual = build_norm(spec, dtype, device, spec.last_norm)
        self.cache_specs, self.cache_of_layer = list[CacheSpec](), list[int]()
        for layer, module in zip(spec.layers, layers, strict=True):
            source = getattr(layer.mixer, "source", None)
            first = len(self.cache_specs) if source is None else self.cache_of_layer[source]
            self.cache_of_layer.append(first if module.mixers else 0)
            self.cache_specs += [spec for mixer in module.mixers if source is None for spec in _caches_of(mixer)]
        counts = [sum(len(_caches_of(mixer)) for mixer in module.mixers) for module in layers]
        local = (range(self.cache_of_layer[i], self.cache_of_layer[i] + counts[i]) for i in self.local_layers)
        self.absent_caches = frozenset(range(len(self.cache_specs))).difference(*local)
        paths = (f"layers.{number}" for number in range(len(layers)) if number not in self.local_layers)
        experts = (f"{path}.{name}" for path, module in self.named_modules() for name in getattr(module, "absent", ()))
        self.absent = frozenset((*paths, *experts))
        self.further_caches = [range(1, count) for count in counts]
        self.rotaries = [build_rotary(rope, device) for rope in spec.ropes]
        for rotary in self.rotaries:
            if isinstance(rotary, nn.Module):
                self.rotary_emb = rotary
        scales = {a.temperature: None for a in spec.attentions if isinstance(a, AttentionSpec) and a.temperature}
        self.temperatures = [Temperature(growth, interval) for growth, interval in scales]
        of_position = [*spec.ropes, *scales]
        places = (getattr(layer.mixer, "rope", None) or getattr(layer.mixer, "temperature", None) for layer in spec.layers)
        self.rope_of_layer = [
            -1 if position_source is None else of_position.index(position_source) for position_source in places
        ]
        if spec.per_layer is not None:
            dim, width = spec.per_layer.dim, len(layers) * spec.per_layer.dim
            self.embed_tokens_per_layer = EmbeddingTable(spec.per_layer.vocab, width, dtype, device, dim**0.5)
            self.per_layer_in = Linear(spec.hidden_size, {"per_layer_model_projection": width}, False, dtype, device)
            self.per_layer_projection_norm = Norm(dim, spec.eps, False, dtype, device)

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embed(batch)
        levels = self.put_encoder_rows(x, batch)
        if self.spec.first_position is not None:
            x.add_(self.embed_positions(batch.positions[0] + self.spec.first_position))
        rotated = [rotary(batch.positions) for rotary in self.rotaries]
        scaled = [temperature(batch.positions) for temperature in self.temperatures]
        cos_sin = [*rotated, *scaled, None]  # -1: no positions
        per_layer = self._per_layer_inputs(x, batch)
        if self.ranks is None:
            return self.norm(x, self._run_layers(x, None, batch, cos_sin, levels, per_layer))
        add: Tensor | None = None
        for rank in range(self.ranks.size):
            if rank == self.ranks.rank:
                add = self._run_layers(x, add, batch, cos_sin, levels, per_layer)
            x, add = self.ranks.share(x, add, rank)
        return self.norm(x, add)

    def _run_layers(
        self,
        x: Tensor,
        add: Tensor | None,
        batch: ForwardBatch,
        cos_sin: Sequence[CosSin | None],
        levels: Mapping[int, Tensor],
        per_layer: Sequence[Tensor | None],
    ) -> Tensor | None:
        """Update `x` by the layers of this rank, and return what is to be added to it. Arguments: as in `DecoderLayer.forward`.

        Args:
            cos_sin: by `rope_of_layer`.
            levels: of `put_encoder_rows`.
            per_layer: the second input of each layer.
        """
        for i in self.local_layers:
            layer, cache = self.layers[i], self.cache_of_layer[i]
            if isinstance(layer, CrossLayer):
                if batch.cross_mask is not None:
                    add = layer(x, add, batch.cross_rows, batch.cross_mask, batch.kv_caches[cache], batch.attn[cache])
                continue
            first_cache, *more = ((batch.kv_caches[cache + j], batch.attn[cache + j]) for j in (0, *self.further_caches[i]))
            add = layer(x, add, cos_sin[self.rope_of_layer[i]], *first_cache, batch.modality_ids, per_layer[i], *more)
            _capture(batch.hidden_captures, i + 1, x, add)
            if batch.embed_index is not None and i in levels:
                scatter_rows_(x.add_(add), batch.embed_index, levels[i], add=True)
                add = None
        return add

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Return the embeddings `[rows, hidden]` of the batch's tokens, without encoder rows."""
        return self.embed_tokens(batch.input_ids)

    def put_encoder_rows(self, x: Tensor, batch: ForwardBatch) -> dict[int, Tensor]:
        """Put encoder rows into `x`; return their deepstack levels `[n, hidden]` by the layer each follows."""
        if batch.embed_index is None or batch.embed_rows is None:
            return {}
        first, *levels = batch.embed_rows.split(x.shape[1], 1)
        scatter_rows_(x, batch.embed_index, first, add=self.spec.adds_encoder_rows)
        return dict(zip(self.spec.deepstack, levels, strict=True))

    def _per_layer_inputs(self, x: Tensor, batch: ForwardBatch) -> Sequence[Tensor | None]:
        """Return the second input of each layer, `[rows, dim]`, from the tokens and their embeddings `x`."""
        spec, ids = self.spec.per_layer, batch.input_ids
        if spec is None:
            return [None] * len(self.layers)
        if spec.encoder_token is not None and batch.embed_index is not None:
            ids = ids.index_fill(0, batch.embed_index, spec.encoder_token)
        projected = self.per_layer_in(x).mul_(self.spec.hidden_size**-0.5).view(len(x), -1, spec.dim)
        normed = self.per_layer_projection_norm(projected)
        del projected
        tokens = self.embed_tokens_per_layer(ids.where(ids < spec.vocab, 0))
        return normed.add_(tokens.view_as(normed)).mul_(2**-0.5).unbind(1)


def _capture(captures: Sequence[HiddenCapture], layers: int, x: Tensor, add: Tensor) -> None:
    """Write the residual stream `x + add` after so many layers where it is asked for."""
    for capture in captures:
        if capture.layers == layers:
            rows = slice(capture.start, capture.start + len(capture.states))
            capture.states.copy_(x[rows] + add[rows])


def build_norm(
    stack: DecoderSpec, dtype: torch.dtype, device: torch.device, stored: str | None = None, factor: float = 1.0
) -> Norm:
    """Return a norm of the residual stream, whose result is multiplied by `factor`. `stored`: as in Norm."""
    bias, centered = stack.norm == "layer", stack.norm != "rms"
    build: Callable[..., Norm] = Norm if factor == 1.0 else partial(ScaledNorm, factor)
    return build(stack.hidden_size, stack.eps, bias, dtype, device, offset=stack.norm_offset, stored=stored, centered=centered)


def _mixer(
    mixer: AttentionSpec | LatentSpec | StateSpec, stack: DecoderSpec, dtype: torch.dtype, device: torch.device
) -> Mixer:
    hidden = stack.hidden_size
    if isinstance(mixer, AttentionSpec):
        return DecoderAttention(mixer, stack, dtype, device)
    if isinstance(mixer, LatentSpec):
        return LatentAttention(hidden, mixer, dtype, device)
    if isinstance(mixer, ConvSpec):
        return ShortConv(hidden, mixer, dtype, device)
    if isinstance(mixer, DeltaSpec):
        return GatedDeltaNet(hidden, mixer, stack.eps, dtype, device)
    if isinstance(mixer, KdaSpec):
        return KimiDeltaAttention(hidden, mixer, stack.eps, dtype, device)
    if isinstance(mixer, LightningSpec):
        return LightningAttention(hidden, mixer, dtype, device)
    if isinstance(mixer, SelectiveSpec):
        return Mamba1(hidden, mixer, dtype, device)
    return Mamba2(hidden, mixer, stack.eps, dtype, device)


def build_mlp(m: MlpSpec | MoeSpec, stack: DecoderSpec, dtype: torch.dtype, device: torch.device) -> TensorModule:
    """Return the MLP or the mixture of experts of a layer."""
    if isinstance(m, MlpSpec):
        ranks = current_ranks()
        if ranks is not None and (m.sparsity or not ranks.divides(m.inner)):  # a sparse gate needs the mean of all numbers
            ranks = None
        if m.plain is not None:
            return PlainMlp(stack.hidden_size, m.inner, m.bias, dtype, device, m.act, m.plain, ranks=ranks)
        width, sparsity, multipliers = stack.hidden_size, m.sparsity, m.multipliers
        return GatedMlp(
            width,
            m.inner,
            m.bias,
            dtype,
            device,
            act=m.act,
            fused=m.fused,
            sparsity=sparsity,
            multipliers=multipliers,
            ranks=ranks,
        )
    mixture = Mixture if len(m.modality_experts) == 1 else ModalityMixture
    return mixture(stack.hidden_size, m, dtype, device)


def decoder_bytes(
    c: DecoderSpec,
    limits: StepLimits,
    dtype: torch.dtype,
    adapters: tuple[AdapterBytes, AdapterBytes] = (NO_ADAPTERS, NO_ADAPTERS),
    encoders: bool = True,
) -> int:
    """Return the bytes alive in Decoder, without gathered keys.

    Args:
        adapters: those of mixers, those of MLPs.
        encoders: rows of a step may be encoder rows.
    """
    ops, (in_mixers, in_mlps) = OpBytes(dtype, limits), adapters
    row, added = c.hidden_size * dtype.itemsize, ops.linear_result(c.hidden_size, limits.rows)
    step = 8 + 8 * c.rope_axes + 8 + 40 + row  # ids, positions, slots, bounds and block tables, x
    step += (encoders and not c.cross_attentions) * (8 + (1 + len(c.deepstack)) * row)  # indices and content of encoder rows
    step += sum(map(rotary_bytes, c.ropes))
    step += max((kept_bytes(a, limits) for a in c.attentions if isinstance(a, LatentSpec)), default=0)  # selected keys
    mixers = [[_part_bytes(c.hidden_size, mixer, ops, in_mixers) for mixer in layer.mixers] for layer in c.layers]
    normed = [row * (layer.norms[0] is not None or layer.norms[2] is not None) for layer in c.layers]
    attention = added + max(
        copy + max(of_layer, default=0) + added * (len(of_layer) - 1) for copy, of_layer in zip(normed, mixers, strict=True)
    )
    mlps = [_part_bytes(c.hidden_size, layer.mlp, ops, in_mlps) if layer.mlp else 0 for layer in c.layers]
    before = _previous_bytes(c, row, added, encoders)
    mlp = max(copy + added + previous + part for copy, previous, part in zip(normed, before, mlps, strict=True))
    beside = max((_part_bytes(c.hidden_size, layer.experts, ops, in_mlps) for layer in c.layers if layer.experts), default=0)
    mlp = max(mlp, beside + (beside > 0) * (2 * added + 2 * row))  # the MLP's output in place of attention's, two normed inputs
    # alive beside attention: its input, if it is normed, and the previous output; beside the MLP also attention's output
    parts = max(attention, mlp)
    if c.altup is not None:  # streams before and after prediction; the low-rank branch; projections of the embeddings
        step += 2 * c.altup.streams * row
        parts = max(attention, row + max(mlps))
    if c.per_layer is not None:
        width = len(c.layers) * c.per_layer.dim
        result, made = width * dtype.itemsize, ops.linear_result(width, limits.rows)
        step += result
        inputs = max(ops.linear(c.hidden_size, width, limits.rows), made + ops.norm(width, True), 2 * result) - result
        parts = max(parts, inputs)
    written = max((2 * spec.kv_heads * spec.head_dim for spec in c.cross_attentions), default=0)  # keys of encoder rows
    read = limits.cross_keys if written else 0
    crossing = limits.rows * attention + (read * ops.linear(c.hidden_size, written, read) if read else 0)
    scratch = SMALL if c.altup is not None else 0  # elsewhere, parts that are not alive together leave room for it
    others = limits.rows * max(2 * row + ops.norm(c.hidden_size, True), parts)
    return limits.rows * step + read * row + max(others, crossing) + scratch


def _previous_bytes(c: DecoderSpec, row: int, added: int, encoders: bool) -> list[int]:
    """Return the bytes per row of the previous layer's output in each layer.

    The first layer has none. Neither has the layer after a deepstack level, which is added with that output; only a step
    without encoder rows keeps it there, in place of the encoder rows.
    """
    kept = max(0, added - (1 + len(c.deepstack)) * row) if encoders else added
    after_levels = {layer + 1 for layer in c.deepstack}
    return [0 if i == 0 else kept if i in after_levels else added for i in range(len(c.layers))]


def _part_bytes(
    width: int, part: AttentionSpec | LatentSpec | StateSpec | MlpSpec | MoeSpec, ops: OpBytes, adapters: AdapterBytes
) -> int:
    """Return the bytes per row alive in a mixer or MLP, without its normed input."""
    if isinstance(part, AttentionSpec):
        return attention_bytes(width, part, ops, adapters)
    if isinstance(part, MlpSpec):
        bytes_of = plain_mlp_bytes if part.plain else gated_mlp_bytes
        return bytes_of(width, part.inner, ops, adapters=adapters)
    if isinstance(part, LatentSpec):
        part_bytes = latent_attention_bytes(width, part, ops)
    elif isinstance(part, KdaSpec):
        part_bytes = kda_bytes(width, part, ops)
    elif isinstance(part, StateSpec):
        part_bytes = recurrent_bytes(width, part, ops)
    else:
        part_bytes = mixture_bytes(width, part, ops)
    return part_bytes + max(adapters.first, adapters.last)
