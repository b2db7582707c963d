"""The conformer: halves of two MLPs around attention within blocks and a convolution over time. Knows no family.

Sources: arXiv 2005.08100 (the order of parts), arXiv 1803.02155 (distances in the scores); half-way, what the rows say as
characters is added to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels.activation import activation
from ...mm.errors import ConfigError
from ..config import count
from ..layers.tree import Maker

_EPS = 1e-5


@dataclass(frozen=True)
class ConformerSpec:
    """`inner`: of the MLPs; `wide`: of the convolution, of `taps` rows; `block`: rows that see one another, of distances up to
    `reach`; `said`: characters.
    """

    inputs: int
    width: int
    inner: int
    heads: int
    head_dim: int
    layers: int
    wide: int
    taps: int
    block: int
    reach: int
    said: int


def conformer_spec(audio: Mapping[str, Any]) -> ConformerSpec:
    """From the raw `encoder_config`; ConfigError for a missing key, or blocks that reach too far."""
    width, heads = count(audio, "hidden_dim"), count(audio, "num_heads")
    block, reach = count(audio, "context_size"), count(audio, "max_pos_emb")
    if block > reach:
        raise ConfigError(f"context_size {block} of encoder_config is above max_pos_emb {reach}")
    return ConformerSpec(
        inputs=count(audio, "input_dim"),
        width=width,
        inner=width * count(audio, "feedforward_mult"),
        heads=heads,
        head_dim=audio.get("dim_head") or width // heads,
        layers=count(audio, "num_layers"),
        wide=width * count(audio, "conv_expansion_factor"),
        taps=count(audio, "conv_kernel_size"),
        block=block,
        reach=reach,
        said=count(audio, "output_dim"),
    )


class Mlp:
    """`[rows, width]` -> what half of is added."""

    def __init__(self, s: ConformerSpec, make: Maker) -> None:
        self.norm = make.norm("pre_norm", s.width, _EPS, True)
        self.up = make.linear(["up_proj"], s.width, [s.inner], True)
        self.down = make.linear(["down_proj"], s.inner, [s.width], True)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(activation("silu", self.up(self.norm(x))))  # type: ignore[no-any-return]


class Attention:
    """Within each block; a score has a part that depends on the distance."""

    def __init__(self, s: ConformerSpec, make: Maker) -> None:
        self.spec, inner = s, s.heads * s.head_dim
        self.norm = make.norm("pre_norm", s.width, _EPS, True)
        self.qkv = make.linear(["to_q", "to_kv"], s.width, [inner, 2 * inner], False)
        self.out = make.linear(["to_out"], inner, [s.width], True)
        self.distances = make.stored("rel_pos_emb.weight", 2 * s.reach + 1, s.head_dim)

    def __call__(self, x: Tensor, blocks: Sequence[int]) -> Tensor:
        s, qkv = self.spec, self.qkv(self.norm(x))
        places = torch.arange(min(s.block, len(x)), device=x.device)
        far = self.distances.weight[places[:, None] - places + s.reach]  # [rows, keys, head_dim]
        out = qkv.new_empty(len(x), s.heads * s.head_dim)
        for rows, made in zip(qkv.split(list(blocks)), out.split(list(blocks)), strict=True):
            made.copy_(self._block(rows, far))
        return self.out(out)  # type: ignore[no-any-return]

    def _block(self, rows: Tensor, far: Tensor) -> Tensor:
        s, n = self.spec, len(rows)
        q, k, v = rows.view(n, 3, s.heads, s.head_dim).unbind(1)
        near = torch.bmm(q, far[:n, :n].transpose(1, 2)).transpose(0, 1) * s.head_dim**-0.5  # [heads, rows, keys]
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, near[None])[0].transpose(0, 1).flatten(1)


class Convolution:
    """Each channel over time, zeros around each item, between two layers over channels."""

    def __init__(self, s: ConformerSpec, make: Maker) -> None:
        self.norm = make.norm("norm", s.width, _EPS, True)
        self.up = make.linear(["up_conv"], s.width, [2 * s.wide], True)
        self.taps = make.stored("depth_conv.conv.weight", s.wide, 1, s.taps)
        self.around = (s.taps // 2, s.taps // 2 - (s.taps + 1) % 2)
        names = ("running_mean", "running_var", "weight", "bias")
        self.scales = [make.stored(f"batch_norm.{name}", s.wide) for name in names]
        self.down = make.linear(["down_conv"], s.wide, [s.width], True)

    def __call__(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        x, gate = self.up(self.norm(x)).chunk(2, -1)
        for one in gate.split(lengths):  # item by item: its bits depend on where the threads share a tensor
            one.sigmoid_()
        x = x * gate
        del gate
        done = torch.zeros_like(x)  # torch's own convolution copies rows once for each tap
        for one, made in zip(x.split(lengths), done.split(lengths), strict=True):
            padded = F.pad(one, (0, 0, *self.around))
            for tap, weight in enumerate(self.taps.weight[:, 0].T):
                made.addcmul_(padded[tap : tap + len(one)], weight)
        mean, variance, weight, bias = (scale.weight for scale in self.scales)
        del x
        done.sub_(mean).mul_((variance + _EPS).rsqrt() * weight).add_(bias)
        return self.down(activation("silu", done))  # type: ignore[no-any-return]


class Layer:
    def __init__(self, s: ConformerSpec, make: Maker) -> None:
        self.first, self.last = Mlp(s, make.below("ff1")), Mlp(s, make.below("ff2"))
        self.attention, self.convolution = Attention(s, make.below("attn")), Convolution(s, make.below("conv"))
        self.norm = make.norm("post_norm", s.width, _EPS, True)

    def __call__(self, x: Tensor, lengths: Sequence[int], blocks: Sequence[int]) -> Tensor:
        x = x.add(self.first(x), alpha=0.5)
        x = x + self.attention(x, blocks)
        x = x + self.convolution(x, lengths)
        return self.norm(x.add(self.last(x), alpha=0.5))  # type: ignore[no-any-return]


class Conformer(nn.Module):
    """Rows of bands `[rows, inputs]` of items, end to end -> `[rows, width]`."""

    def __init__(self, spec: ConformerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, make = spec, Maker(self, dtype, device)
        self.first = (make.linear(["input_linear"], spec.inputs, [spec.width], True),)
        self.steps = [Layer(spec, make.below(f"layers.{i}")) for i in range(spec.layers)]
        out, back = make.linear(["out"], spec.width, [spec.said], True), make.linear(["out_mid"], spec.said, [spec.width], True)
        self.said = (out, back)

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of stored tensors that count training steps."""
        return tuple(f"layers.{i}.conv.batch_norm.num_batches_tracked" for i in range(self.spec.layers))

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        s, (first,), (out, back) = self.spec, self.first, self.said
        blocks = [size for n in lengths for size in ([s.block] * (n // s.block) + [n % s.block] * (n % s.block > 0))]
        x = first(x)
        for number, step in enumerate(self.steps, start=1):
            x = step(x, list(lengths), blocks)
            if number == s.layers // 2:
                x = x + back(out(x).softmax(-1))
        return x
