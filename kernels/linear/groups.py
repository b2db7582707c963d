"""Linear layers whose weights are codes with a scale for each group of inputs, in the layout of the C++ kernels.

Integers of 4 and 8 bits, tables of 16 values (NF4, FP4), e4m3 and the block formats of GGML keep their codes and scales: a
product multiplies the codes with the inputs of a group, and then scales the sum. Codes of 5 and 6 bits are kept in 8 bits,
those of 2 and 3 bits in 4. Activations stay in floating point, or are quantised to int8 with one scale per row, see int8.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import bodies, native
from ..dispatch import backend
from .blocks import BLOCKS, LEVELS, BlockWeight
from .grouped import GroupedWeight, QuantizedWeight, ShardedWeight
from .panels import allocate, pad_outputs

STEP = 8  # inputs that the C++ kernels unpack at a time
INT4, TABLE, INTEGERS, INT8, UINT8, FLOAT8 = range(6)  # as CodeType in cpu/linear_groups_body.h
_BYTE_CODES = {torch.int8: INT8, torch.uint8: UINT8, torch.float8_e4m3fn: FLOAT8}
_PACKED = (INT4, TABLE, INTEGERS)
"""Codes of 4 bits."""
_BYTE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # inputs of a step of codes of 8 bits
_SCALE_TYPES = [torch.float32, torch.bfloat16, torch.float16]  # as ScaleType in cpu/linear_groups_body.h
_EXACT_SCALES = {torch.float8_e4m3fn: torch.float16, torch.float8_e8m0fnu: torch.bfloat16}
"""Type of scales of 8 bits -> a type of the C++ kernels that has all their values."""
TABLE_SIZE = 16
_NAN_BITS = 127  # magnitude of e4m3's only NaN

_KERNELS = {"avx512": "avx2", "neon_bf16": "neon_dot", "neon_i8mm": "neon_dot"}
"""Instruction set (`native.products`) without a kernel of its own -> the one whose kernel it runs."""


def kernel_of(name: str) -> str:
    """Return the instruction set whose C++ kernel runs on a CPU with the instruction set of this name."""
    return _KERNELS.get(name, name)


def _kernel() -> str:
    """Return the instruction set of the C++ kernel on this CPU."""
    return kernel_of(bodies.body("linear_int4") or "avx2")


def width_of(kernel: str) -> int:
    """Return the number of outputs of a kernel's panel."""
    return 64 if kernel.startswith(("avx512", "amx")) else 16


def panel_width() -> int:
    """Return the number of outputs of a panel."""
    return width_of(_kernel())


@dataclass(frozen=True, eq=False)
class GroupPanels:
    """A weight packed for the C++ kernels: `((v - zero) * scale + low) * factor`; v is the code or its entry in `table`.

    All tensors but `table` and `order` are padded like the outputs.

    Args:
        code_type: INT4, TABLE (of 16 values), INTEGERS (a table of integers of 8 bits), INT8, UINT8 or FLOAT8.
        codes: uint8 `[panels, steps, panel_width(), 4]`, two codes of 4 bits per byte: byte j of an output has input j of the
            step in its low bits and input 4 + j in its high bits. Or codes of 8 bits, `[panels, steps, 8, panel_width()]`.
        scale, low: `[panels, spans, panel_width()]`: of `span` groups. No `low`: nothing is added.
        fine_scale, fine_low: int8 `[panels, groups, panel_width()]`, factors of `scale` and `low`; None: 1.
        zero: uint8 `[panels, groups, panel_width()]`; None: every zero point is `offset`.
        table: float32 `[16]`.
        factor: float32, of an output; None: 1.
        bias: float32.
        order: int32 `[inputs]`, the input that each column multiplies; None: inputs are in order.
        outputs: number of outputs without padding.
        group_steps: steps per group; the last group may have fewer.
    """

    code_type: int
    codes: Tensor
    scale: Tensor
    fine_scale: Tensor | None
    low: Tensor | None
    fine_low: Tensor | None
    zero: Tensor | None
    table: Tensor | None
    factor: Tensor | None
    bias: Tensor
    order: Tensor | None
    outputs: int
    inputs: int
    group_steps: int
    span: int
    offset: int

    @property
    def nbytes(self) -> int:
        values = (getattr(self, field.name) for field in fields(self))
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


@dataclass(frozen=True, eq=False)
class GroupPanelWeight:
    """Packed weights of a Linear, whose outputs are concatenated. `int8_rows`: quantise activations to int8."""

    panels: Sequence[GroupPanels]
    int8_rows: bool = False

    @property
    def nbytes(self) -> int:
        return sum(panel.nbytes for panel in self.panels)


@dataclass(frozen=True, eq=False)
class _Codes:
    """A weight before it is packed, with the fields of GroupPanels. Each byte of `codes [out, in]` has one code.

    `scale`, `low`: `[out, spans]`. `fine_scale`, `fine_low`, `zero`: `[out, groups]`. `group`: inputs of a group.
    """

    code_type: int
    codes: Tensor
    group: int
    scale: Tensor
    fine_scale: Tensor | None = None
    low: Tensor | None = None
    fine_low: Tensor | None = None
    zero: Tensor | None = None
    table: Tensor | None = None
    factor: Tensor | None = None
    order: Tensor | None = None
    span: int = 1
    offset: int = 0

    def joins(self, other: _Codes) -> bool:
        """Return whether outputs of both can be in one GroupPanels."""
        return self.order is None and other.order is None and _same(self.table, other.table) and self._kind() == other._kind()

    def _kind(self) -> tuple[object, ...]:
        """Return what the weights of one GroupPanels share."""
        types = (None if value is None else value.dtype for value in self.by_output().values())
        return self.code_type, self.group, self.span, self.offset, self.codes.shape[1], *types

    def by_output(self) -> dict[str, Tensor | None]:
        names = ("codes", "scale", "fine_scale", "low", "fine_low", "zero", "factor")
        return {name: getattr(self, name) for name in names}


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.is_meta or b.is_meta:
        return (a is None) == (b is None)
    return torch.equal(a, b)


def pack_groups(
    shards: Sequence[QuantizedWeight], bias: Tensor | None, dtype: torch.dtype, int8_rows: bool = False
) -> GroupPanelWeight | ShardedWeight:
    """Pack the weights of a Linear's shards for their device. `dtype`: of activations.

    If the C++ kernels do not support them, they are not packed.
    """
    joined = _packable(shards, dtype, shards[0].codes.device)
    if joined is None:
        return ShardedWeight(shards, bias, int8_rows)
    biases = [None] * len(joined) if bias is None else bias.split([len(shard.codes) for shard in joined])
    return GroupPanelWeight([_to_panels(shard, part) for shard, part in zip(joined, biases, strict=True)], int8_rows)


def packed_bytes(shards: Sequence[QuantizedWeight], dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes of a Linear's shards after `pack_groups`. They may be on the meta device."""
    joined = _packable(shards, dtype, device)
    return sum(shard.nbytes for shard in shards) if joined is None else sum(map(_bytes, joined))


def _packable(shards: Sequence[QuantizedWeight], dtype: torch.dtype, device: torch.device) -> list[_Codes] | None:
    """Return the shards as the C++ kernels can multiply with them, adjacent ones joined. None: they cannot."""
    if backend("int4_linear", device, dtype) != "native":
        return None
    codes = [_parse_blocks(shard) if isinstance(shard, BlockWeight) else _parse_groups(shard) for shard in shards]
    parsed = [shard for shard in codes if shard is not None]
    return _join(parsed) if len(parsed) == len(codes) else None


def _parse_blocks(weight: BlockWeight) -> _Codes:
    """Return the codes and scales of GGML's blocks."""
    parts, outputs = weight.parse(), len(weight.codes)
    by_output: dict[str, Tensor | None] = {
        name: None if (value := getattr(parts, name)) is None else value.reshape(outputs, -1)
        for name in ("codes", "scale", "fine_scale", "low", "fine_low")
    }
    numbers, span = BLOCKS[weight.kind][0], 1 if parts.fine_scale is None else parts.fine_scale.shape[1]
    codes, scale = by_output.pop("codes"), by_output.pop("scale")
    assert codes is not None
    assert scale is not None
    code_type = INTEGERS if parts.levels else INT8 if codes.dtype == torch.int8 else INT4
    table = torch.tensor(LEVELS, dtype=torch.float32, device=codes.device) if parts.levels else None
    return _Codes(code_type, codes, numbers // span, scale, **by_output, table=table, span=span, offset=parts.offset)


def _parse_groups(weight: GroupedWeight) -> _Codes | None:
    """Return the codes of a weight in the terms of the C++ kernels, or None if they do not support it."""
    if weight.group % STEP and weight.group < weight.inputs:
        return None
    scale, zero, order = _scale(weight), weight.zero, None
    if scale is None or (zero is not None and (weight.offset or zero.is_floating_point() or weight.table is not None)):
        return None
    if weight.table is not None and (not weight.packed or weight.offset or len(weight.table) != TABLE_SIZE):
        return None
    if weight.shift is not None and (weight.factor is not None or weight.shift.dtype not in _SCALE_TYPES):
        return None
    if weight.group_index is not None:
        plain = torch.arange(weight.inputs) // weight.group
        if not weight.group_index.is_meta and not torch.equal(weight.group_index.sort().values.long(), plain):
            return None  # groups of different sizes
        order = weight.group_index.argsort(stable=True)
    codes = _unpacked(weight)
    code_type, table = _BYTE_CODES.get(codes.dtype), weight.table
    if weight.packed:
        code_type = INT4 if table is None else TABLE
    if table is not None and _are_halves(table):
        code_type, table, scale = INTEGERS, 2 * table, scale / 2
    if code_type is None or (code_type == FLOAT8 and _has_nan(codes)):
        return None
    if code_type == INT8 and zero is not None:  # signed zero points
        codes, zero, code_type = codes.view(torch.uint8) ^ 128, zero + 128, UINT8
    return _Codes(
        code_type,
        codes if order is None else codes[:, order],
        weight.group,
        _by_output(weight, scale),
        low=None if weight.shift is None else _by_output(weight, weight.shift),
        zero=None if zero is None else _by_output(weight, zero).to(torch.uint8),
        table=table,
        factor=None if weight.factor is None else weight.factor.float().flatten().repeat(len(codes)),
        order=None if order is None else order.int(),
        offset=weight.offset,
    )


def _unpacked(weight: GroupedWeight) -> Tensor:
    """Return one code per byte `[out, in]`."""
    if not weight.packed:
        return weight.codes
    return torch.stack((weight.codes & 15, weight.codes >> 4), -1).flatten(1)[:, : weight.inputs]


def _scale(weight: GroupedWeight) -> Tensor | None:
    """Return the scales in a type of the C++ kernels, or None if none has their values."""
    exact = _EXACT_SCALES.get(weight.scale.dtype)
    if exact is not None:
        return weight.scale.float().to(exact)
    return weight.scale if weight.scale.dtype in _SCALE_TYPES else None


def _are_halves(table: Tensor) -> bool:
    """Return whether twice the entries are integers of 8 bits, as those of 4-bit floats are (e2m1)."""
    return not table.is_meta and torch.equal((2 * table).clamp(-128, 127).round(), 2 * table)


def _has_nan(codes: Tensor) -> bool:
    return not codes.is_meta and bool((codes.view(torch.uint8) & _NAN_BITS == _NAN_BITS).any())


def _by_output(weight: GroupedWeight, grid: Tensor) -> Tensor:
    """Return one row of `grid` for each output."""
    return grid if weight.block_rows == 1 else grid.repeat_interleave(weight.block_rows, 0)[: len(weight.codes)]


def _join(shards: Sequence[_Codes]) -> list[_Codes]:
    """Concatenate the outputs of adjacent shards with the same groups. Shards with reordered inputs stay separate."""
    joined: list[_Codes] = []
    for shard in shards:
        if joined and joined[-1].joins(shard):
            joined[-1] = _concatenate(joined[-1], shard)
        else:
            joined.append(shard)
    return joined


def _concatenate(a: _Codes, b: _Codes) -> _Codes:
    changed: dict[str, Any] = {name: _cat(value, b.by_output()[name]) for name, value in a.by_output().items()}
    return replace(a, **changed)


def _cat(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return None
    if a.dtype == torch.float8_e4m3fn:
        return torch.cat([a.view(torch.uint8), b.view(torch.uint8)]).view(a.dtype)
    return torch.cat([a, b])


def _to_panels(weight: _Codes, bias: Tensor | None) -> GroupPanels:
    outputs, inputs = weight.codes.shape
    wide, steps = panel_width(), -(-inputs // STEP)

    def grid(values: Tensor | None) -> Tensor | None:
        """Reorder `[out, n]` to `[panels, n, width]`."""
        if values is None:
            return None
        return F.pad(values, (0, 0, 0, -outputs % wide)).view(-1, wide, values.shape[1]).transpose(1, 2).contiguous()

    scale = grid(weight.scale)
    assert scale is not None
    return GroupPanels(
        weight.code_type,
        _code_panels(weight.codes, weight.code_type in _PACKED),
        scale,
        grid(weight.fine_scale),
        grid(weight.low),
        grid(weight.fine_low),
        grid(weight.zero),
        weight.table,
        None if weight.factor is None else pad_outputs(weight.factor, wide),
        pad_outputs(torch.zeros(outputs) if bias is None else bias.float(), wide),
        weight.order,
        outputs,
        inputs,
        min(-(-weight.group // STEP), steps),
        weight.span,
        weight.offset,
    )


def _code_panels(codes: Tensor, packed: bool) -> Tensor:
    """Return `GroupPanels.codes` of codes `[out, in]`."""
    (outputs, inputs), wide = codes.shape, panel_width()
    padded = F.pad(codes.view(torch.uint8), (0, -inputs % STEP, 0, -outputs % wide)).view(-1, wide, -(-inputs // STEP), STEP)
    if packed:
        pairs = padded.unflatten(-1, (2, STEP // 2))
        panels = pairs[..., 0, :].bitwise_or(pairs[..., 1, :] << 4).transpose(1, 2)
    else:
        panels = padded[..., list(_BYTE_ORDER)].permute(0, 2, 3, 1)
    words = panels.view(torch.int32) if packed else panels  # wide numbers are reordered faster
    reordered = allocate(panels.shape, torch.uint8)
    reordered.view(words.dtype).copy_(words)
    return reordered


def _bytes(weight: _Codes) -> int:
    """Return the bytes of `_to_panels`."""
    (outputs, inputs), packed = weight.codes.shape, weight.code_type in _PACKED
    grids = (weight.scale, weight.fine_scale, weight.low, weight.fine_low, weight.zero)
    each = sum(grid.shape[1] * grid.itemsize for grid in grids if grid is not None) + (8 if weight.factor is not None else 4)
    others = sum(value.nbytes for value in (weight.table, weight.order) if value is not None)
    return panel_bytes(outputs, inputs, each, 4 if packed else 8) + others


def panel_bytes(outputs: int, inputs: int, each: int, bits: int = 4) -> int:
    """Return the bytes of a packed weight with padding. `each`: bytes per output beside the codes."""
    return -(-outputs // panel_width()) * panel_width() * (-(-inputs // STEP) * STEP * bits // 8 + each)


def group_linear(x: Tensor, weights: GroupPanelWeight) -> Tensor:
    """Compute `x [rows, in]` -> `[rows, out]` in x's dtype, as `grouped_linear` does up to the order of sums."""
    return multiply_groups(x, weights, _kernel())


def multiply_groups(x: Tensor, weights: GroupPanelWeight, kernel: str) -> Tensor:
    """Compute `group_linear` with the C++ kernel of an instruction set."""
    outputs = sum(panels.outputs for panels in weights.panels)
    out, start, x = x.new_empty(len(x), outputs), 0, x.contiguous()
    for w in weights.panels:
        scratch = torch.empty(len(x), row_bytes(w, x.dtype, weights.int8_rows, kernel), dtype=torch.uint8)
        arguments = kernel_arguments(w)
        rest = (outputs, int(weights.int8_rows), scratch, out[:, start:])
        native.call(f"group_linear_{kernel}", x.dtype, x, len(x), w.inputs, *arguments, *rest)
        start += w.outputs
    return out


def kernel_arguments(w: GroupPanels) -> tuple[int | Tensor | None, ...]:
    """Return the arguments of the C++ function that are the weight's: from `order` to `outputs` in cpu/linear.h."""
    low_type = 0 if w.low is None else _SCALE_TYPES.index(w.low.dtype)
    codes = (w.order, w.code_type, w.codes, w.table, w.offset, w.zero)
    grids = (w.scale, _SCALE_TYPES.index(w.scale.dtype), w.fine_scale, w.low, low_type, w.fine_low, w.span)
    return (*codes, *grids, w.factor, w.bias, w.codes.shape[1], w.group_steps, w.outputs)


def row_bytes(w: GroupPanels, dtype: torch.dtype, int8_rows: bool, kernel: str = "") -> int:
    """Return the scratch bytes of a converted row: its values, the sum of each group and a scale. `kernel`: "": the chosen."""
    steps = w.codes.shape[1]
    narrow = dtype == torch.bfloat16 and w.code_type == INT4 and (kernel or _kernel()) == "avx512_bf16"
    in_bytes = int8_rows and w.code_type == INT4
    return steps * STEP * (1 if in_bytes else 2 if narrow else 4) + 4 * -(-steps // w.group_steps) + 4
