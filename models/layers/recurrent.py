"""Layers with a state per sequence in place of keys and values: short convolutions and kinds of linear attention."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from ...kernels.activation import activation
from ...kernels.metadata import AttentionMetadata
from ...kernels.norm import rms_norm
from ...kernels.state import StepDecay, causal_conv, linear_recurrence
from ..interface import CacheSpec
from ..memory_formulas import FLOAT32, SMALL, OpBytes
from ..text.spec import ConvSpec, DeltaSpec, LightningSpec, MambaSpec, SelectiveSpec
from .basic import Converter, Convertible, Norm, TensorModule, WeightedLayer
from .builder import StoredTensor
from .linear import Linear


class CausalConv(WeightedLayer):
    """A convolution of each channel with its last `taps` inputs, `[rows, channels] -> [rows, channels]`.

    `parts`: names of convolutions that the checkpoint stores apart, and their channels.
    """

    def __init__(
        self,
        channels: int,
        taps: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        parts: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.parts = dict(parts or {})
        self.weight = torch.empty(channels, 1, taps, dtype=dtype, device=device)
        self.bias = torch.empty(channels, dtype=dtype, device=device) if bias else None
        self.state_size = channels * (taps - 1)

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        if self.parts:
            yield from self._split(path, self.weight)
        else:
            yield f"{path}.weight", self.weight
        if self.bias is not None:
            yield f"{path}.bias", self.bias

    def _split(self, path: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        names = [f"{path[: path.rfind('.') + 1]}{name}.weight" for name in self.parts]
        return zip(names, weight.split(list(self.parts.values())), strict=True)

    def converters(self, path: str) -> Iterator[tuple[str, Converter]]:
        if self.parts:
            yield f"{path}.weight", partial(self._split, path)

    def packed_bytes(self, device: torch.device) -> int:
        return FLOAT32 * sum(tensor.numel() for _, tensor in self.tensors(""))

    def pack(self) -> None:
        self.weight = self.weight[:, 0].T.float().contiguous()
        self.bias = None if self.bias is None else self.bias.float()

    def forward(self, x: Tensor, states: Tensor, attn: AttentionMetadata) -> Tensor:
        return causal_conv(x, self.weight, self.bias, states, attn)


class ShortConv(TensorModule):
    """The gated short convolution of LFM2: `out(c * conv(b * x))`, where b, c and x are one projection of the input."""

    def __init__(self, hidden: int, spec: ConvSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.project = Linear(hidden, {"in_proj": 3 * hidden}, spec.bias, dtype, device)
        self.conv = CausalConv(hidden, spec.taps, spec.bias, dtype, device)
        self.out = Linear(hidden, {"out_proj": hidden}, spec.bias, dtype, device)
        self.cache_spec = CacheSpec("state", 1, self.conv.state_size, dtype)

    def forward(self, x: Tensor, cos_sin: None, cache: Tensor, attn: AttentionMetadata) -> Tensor:
        b, c, value = self.project(x).chunk(3, 1)
        return self.out(self.conv(b * value, cache, attn).mul_(c))


class GatedDeltaNet(TensorModule, Convertible):
    """Linear attention with a gated delta rule (arXiv 2412.06464), as in Qwen3-Next, Qwen3.5 and OLMo Hybrid.

    A head's state is a matrix `[key_dim, value_dim]`. A row's decay and its learning rate beta come from projections that are
    never quantised.
    """

    def __init__(self, hidden: int, spec: DeltaSpec, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, values = spec, spec.heads * spec.value_dim
        keys = spec.key_heads * spec.key_dim
        self.mixed = 2 * keys + values  # channels of the convolution: q, k, v
        separate = {"q": keys, "k": keys, "v": values} if spec.separate else {}
        shards = {f"{name}_proj": width for name, width in separate.items()} or {"in_proj_qkv": self.mixed}
        last, gate, out, norm = (
            ("g_proj", "{}_proj", "o_proj", "o_norm") if separate else ("in_proj_z", "in_proj_{}", "out_proj", None)
        )
        self.project = Linear(hidden, shards | {last: values}, False, dtype, device)
        gates = {gate.format(name): spec.heads for name in "ba"}
        self.gates = Linear(hidden, gates, False, dtype, device, exact=True)
        parts = {f"{name}_conv1d": width for name, width in separate.items()}
        self.conv1d = CausalConv(self.mixed, spec.taps, False, dtype, device, parts)
        self.A_log = StoredTensor((spec.heads,), torch.float32, device)
        self.dt_bias = StoredTensor((spec.heads,), torch.float32, device)
        self.norm = Norm(spec.value_dim, 1e-5 if separate else eps, False, dtype, device, stored=norm)
        self.out = Linear(values, {out: hidden}, False, dtype, device)
        self.cache_spec = CacheSpec("state", 1, self.conv1d.state_size + spec.heads * spec.key_dim * spec.value_dim, dtype)

    def converters(self, path: str) -> Iterator[tuple[str, Converter]]:
        """Yield converters for Qwen3-Next, which stores q, k, v and z of a key head as adjacent rows, and also b and a."""
        s, groups = self.spec, self.spec.key_heads
        if s.separate:
            return
        values = s.heads // groups * s.value_dim

        def split(name: str, sizes: list[int], targets: list[tuple[str, list[int]]]) -> tuple[str, Converter]:
            def convert(stored: Tensor) -> Iterable[tuple[str, Tensor]]:
                parts = stored.view(groups, sum(sizes), -1).split(sizes, 1)
                for target, chosen in targets:
                    yield f"{path}.{target}.weight", torch.cat([parts[i].flatten(0, 1) for i in chosen])

            return f"{path}.{name}.weight", convert

        key, each = s.key_dim, s.heads // groups
        yield split("in_proj_qkvz", [key, key, values, values], [("in_proj_qkv", [0, 1, 2]), ("in_proj_z", [3])])
        yield split("in_proj_ba", [each, each], [("in_proj_b", [0]), ("in_proj_a", [1])])

    def forward(self, x: Tensor, cos_sin: None, cache: Tensor, attn: AttentionMetadata) -> Tensor:
        s, rows, conv_size = self.spec, len(x), self.conv1d.state_size
        mixed, z = self.project(x).split((self.mixed, s.heads * s.value_dim), 1)
        mixed = activation(s.act, self.conv1d(mixed, cache[:, :conv_size], attn)).float()
        keys = s.key_heads * s.key_dim
        q, k, v = mixed.split((keys, keys, s.heads * s.value_dim), 1)
        q, k = (unit_length(part.view(rows, s.key_heads, s.key_dim)) for part in (q, k))
        b, a = self.gates(x).chunk(2, 1)
        decay = activation("softplus", a.float() + self.dt_bias.weight).mul_(-self.A_log.weight.exp()).exp_()
        beta, values = activation("sigmoid", b).float() * s.most_beta, v.view(rows, s.heads, s.value_dim)
        out = linear_recurrence(q.mul_(s.key_dim**-0.5), k, values, decay, beta, cache[:, conv_size:], attn).to(x.dtype)
        out = rms_norm(out.view(-1, s.value_dim), self.norm.weight, self.norm.eps).view(rows, -1)
        return self.out((out * activation("silu", z.float().contiguous())).to(x.dtype))


class DecayRates(StoredTensor):
    """`A_log` of Mamba 1, `[channels, state]`. After `pack`, `weight` holds the rates of a StepDecay."""

    def __init__(self, channels: int, state: int, device: torch.device) -> None:
        super().__init__((channels, state), torch.float32, device)

    def pack(self) -> None:
        channels, state = self.weight.shape
        heads = channels // _head_width(channels)
        self.weight = self.weight.exp().neg_().view(heads, -1, state).transpose(1, 2).contiguous()


def _head_width(channels: int) -> int:
    """Return the number of channels that the recurrence of Mamba 1 computes together."""
    return math.gcd(channels, 64)


class Mamba1(TensorModule):
    """A selective state-space layer, in which each number of a channel's state decays at its own rate (arXiv 2312.00752).

    All channels share B and C, the key and the query of `linear_recurrence`. Its heads are groups of adjacent channels.
    """

    def __init__(self, hidden: int, spec: SelectiveSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, width = spec, spec.width
        self.project = Linear(hidden, {"in_proj": 2 * width}, spec.bias, dtype, device)
        self.conv1d = CausalConv(width, spec.taps, spec.conv_bias, dtype, device)
        self.select = Linear(width, {"x_proj": sum(spec.sizes)}, False, dtype, device, exact=True)
        self.step = Linear(spec.rank, {"dt_proj": width}, True, dtype, device, exact=True)
        self.A_log = DecayRates(width, spec.state, device)
        self.D = StoredTensor((width,), torch.float32, device)
        self.out = Linear(width, {"out_proj": hidden}, spec.bias, dtype, device)
        self.norms = []
        if spec.norm_eps is not None:
            self.norms = [Norm(size, spec.norm_eps, False, dtype, device, learned=False) for size in spec.sizes]
        self.cache_spec = CacheSpec("state", 1, self.conv1d.state_size + width * spec.state, dtype)

    def forward(self, x: Tensor, cos_sin: None, cache: Tensor, attn: AttentionMetadata) -> Tensor:
        s, rows, conv_size = self.spec, len(x), self.conv1d.state_size
        mixed, gate = self.project(x).chunk(2, 1)
        mixed = activation(s.act, self.conv1d(mixed, cache[:, :conv_size], attn))
        parts = self.select(mixed).split(s.sizes, 1)
        for norm, part in zip(self.norms, parts, strict=False):
            norm.heads_(part[:, None])
        step, keys, queries = parts
        step = activation("softplus", self.step(step.contiguous()).float())
        q, k = (part.float()[:, None] for part in (queries, keys))
        values, step = (part.view(rows, -1, _head_width(s.width)) for part in (mixed.float(), step))
        decay = StepDecay(step, self.A_log.weight)
        out = linear_recurrence(q, k, values * step, decay, None, cache[:, conv_size:], attn).view(rows, -1)
        out += values.view(rows, -1) * self.D.weight
        out *= activation("silu", gate.float().contiguous())
        return self.out(out.to(x.dtype))


class Mamba2(TensorModule):
    """A state-space layer whose decay is a scalar per head (arXiv 2405.21060), as in Granite 4, Falcon-H1 and Nemotron-H.

    Each group of heads shares B and C, which are the keys and queries of `linear_recurrence`.
    """

    def __init__(self, hidden: int, spec: MambaSpec, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.values = spec, spec.heads * spec.head_dim
        self.mixed = self.values + 2 * spec.groups * spec.state  # channels of the convolution: x, B, C
        self.project = Linear(hidden, {"in_proj": self.values + self.mixed + spec.heads}, spec.bias, dtype, device)
        self.conv1d = CausalConv(self.mixed, spec.taps, spec.conv_bias, dtype, device)
        self.A_log, self.D, self.dt_bias = (StoredTensor((spec.heads,), torch.float32, device) for _ in range(3))
        self.norm = Norm(self.values, eps, False, dtype, device) if spec.norm else None
        self.out = Linear(self.values, {"out_proj": hidden}, spec.out_bias, dtype, device)
        self.cache_spec = CacheSpec("state", 1, self.conv1d.state_size + self.values * spec.state, dtype)
        widths = (self.values, self.values, spec.groups * spec.state, spec.groups * spec.state, spec.heads)
        factors = [number for factor, width in zip(spec.multipliers, widths, strict=False) for number in [factor] * width]
        self.multipliers = torch.tensor(factors, dtype=dtype, device=device) if factors else None

    def forward(self, x: Tensor, cos_sin: None, cache: Tensor, attn: AttentionMetadata) -> Tensor:
        s, rows, conv_size = self.spec, len(x), self.conv1d.state_size
        projected = self.project(x if s.in_scale == 1.0 else x * s.in_scale)
        if self.multipliers is not None:
            projected.mul_(self.multipliers)
        gate, mixed, step = projected.split((self.values, self.mixed, s.heads), 1)
        mixed = activation(s.act, self.conv1d(mixed, cache[:, :conv_size], attn)).float()
        values, keys, queries = mixed.split((self.values, s.groups * s.state, s.groups * s.state), 1)
        step = activation("softplus", step.float() + self.dt_bias.weight).clamp(*s.step_limits)
        decay = (-self.A_log.weight.exp() * step).exp_()
        values = values.reshape(rows, s.heads, s.head_dim)
        q, k = (part.reshape(rows, s.groups, s.state) for part in (queries, keys))
        out = linear_recurrence(q, k, values * step[:, :, None], decay, None, cache[:, conv_size:], attn)
        out += values.mul_(self.D.weight[:, None])
        out, gate = out.view(rows, -1), activation("silu", gate.float().contiguous())
        if s.norm != "before":
            out *= gate
        if self.norm is not None:
            grouped = out.view(rows, s.groups, -1)
            grouped *= torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + self.norm.eps)  # normed per group
        out = out.to(x.dtype)
        if self.norm is not None:
            out *= self.norm.weight
        out = self.out(out * gate.to(x.dtype) if s.norm == "before" else out)
        return out if s.out_scale == 1.0 else out.mul_(s.out_scale)


class LightningAttention(TensorModule, Convertible):
    """Linear attention whose states decay by a constant per head (arXiv 2501.08313), as in MiniMax-Text-01."""

    def __init__(self, hidden: int, spec: LightningSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.width = spec, spec.heads * spec.head_dim
        self.project = Linear(hidden, {"qkv_proj": 3 * self.width, "output_gate": self.width}, False, dtype, device)
        self.norm = Norm(self.width, 1e-6, False, dtype, device)
        self.out = Linear(self.width, {"out_proj": hidden}, False, dtype, device)
        self.decay = torch.tensor(spec.slopes, dtype=torch.float32, device=device).neg_().exp_()
        self.cache_spec = CacheSpec("state", 1, self.width * spec.head_dim, dtype)

    def converters(self, path: str) -> Iterator[tuple[str, Converter]]:
        """Yield converters that drop constants, which some checkpoints store."""
        for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"):
            yield f"{path}.{name}", lambda _: ()

    def forward(self, x: Tensor, cos_sin: None, cache: Tensor, attn: AttentionMetadata) -> Tensor:
        qkv, gate = self.project(x).split((3 * self.width, self.width), 1)
        qkv = activation(self.spec.act, qkv.contiguous()).float().view(len(x), self.spec.heads, 3, -1)
        q, k, v = qkv.unbind(2)
        out = linear_recurrence(q, k, v, self.decay.expand(len(x), -1), None, cache, attn)
        del qkv, q, k, v  # the gate's activation takes float64 in their place
        out = self.norm(out.view(len(x), -1).to(x.dtype))
        return self.out(out.mul_(activation("sigmoid", gate)))


def unit_length(x: Tensor) -> Tensor:
    """Divide by the length of the last axis."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def recurrent_bytes(width: int, spec: ConvSpec | DeltaSpec | MambaSpec | SelectiveSpec | LightningSpec, ops: OpBytes) -> int:
    """Return the bytes per row alive in a layer of this file, without its input."""
    s, rows, small = ops.dtype.itemsize, ops.limits.rows, -(-SMALL // ops.limits.rows)
    if isinstance(spec, ConvSpec):
        # the convolution: its result, in torch the rows, two sums and a product in float32; its input is dropped after it
        conv = width * (s if ops.fused("causal_conv") else 4 * FLOAT32)
        return small + ops.linear_result(3 * width, rows) + width * s + max(conv, ops.linear(width, width, rows))
    if isinstance(spec, LightningSpec):
        inner = spec.heads * spec.head_dim  # q, k and v are copied head by head
        return small + ops.linear_result(4 * inner, rows) + (7 * inner + 2 * spec.heads) * FLOAT32
    if isinstance(spec, SelectiveSpec):
        return small + _selective_bytes(width, spec, ops)
    if isinstance(spec, DeltaSpec):
        keys, values, each = spec.key_heads * spec.key_dim, spec.heads * spec.value_dim, spec.key_dim
        during, after = 2 * keys + 2 * values + 6 * spec.heads, 2 * keys + 3 * values
    else:
        keys, values, each = spec.groups * spec.state, spec.heads * spec.head_dim, spec.state
        during, after = 2 * keys + 2 * values + 4 * spec.heads, 3 * values
    mixed = 2 * keys + values
    if not ops.fused("linear_recurrence"):
        during += 2 * mixed + 2 * spec.heads * each
    base = ops.linear_result(mixed + values + spec.heads, rows) + (getattr(spec, "in_scale", 1.0) != 1.0) * width * s
    conv, result = mixed * (s + FLOAT32), (mixed + 2 * values) * FLOAT32 + ops.linear(values, width, rows)
    return small + base + max(conv, (mixed + max(during, after)) * FLOAT32, result)


def _selective_bytes(width: int, spec: SelectiveSpec, ops: OpBytes) -> int:
    s, rows, inner = ops.dtype.itemsize, ops.limits.rows, spec.width
    # alive all the time: both projections and the convolved channels, in float32 too
    base = ops.linear_result(2 * inner, rows) + ops.linear_result(sum(spec.sizes), rows) + inner * (s + ops.float32_copy)
    recurrence = (3 * inner + 2 * spec.state) * FLOAT32  # steps, values times steps, result, and B and C
    if ops.limits.device.type == "cpu" or not ops.fused("linear_recurrence"):  # in torch: a state, its decays and a product
        recurrence += -(-3 * inner * spec.state * FLOAT32 // rows)
    gated = 4 * inner * FLOAT32  # steps, result, and the gate before and after its activation
    last = 2 * inner * FLOAT32 + (ops.float32_copy > 0) * inner * s + ops.linear(inner, width, rows)
    return base + max(recurrence, gated, last)
