"""Where a decoder layer can multiply the inputs of its linear layers by scales without a change of its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...kernels.activation.reference import clamps_up
from ..layers.basic import Norm
from ..layers.linear import Linear
from ..layers.mlp import GatedMlp, PlainMlp
from .altup import AltUpLayer
from .attention import DecoderAttention
from .decoder import DecoderLayer


@dataclass(frozen=True, eq=False)
class ScalingGroup:
    """Linear layers with one input, and the layer that makes it.

    Args:
        linears: their columns are multiplied by the scales.
        source: its outputs are divided by the scales: a norm, or a Linear whose outputs from `start` on reach the input
            unmixed.
        heads: query heads, key-value heads and width of a head, if attention repeats the source's heads in the input.
    """

    linears: tuple[Linear, ...]
    source: Norm | Linear
    start: int = 0
    heads: tuple[int, int, int] | None = None

    def shared(self, values: Tensor) -> Tensor:
        """Average `[inputs]` over the inputs that come from the same output of the source."""
        if self.heads is None:
            return values
        heads, kv_heads, dim = self.heads
        return values.view(kv_heads, heads // kv_heads, dim).mean(1).flatten()

    def spread(self, scales: Tensor) -> Tensor:
        """Repeat the scales of the source's outputs `[outputs]` for all inputs."""
        if self.heads is None:
            return scales
        heads, kv_heads, dim = self.heads
        return scales.view(kv_heads, 1, dim).expand(-1, heads // kv_heads, -1).flatten()


def scaling_groups(layer: DecoderLayer) -> list[ScalingGroup]:
    """Return the groups of a layer: q, k and v; the attention's output; gate and up; down.

    Experts have none, and neither has the output of attention whose values are normed.
    """
    attention, mlp, groups = next(iter(layer.mixers), None), next(iter(layer.mlps), None), list[ScalingGroup]()
    alone = len(layer.mixers) == 1  # else the norm also makes the input of the second mixer
    first: tuple[Linear, ...] = (attention.qkv,) if alone and isinstance(attention, DecoderAttention) else ()
    first += layer.laurel_in if isinstance(layer, AltUpLayer) else ()
    second: tuple[Linear, ...] = (mlp.gate_up,) if isinstance(mlp, GatedMlp) else (mlp.up,) if isinstance(mlp, PlainMlp) else ()
    inputs: list[tuple[nn.Module, tuple[Linear, ...]]] = [(layer.before_attention, first), (layer.before_mlp, second)]
    if layer.parallel:  # one norm makes both inputs
        inputs = [(layer.before_attention, (*first, *second) if first and second else ())]
    groups += [ScalingGroup(linears, norm) for norm, linears in inputs if linears and isinstance(norm, Norm)]
    if isinstance(attention, DecoderAttention) and attention.value_norm is None:
        heads, kv_heads, dim = attention.qkv_heads[0], attention.qkv_heads[1], attention.dim
        groups.append(ScalingGroup((attention.out,), attention.qkv, (heads + kv_heads) * dim, (heads, kv_heads, dim)))
    if isinstance(mlp, GatedMlp) and not clamps_up(mlp.act):
        groups.append(ScalingGroup((mlp.down,), mlp.gate_up, mlp.gate_up.outputs // 2))
    return groups


def decoder_layers(root: nn.Module) -> list[DecoderLayer]:
    return [module for module in root.modules() if isinstance(module, DecoderLayer)]


@dataclass(frozen=True)
class Folding:
    """The change of one stored tensor: `(tensor + offset) * columns / rows - offset`; the factors belong to its two axes."""

    columns: Tensor | None = None
    rows: Tensor | None = None
    offset: float = 0.0

    def __call__(self, tensor: Tensor) -> Tensor:
        wide = tensor.float() + self.offset
        if self.columns is not None:
            wide = wide * self.columns
        if self.rows is not None:
            wide = wide / (self.rows if wide.ndim == 1 else self.rows[:, None])
        return (wide - self.offset).to(tensor.dtype)


def foldings(root: nn.Module, scaled: Sequence[tuple[ScalingGroup, Tensor]]) -> dict[str, Folding]:
    """Return canonical tensor name -> its change, for groups of the model `root` and the scales of their inputs `[inputs]`."""
    paths = {module: path for path, module in root.named_modules()}
    columns, rows = dict[nn.Module, Tensor](), dict[nn.Module, Tensor]()
    for group, scales in scaled:
        columns.update(dict.fromkeys(group.linears, scales))
        if isinstance(group.source, Linear):
            made = group.shared(scales)
            divisors = rows.setdefault(group.source, torch.ones(group.source.outputs))
            divisors[group.start : group.start + len(made)] = made
        else:
            rows[group.source] = scales
    by_name = {}
    for layer in {**columns, **rows}:
        assert isinstance(layer, Linear | Norm)
        start, offset = 0, layer.offset if isinstance(layer, Norm) else 0.0
        for name, tensor in layer.tensors(paths[layer]):
            is_matrix, part = tensor.ndim == 2, None
            if layer in rows:
                first = start if isinstance(layer, Linear) else 0
                part = rows[layer][first : first + len(tensor)]
            by_name[name] = Folding(columns.get(layer) if is_matrix else None, part, 0.0 if name.endswith(".bias") else offset)
            has_bias = layer.bias is not None
            start += len(tensor) if not (is_matrix and has_bias) else 0  # a shard's bias follows its weight
    return by_name
