"""DeBERTa, DeBERTa V2 and V3: encoders whose attention compares content with distances (arXiv 2006.03654)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ....kernels.activation import activation
from ....kernels.metadata import AttentionMetadata
from ...interface import ForwardBatch, StepLimits
from ...layers.basic import EmbeddingTable, Norm
from ...layers.convolution import Conv1d
from ...layers.linear import Linear
from ...layers.relative_position import distance_scores
from ...text.attention import DecoderAttention
from ...text.spec import AttentionSpec, DecoderSpec
from .config import BertLayout
from .deberta_config import DistanceSpec, InputConvolutionSpec, check_widths, convolution_spec, distance_spec
from .encoder import BertEncoder, BertLayer

_INT64 = 8  # bytes


class Distances(NamedTuple):
    """Vectors of the distances in a step, `[distances, hidden]`, and the row of each distance, `[longest, longest]`."""

    vectors: Tensor
    rows: Tensor


def bucket(distance: Tensor, spec: DistanceSpec) -> Tensor:
    """Return the bucket of distances, int64: short ones have their own, longer ones share buckets of growing width."""
    if not spec.buckets:
        return distance
    exact = spec.span // 2
    far = distance.abs().clamp(min=exact)
    share = torch.log(far / exact) / torch.log(torch.tensor((spec.furthest - 1) / exact)) * (exact - 1)
    return torch.where(distance.abs() <= exact, distance, (share.ceil() + exact).long() * distance.sign())


class DisentangledAttention(DecoderAttention):
    """Attention within each prompt of a step. The cache is not used."""

    def __init__(
        self, spec: AttentionSpec, stack: DecoderSpec, dtype: torch.dtype, device: torch.device, *, distances: DistanceSpec
    ) -> None:
        super().__init__(spec, stack, dtype, device)
        self.distances, self.heads, width = distances, spec.heads, stack.hidden_size
        self.scale = (self.dim * (1 + distances.from_content + distances.to_content)) ** -0.5
        wanted = {"pos_key_proj": distances.from_content, "pos_query_proj": distances.to_content}
        shards = {name: width for name, is_used in wanted.items() if is_used and not distances.shared}
        self.pos = Linear(width, shards, True, dtype, device) if shards else None
        for layer in (self.pos, self.qkv if distances.shared else None):
            if layer is not None:
                layer.takes_adapters = False  # its rows are not those of the step

    def forward(self, x: Tensor, positions: Any, cache: Tensor, attn: AttentionMetadata) -> Tensor:
        """Attend. `positions`: Distances."""
        q, k, v = self._heads(self.qkv(x), 3)
        keys, queries = self._distance_heads(positions.vectors)
        out = torch.empty_like(q)
        for start, stop in pairwise(attn.query_start_loc):
            rows, index = slice(start, stop), positions.rows[: stop - start, : stop - start]
            bias = torch.zeros((), dtype=q.dtype, device=q.device).expand(len(q), *index.shape)
            if keys is not None:
                bias = distance_scores(q[:, rows], keys, index)
            if queries is not None:
                bias = bias + distance_scores(k[:, rows], queries, index.T).transpose(1, 2)
            out[:, rows] = F.scaled_dot_product_attention(
                q[:, rows], k[:, rows], v[:, rows], bias * self.scale, scale=self.scale
            )
        return self.out(out.transpose(0, 1).flatten(1))

    def _heads(self, projected: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Return the parts of `projected [rows, parts * hidden]`, each `[heads, rows, dim]`."""
        return projected.view(len(projected), parts, -1, self.dim).permute(1, 2, 0, 3).unbind()

    def _distance_heads(self, vectors: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return keys and queries of the distances, each `[heads, distances, dim]`, None without products with them."""
        spec = self.distances
        if spec.shared:
            queries, keys, _ = self._heads(self.qkv(vectors), 3)
            return keys if spec.from_content else None, queries if spec.to_content else None
        if self.pos is None:
            return None, None
        parts = list(self._heads(self.pos(vectors), len(self.pos.shards)))
        return parts.pop(0) if spec.from_content else None, parts.pop(0) if spec.to_content else None


class ConvolvedLayer(BertLayer):
    """The first layer of DeBERTa V2, with a convolution over its inputs beside it."""

    def __init__(
        self,
        convolution: InputConvolutionSpec,
        spec: DecoderSpec,
        attention: Callable[..., DecoderAttention],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(spec, attention, dtype, device)
        self.act, width = convolution.act, spec.hidden_size
        self.conv = Conv1d(width, width, convolution.taps, device)
        self.after_conv = Norm(width, spec.eps, True, dtype, device)

    def forward(self, x: Tensor, positions: Any, cache: Tensor, attn: AttentionMetadata) -> Tensor:
        beside = torch.empty_like(x)
        for start, stop in pairwise(attn.query_start_loc):
            beside[start:stop] = self.conv(x[start:stop].T[None].float())[0].T
        beside = activation(self.act, beside)
        return self.after_conv(super().forward(x, positions, cache, attn), beside)


class DebertaEncoder(BertEncoder):
    """ForwardBatch -> hidden states `[rows, hidden]`."""

    def __init__(
        self, spec: DecoderSpec, layout: BertLayout, text: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> None:
        check_widths(text)
        self.distance_spec, self.convolution = distance_spec(text), convolution_spec(text)
        super().__init__(spec, layout, text, dtype, device)
        distances, width = self.distance_spec, spec.hidden_size
        self.distances = None if distances is None else EmbeddingTable(2 * distances.span, width, dtype, device)
        is_normed = distances is not None and distances.normed
        self.distance_norm = Norm(width, spec.eps, True, dtype, device) if is_normed else None
        for layer in (self.distances, self.distance_norm):
            if layer is not None:
                layer.takes_adapters = False  # its rows are not those of the step

    def build_layers(self, spec: DecoderSpec, layout: BertLayout, dtype: torch.dtype, device: torch.device) -> list[BertLayer]:
        distances, convolution = self.distance_spec, self.convolution
        attention = DecoderAttention if distances is None else partial(DisentangledAttention, distances=distances)
        first = BertLayer if convolution is None else partial(ConvolvedLayer, convolution)
        kinds = [first, *[BertLayer] * (len(spec.layers) - 1)]
        return [kind(spec, attention, dtype, device) for kind in kinds]

    def step_positions(self, batch: ForwardBatch) -> Distances | None:
        """Return the distances of the step: only those that occur in its longest prompt have vectors."""
        spec, table = self.distance_spec, self.distances
        if spec is None or table is None:
            return None
        longest, device = max(stop - start for start, stop in pairwise(batch.attn[0].query_start_loc)), batch.input_ids.device
        buckets = (bucket(torch.arange(1 - longest, longest), spec) + spec.span).clamp_(0, 2 * spec.span - 1)
        first, last = int(buckets[0]), int(buckets[-1])
        place = torch.arange(longest, device=device)
        rows = (buckets - first).to(device)[place[:, None] - place + longest - 1]
        vectors = table.weight[first : last + 1]
        return Distances(vectors if self.distance_norm is None else self.distance_norm(vectors), rows)

    def position_bytes(self, limits: StepLimits) -> int:
        """Return the bytes of the distances' vectors, of their products with a prompt, and of the scores of a layer."""
        spec, size = self.distance_spec, self.embed_tokens.dtype.itemsize
        if spec is None:
            return 0
        n, heads = limits.longest, cast(DisentangledAttention, self.layers[0].self_attn).heads
        count = min(2 * n - 1, 2 * spec.span)
        return count * self.embed_tokens.dim * size * 4 + n * n * 2 * _INT64 + heads * n * size * (count + 4 * n)


def split_projections(weights: Iterable[tuple[str, Tensor]], heads: int) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors under V2's names. The first DeBERTa stores q, k and v of each head in turn, and no bias of keys."""
    for name, tensor in weights:
        yield from _split(name, tensor, heads)


def _split(name: str, tensor: Tensor, heads: int) -> Iterator[tuple[str, Tensor]]:
    stem, _, last = name.rpartition(".attention.self.")
    stem = f"{stem}.attention.self"
    if last == "in_proj.weight":
        parts = tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(1, 2)
        for part, weight in zip(("query_proj", "key_proj", "value_proj"), parts, strict=True):
            yield f"{stem}.{part}.weight", weight
        yield f"{stem}.key_proj.bias", torch.zeros_like(parts[1, :, 0])
    elif last == "pos_proj.weight":
        yield name, tensor
        yield f"{stem}.pos_proj.bias", torch.zeros_like(tensor[:, 0])
    elif last in ("q_bias", "v_bias"):
        yield f"{stem}.{'query' if last == 'q_bias' else 'value'}_proj.bias", tensor
    else:
        yield name, tensor
