"""Linear layers with 4-bit weights and one scale per group of inputs, and quantisation to this format.

Activations stay in floating point, or are quantised to int8 with one scale per row, see int8.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from . import native
from .dispatch import backend
from .grouped import GroupedWeight, QuantizedWeight, ShardedWeight, panel_rows
from .panels import allocate, pad_outputs

MAX_CODE = 15
SYMMETRIC_ZERO = 8  # zero point of all groups in symmetric quantisation
STEP = 8  # inputs that the C++ kernels unpack at a time
_SCALE_TYPES = [torch.float32, torch.bfloat16, torch.float16]  # as ScaleType in cpu/linear_int4_body.h


_KERNELS = {"avx512": "avx2", "neon_bf16": "neon_dot", "neon_i8mm": "neon_dot"}
"""Instruction set (`native.products`) without a kernel of its own -> the one whose kernel it runs."""


def _kernel() -> str:
    """Return the instruction set of the C++ kernel on this CPU."""
    name = native.products() or "avx2"
    return _KERNELS.get(name, name)


def _panel_width() -> int:
    """Return the number of outputs of a panel."""
    return 64 if _kernel().startswith(("avx512", "amx")) else 16


@dataclass(frozen=True)
class Int4Options:
    """Options of 4-bit quantisation.

    Args:
        group_size: number of adjacent inputs that share a scale.
        symmetric: values are -8 to 7 times the scale; otherwise each group has a zero point.
        int8_rows: quantise activations to int8.
    """

    group_size: int = 128
    symmetric: bool = True
    int8_rows: bool = False


@dataclass(frozen=True, eq=False)
class Int4Panels:
    """A weight packed for the C++ kernels. All tensors are padded like the outputs.

    Args:
        codes: uint8 `[panels, steps, _panel_width(), 4]`. Byte j of an output has input j of the step in its low bits and input
            4 + j in its high bits.
        scale: `[panels, groups, _panel_width()]`. zero: uint8, same shape; None: every zero point is 8.
        bias: float32.
        order: int32 `[inputs]`, the input that each column multiplies; None: inputs are in order.
        outputs: number of outputs without padding.
        group_steps: steps per group; the last group may have fewer.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bias: Tensor
    order: Tensor | None
    outputs: int
    inputs: int
    group_steps: int


@dataclass(frozen=True, eq=False)
class Int4PanelWeight:
    """Packed weights of a Linear, whose outputs are concatenated. `int8_rows`: quantise activations to int8."""

    panels: Sequence[Int4Panels]
    int8_rows: bool = False

    @property
    def nbytes(self) -> int:
        tensors = ((one.codes, one.scale, one.zero, one.bias, one.order) for one in self.panels)
        return sum(tensor.nbytes for several in tensors for tensor in several if tensor is not None)


def quantize_int4(weight: Tensor, options: Int4Options) -> GroupedWeight:
    """Quantise `weight [out, in]` by rounding to nearest. Scales have the weight's dtype."""
    parts = [_quantize(part, options.group_size, options.symmetric) for part in weight.split(panel_rows(weight.shape[1]))]
    codes, scale, zero = (torch.cat(part) for part in zip(*parts, strict=True))
    inputs = weight.shape[1]
    if options.symmetric:
        return GroupedWeight(codes, scale, options.group_size, inputs, packed=True, offset=SYMMETRIC_ZERO)
    return GroupedWeight(codes, scale, options.group_size, inputs, packed=True, zero=zero)


def _quantize(weight: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return two codes per byte, the scales and the zero points of all groups."""
    inputs = weight.shape[1]
    groups = F.pad(weight.float(), (0, -inputs % group)).unflatten(1, (-1, group))
    low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
    span = torch.maximum(-low, high).mul_(2) if symmetric else high - low
    scale = (span / MAX_CODE).to(weight.dtype)
    step = torch.where(scale > 0, scale, 1).float()
    zero = torch.full_like(step, SYMMETRIC_ZERO) if symmetric else (-low / step).round_().clamp_(0, MAX_CODE)
    codes = groups.div_(step[..., None]).add_(zero[..., None]).round_().clamp_(0, MAX_CODE).to(torch.uint8).flatten(1)
    codes = F.pad(codes, (0, inputs % 2))[:, : inputs + inputs % 2]
    return codes[:, ::2] | codes[:, 1::2] << 4, scale, zero.to(torch.uint8)


def pack_int4(
    shards: Sequence[QuantizedWeight], bias: Tensor | None, dtype: torch.dtype, int8_rows: bool = False
) -> Int4PanelWeight | ShardedWeight:
    """Pack the weights of a Linear's shards for their device. `dtype`: of activations.

    If the C++ kernels do not support them, they are not packed.
    """
    device = shards[0].codes.device
    if backend("int4_linear", device, dtype) != "native" or not all(map(has_panels, shards)):
        return ShardedWeight(shards, bias, int8_rows)
    joined = _join([shard for shard in shards if isinstance(shard, GroupedWeight)])
    biases = [None] * len(joined) if bias is None else bias.split([len(shard.codes) for shard in joined])
    return Int4PanelWeight([_to_panels(shard, part) for shard, part in zip(joined, biases, strict=True)], int8_rows)


def has_panels(weight: QuantizedWeight) -> bool:
    """Return whether the C++ kernels support a weight: 4-bit integers in groups of a multiple of 8 inputs."""
    if not isinstance(weight, GroupedWeight) or not weight.packed or weight.scale.dtype not in _SCALE_TYPES:
        return False
    if weight.table is not None or weight.factor is not None or weight.shift is not None:
        return False
    index = weight.group_index
    if index is not None and not index.is_meta and not torch.equal(index.sort().values.long(), _plain_index(weight)):
        return False  # groups of different sizes
    sizes = weight.group % STEP == 0 or weight.group >= weight.inputs
    return sizes and (weight.offset == SYMMETRIC_ZERO if weight.zero is None else weight.offset == 0)


def _plain_index(weight: GroupedWeight) -> Tensor:
    return torch.arange(weight.inputs) // weight.group


def _join(shards: Sequence[GroupedWeight]) -> list[GroupedWeight]:
    """Concatenate the outputs of adjacent shards with the same groups. Shards with reordered inputs stay separate."""
    found: list[GroupedWeight] = []
    for shard in map(_by_output, shards):
        last = found[-1] if found else None
        if last is None or _grouping(last) != _grouping(shard) or shard.group_index is not None:
            found.append(shard)
            continue
        zero = None if last.zero is None or shard.zero is None else torch.cat([last.zero, shard.zero])
        codes, scale = (torch.cat(pair) for pair in ((last.codes, shard.codes), (last.scale, shard.scale)))
        found[-1] = replace(last, codes=codes, scale=scale, zero=zero)
    return found


def _grouping(weight: GroupedWeight) -> tuple[object, ...]:
    return weight.group, weight.scale.dtype, weight.zero is None, weight.group_index is None


def _by_output(weight: GroupedWeight) -> GroupedWeight:
    """Return the weight with one row of scales for each output."""
    if weight.block_rows == 1:
        return weight
    each, outputs = weight.block_rows, len(weight.codes)
    scale, zero = (None if grid is None else grid.repeat_interleave(each, 0)[:outputs] for grid in (weight.scale, weight.zero))
    assert scale is not None
    return replace(weight, scale=scale, zero=zero, block_rows=1)


def _to_panels(weight: GroupedWeight, bias: Tensor | None) -> Int4Panels:
    outputs, inputs, wide = len(weight.codes), weight.inputs, _panel_width()
    codes, order = torch.stack((weight.codes & 15, weight.codes >> 4), -1).flatten(1)[:, :inputs], None
    if weight.group_index is not None:
        places = weight.group_index.argsort(stable=True)
        codes, order = codes[:, places], places.int()
    steps = F.pad(codes, (0, -inputs % STEP, 0, -outputs % wide)).view(-1, wide, -(-inputs // STEP), 2, STEP // 2)
    panels = steps[..., 0, :].bitwise_or_(steps[..., 1, :] << 4).transpose(1, 2)
    return Int4Panels(
        allocate(panels.shape, torch.uint8).copy_(panels),
        _grid_panels(weight.scale),
        None if weight.zero is None else _grid_panels(weight.zero.to(torch.uint8)),
        pad_outputs(torch.zeros(outputs) if bias is None else bias.float(), wide),
        order,
        outputs,
        inputs,
        min(-(-weight.group // STEP), panels.shape[1]),
    )


def _grid_panels(grid: Tensor) -> Tensor:
    """Reorder `[out, groups]` to `[panels, groups, _panel_width()]`."""
    padded = F.pad(grid, (0, 0, 0, -len(grid) % _panel_width()))
    return padded.view(-1, _panel_width(), grid.shape[1]).transpose(1, 2).contiguous()


def int4_linear(x: Tensor, weights: Int4PanelWeight) -> Tensor:
    """Compute `x [rows, in]` -> `[rows, out]` in x's dtype, as `grouped.grouped_linear` does up to the order of sums."""
    outputs = sum(panels.outputs for panels in weights.panels)
    out, start, x = x.new_empty(len(x), outputs), 0, x.contiguous()
    for w in weights.panels:
        steps, groups = w.codes.shape[1], w.scale.shape[1]
        scratch = torch.empty(len(x), row_bytes(w.inputs, groups, x.dtype, weights.int8_rows), dtype=torch.uint8)
        packed = (w.order, w.codes, w.scale, _SCALE_TYPES.index(w.scale.dtype), w.zero, w.bias, steps, w.group_steps, w.outputs)
        rest = (outputs, int(weights.int8_rows), scratch, out[:, start:])
        native.call(f"int4_linear_{_kernel()}", x.dtype, x, len(x), w.inputs, *packed, *rest)
        start += w.outputs
    return out


def row_bytes(inputs: int, groups: int, dtype: torch.dtype, int8_rows: bool) -> int:
    """Return the scratch bytes of a converted row: its values, the sum of each group and a scale."""
    wide = dtype == torch.float32 or _kernel() not in ("avx512_bf16", "amx")
    return -(-inputs // STEP) * STEP * (1 if int8_rows else 4 if wide else 2) + 4 * groups + 4


def packed_bytes(shards: Sequence[QuantizedWeight], dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes of a Linear's shards after `pack_int4`. They may be on the meta device."""
    if backend("int4_linear", device, dtype) != "native" or not all(map(has_panels, shards)):
        return sum(shard.nbytes for shard in shards)
    joined = _join([shard for shard in shards if isinstance(shard, GroupedWeight)])
    ordered = sum(4 * shard.inputs for shard in joined if shard.group_index is not None)
    return ordered + sum(
        _panel_bytes(len(one.codes), one.inputs, one.scale.shape[1] * (one.scale.itemsize + (one.zero is not None)))
        for one in joined
    )


def _panel_bytes(outputs: int, inputs: int, grid: int) -> int:
    """Return the bytes of a packed weight with padding. `grid`: bytes of scales and zero points per output."""
    return -(-outputs // _panel_width()) * _panel_width() * (-(-inputs // STEP) * STEP // 2 + grid + 4)


def int4_bytes(inner: int, outer: int, dtype: torch.dtype, device: torch.device, options: Int4Options) -> int:
    """Return the bytes of a weight `[outer, inner]` in `dtype` after `quantize_int4` and `pack_int4`."""
    groups = -(-inner // options.group_size)
    grid = groups * (dtype.itemsize + (not options.symmetric))
    if backend("int4_linear", device, dtype) != "native":
        return outer * (-(-inner // 2) + grid)
    return _panel_bytes(outer, inner, grid)
