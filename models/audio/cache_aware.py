"""Cache-aware FastConformer (arXiv 2312.17279): a causal encoder whose rows look ahead to the end of their chunk only.

A row attends to the rows of its chunk and of some chunks before it, and all convolutions over time are causal. The rows of a
complete chunk do not change any more. A stream is therefore encoded chunk by chunk, from a cache of the chunks before: keys and
values, and inputs of convolutions. Operations whose bits depend on the shape of a tensor are computed for one chunk at a time,
also for a whole item, so that a stream and a whole item give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...callers.errors import ConfigError
from ...checkpoints.config import positive_int
from ...kernels.activation import activation
from ..interface import StepLimits
from ..layers.basic import TensorModule
from ..layers.builder import Builder, StoredTensor
from ..layers.linear import Linear
from ..memory_formulas import FLOAT32, SMALL, OpBytes
from .conformer import EPS, ConformerMlp, ConformerMlpSpec
from .fastconformer import DistanceAttention, FastConformerSpec, distance_sines, fastconformer_spec


@dataclass(frozen=True)
class CacheAwareSpec(FastConformerSpec):
    """The encoder.

    Args:
        chunk: number of rows in a chunk; the first of them looks ahead to all others.
        chunks_before: number of chunks before its own chunk to which a row attends.
    """

    chunk: int = 1
    chunks_before: int = 0

    def num_rows(self, frames: int) -> int:
        for _ in range(self.stages):
            frames = frames // 2 + 1
        return frames

    def final_rows(self, frames: int) -> int:
        """Return the number of rows that do not change when frames are added to these."""
        for _ in range(self.stages):
            frames = (frames + 1) // 2
        return frames

    @property
    def bands(self) -> int:
        """Number of mel bands after the convolutions of stride 2."""
        return self.num_rows(self.mels)


def cache_aware_spec(audio: Mapping[str, Any]) -> CacheAwareSpec:
    """Read the raw `encoder_config`. Raise ConfigError as `fastconformer_spec`, and for a lookahead or window out of range."""
    base = fastconformer_spec(audio)
    ahead, window = (
        audio.get("default_num_lookahead_tokens", 13),
        positive_int({"sliding_window": 71, **audio}, "sliding_window"),
    )
    if isinstance(ahead, bool) or not isinstance(ahead, int) or not 0 <= ahead < base.positions:
        reason = f"it must be from 0 to {base.positions - 1}"
        raise ConfigError(f"default_num_lookahead_tokens of encoder_config is {ahead!r}; {reason}")
    return CacheAwareSpec(**vars(base), chunk=ahead + 1, chunks_before=(window - 1) // (ahead + 1))


@dataclass(frozen=True)
class LayerCache:
    """The state of a layer that later chunks read.

    Args:
        keys_values: keys and values `[rows, 2, heads, dim]` of the rows to which the next chunk attends.
        inputs: the last inputs of the layer's convolution, `[taps - 1, width]`.
    """

    keys_values: Tensor
    inputs: Tensor


@dataclass(frozen=True)
class ChunkState:
    """State of an open window.

    Args:
        frames: number of frames that later samples do not change.
        caches: of each layer, after the complete chunks.
        rows: encoder rows of the complete chunks, `[rows, width]`.
    """

    frames: int
    caches: tuple[LayerCache, ...]
    rows: Tensor


class CausalMerger:
    """Log-mel frames `[n, mels]` of an item -> its rows from `first` to `last`, `[last - first, width]`.

    Causal convolutions of stride 2 merge the frames. The first one is full; the others are depthwise, and each is followed by a
    pointwise layer. The input of each convolution is padded with zeros: two rows before the item, and one after it.
    """

    def __init__(self, s: CacheAwareSpec, build: Builder) -> None:
        self.spec, c = s, s.channels
        self.first = build.linear(["conv_in"], 9, [c], True)
        self.others: list[tuple[StoredTensor, StoredTensor, Linear]] = [
            (
                build.stored(f"layers.{i}.depthwise_conv.weight", c, 1, 3, 3),
                build.stored(f"layers.{i}.depthwise_conv.bias", c),
                build.linear([f"layers.{i}.pointwise_conv"], c, [c], True),
            )
            for i in range(s.stages - 1)
        ]
        self.join = build.linear(["linear"], c * s.bands, [s.width], True)

    def __call__(self, frames: Tensor, first: int, last: int) -> Tensor:
        ranges = [(first, last)]
        for _ in range(self.spec.stages):
            begin, end = ranges[0]
            ranges.insert(0, (2 * begin - 2, 2 * end - 1))
        (begin, end), count = ranges[0], len(frames)
        x = F.pad(frames[max(begin, 0) : end], (0, 0, max(-begin, 0), max(end - count, 0)))
        for stage, (begin, _) in enumerate(ranges[1:]):
            x = F.pad(x, (2, 1)) if stage == 0 else F.pad(x, (0, 0, 2, 1))
            x = self._first(x) if stage == 0 else self._next(x, stage - 1)
            count = count // 2 + 1
            x[: max(-begin, 0)] = 0
            x[max(count - begin, 0) :] = 0
        return self.join(x.transpose(1, 2).flatten(1))

    def _first(self, x: Tensor) -> Tensor:
        windows = x.unfold(0, 3, 2).unfold(1, 3, 2)  # [rows, bands, 3, 3]
        return self.first(windows.reshape(-1, 9)).relu_().view(*windows.shape[:2], -1)

    def _next(self, x: Tensor, number: int) -> Tensor:
        kernel, bias, pointwise = self.others[number]
        rows, bands = (x.shape[0] - 1) // 2, (x.shape[1] - 1) // 2
        out = bias.weight.expand(rows, bands, -1).clone()
        for tap, weight in enumerate(kernel.weight.flatten(1).T):
            down, right = divmod(tap, 3)
            out.addcmul_(x[down : down + 2 * rows : 2, right : right + 2 * bands : 2], weight)
        return pointwise(out.flatten(0, 1)).relu_().view(rows, bands, -1)


class ChunkAttention(DistanceAttention):
    """Attention of each row to its chunk and those before it, with a bias of the scores that depends on query and distance."""

    def attend(
        self, x: Tensor, keys: Tensor, ends: Sequence[int], before: int, final: int, sines: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the results for rows `x`, and the keys and values to which rows after the first `final` attend.

        Args:
            x: `[rows, width]`. sines: see `distance_sines`.
            keys: keys and values of the rows before `x`, `[rows, 2, heads, dim]`.
            ends: index in `x` after the last row of each chunk. before: number of rows before a chunk to which it attends.
        """
        qkv = self.qkv(self.norm(x)).view(-1, 3, *self.shape)
        table = self.distance(sines).view(-1, *self.shape).permute(1, 2, 0)  # [heads, dim, distances]
        zero, earlier = (len(sines) - 1) // 2, len(keys)
        keys, out = torch.cat((keys, qkv[:, 1:])), torch.empty_like(x)
        for start, end in pairwise((0, *ends)):
            seen = keys[max(0, earlier + start - before) : earlier + end]
            n, count = len(seen), end - start
            out[start:end] = self._chunk(qkv[start:end, 0], seen, table[..., zero - n + 1 : zero + count])
        last = earlier + final
        kept = keys[max(0, last - before) : last].clone()
        del qkv, keys, seen
        return self.out(out), kept

    def _chunk(self, queries: Tensor, seen: Tensor, table: Tensor) -> Tensor:
        (u, v), (count, n) = (stored.weight[:, None] for stored in self.biases), (len(queries), len(seen))
        query, (key, value) = queries.transpose(0, 1), seen.permute(1, 2, 0, 3)
        near = torch.bmm(query + v, table)  # [heads, queries, distances from n - 1 to 1 - count]
        heads, _, width = near.shape
        bias = near.as_strided((heads, count, n), (count * width, width - 1, 1), count - 1) * self.shape[1] ** -0.5
        attended = F.scaled_dot_product_attention((query + u)[None], key[None], value[None], bias[None])
        return attended[0].transpose(0, 1).flatten(1)


class ChunkConvolution:
    """A causal depthwise convolution over time between two pointwise layers, the first of them gated."""

    def __init__(self, s: CacheAwareSpec, build: Builder) -> None:
        self.act, self.norm = s.act, build.norm("norm_conv", s.width, EPS, True)
        build = build.scope("conv")
        self.up = build.linear(["pointwise_conv1"], s.width, [2 * s.width], s.conv_bias)
        self.kernel = build.stored("depthwise_conv.weight", s.width, 1, s.taps)
        self.bias = build.stored("depthwise_conv.bias", s.width) if s.conv_bias else None
        self.inner_norm = build.norm("norm", s.width, EPS, True)
        self.down = build.linear(["pointwise_conv2"], s.width, [s.width], s.conv_bias)

    def __call__(self, x: Tensor, inputs: Tensor, ends: Sequence[int], final: int) -> tuple[Tensor, Tensor]:
        """Return the results for rows `x`, and the last inputs of the convolution before row `final`.

        Args:
            x: `[rows, width]`. inputs: inputs of the convolution before `x`, `[taps - 1, width]`.
            ends: as in `ChunkAttention.attend`.
        """
        gated, gate = self.up(self.norm(x)).chunk(2, -1)
        parts = [inputs]
        for start, end in pairwise((0, *ends)):
            parts.append(gated[start:end] * gate[start:end].contiguous().sigmoid_())
        del gated, gate
        joined, out = torch.cat(parts), torch.empty_like(x)
        del parts
        for start, end in pairwise((0, *ends)):
            part = torch.zeros_like(x[start:end]) if self.bias is None else self.bias.weight.repeat(end - start, 1)
            for tap, weight in enumerate(self.kernel.weight[:, 0].T):
                part.addcmul_(joined[start + tap : end + tap], weight)
            out[start:end] = part
        kept = joined[final : final + len(inputs)].clone()
        del joined
        return self.down(activation(self.act, self.inner_norm(out))), kept


class CacheAwareLayer:
    def __init__(self, s: CacheAwareSpec, build: Builder) -> None:
        first, last = ((f"norm_feed_forward{i}", f"feed_forward{i}.linear1", f"feed_forward{i}.linear2") for i in (1, 2))
        self.spec = s
        self.first_mlp = ConformerMlp(ConformerMlpSpec(s.width, s.inner, first, s.act, s.bias), build)
        self.attention = ChunkAttention(s, build)
        self.convolution = ChunkConvolution(s, build)
        self.second_mlp = ConformerMlp(ConformerMlpSpec(s.width, s.inner, last, s.act, s.bias), build)
        self.norm = build.norm("norm_out", s.width, EPS, True)

    def __call__(
        self, x: Tensor, cache: LayerCache, ends: Sequence[int], sines: Tensor, final: int
    ) -> tuple[Tensor, LayerCache]:
        """Return the layer's results for rows `x`, and its cache after the first `final` of them."""
        s = self.spec
        x = x.add(self.first_mlp(x), alpha=0.5)
        changed, keys = self.attention.attend(x, cache.keys_values, ends, s.chunk * s.chunks_before, final, sines)
        x += changed
        changed, inputs = self.convolution(x, cache.inputs, ends, final)
        x += changed
        del changed
        x.add_(self.second_mlp(x), alpha=0.5)
        return self.norm(x), LayerCache(keys, inputs)


class CacheAwareConformer(TensorModule):
    """Log-mel frames of items, concatenated, `[frames, mels]` -> `[rows, width]`."""

    frame = 1  # `WindowStates` gets frames, not samples

    def __init__(self, spec: CacheAwareSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.dtype, build = spec, dtype, Builder(self, dtype, device)
        self.merge = CausalMerger(spec, build.scope("subsampling"))
        self.blocks = [CacheAwareLayer(spec, build.scope(f"layers.{i}")) for i in range(spec.layers)]

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of stored tensors that are not used."""
        return ()

    def forward(self, features: Tensor, frames: Sequence[int]) -> Tensor:
        return torch.cat([self.extend(item, 0, None)[0] for item in features.split(list(frames))])

    def extend(self, features: Tensor, final: int, earlier: ChunkState | None) -> tuple[Tensor, ChunkState]:
        """Encode a window, and return all its rows and its new state.

        Args:
            features: all frames of the window so far, `[frames, mels]`. final: how many of them later samples do not change.
            earlier: the state of the window when it was shorter, or None.
        """
        s, features = self.spec, features.to(self.dtype)
        total, done = s.num_rows(len(features)), 0 if earlier is None else len(earlier.rows)
        if earlier is not None and done == total:
            return earlier.rows, replace(earlier, frames=final)
        ready = s.final_rows(final) // s.chunk * s.chunk  # rows of complete chunks
        bounds = [*range(done, total, s.chunk), total]
        x = torch.cat([self.merge(features, first, last) for first, last in pairwise(bounds)])
        if s.scale != 1.0:
            x *= s.scale
        ends = [end - done for end in bounds[1:]]
        sines = distance_sines(s.width, s.chunk * (s.chunks_before + 1), x)
        states = self._empty(x) if earlier is None else earlier.caches
        caches = []
        for layer, before in zip(self.blocks, states, strict=True):
            x, cache = layer(x, before, ends, sines, ready - done)
            caches.append(cache)
        rows = x if earlier is None else torch.cat((earlier.rows, x))
        return rows, ChunkState(final, tuple(caches), rows[:ready].clone())

    def _empty(self, like: Tensor) -> tuple[LayerCache, ...]:
        s = self.spec
        keys, inputs = like.new_empty(0, 2, s.heads, s.width // s.heads), like.new_zeros(s.taps - 1, s.width)
        return (LayerCache(keys, inputs),) * s.layers

    def window_bytes(self, rows: int) -> int:
        """Return the bytes of the ChunkState of a window of `rows` rows."""
        s = self.spec
        kept = 2 * min(rows, s.chunk * s.chunks_before) + s.taps - 1
        return (s.layers * kept + rows) * s.width * self.dtype.itemsize


def cache_aware_bytes(c: CacheAwareSpec, rows: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in CacheAwareConformer for up to `rows` rows of one item, inputs included."""
    ops, s, w, x = OpBytes(dtype, limits), dtype.itemsize, c.width, rows * c.width * dtype.itemsize
    seen, distances = min(rows, c.chunk * (c.chunks_before + 1)), 2 * c.chunk * (c.chunks_before + 1) - 1
    mlp = max(ops.norm(w, False) + ops.linear(w, c.inner, rows), ops.mlp(w, c.inner, c.inner, rows))
    scores = c.heads * c.chunk * s * (3 * seen + c.chunk) + ops.torch_attention_tiles(c.chunk, w // c.heads, seen)
    attention = rows * ops.linear_result(3 * w, rows) + 3 * x + distances * ops.linear_result(w, distances) + scores
    convolution = rows * ops.linear_result(2 * w, rows) + 2 * x  # then more of them, one after another
    base = 2 * x + distances * w * (s + 2 * FLOAT32)
    inputs = rows * c.factor * c.mels * s
    cells = (c.chunk + 1) * c.factor // 2 * (c.mels // 2 + 1)  # results of a channel of the first convolution
    merged = cells * max(9 * s + ops.linear(9, c.channels, cells), 5 * c.channels * s // 2)
    return SMALL + inputs + max(2 * x + merged, base + max(rows * mlp, attention, convolution))
