"""Weight layouts of the C++ linear layers (cpu/products.h) for each instruction set, and their memory.

Every step reads every weight, so TLB misses cost time: with 16 rows, pages of 2 MB are 3 % faster than pages of 4 KB.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import bodies, native

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}  # WeightType of cpu/linear.h
_FEW_ROWS = 2
_PAGE, _CHUNK, _LINE = 2 << 20, 64 << 20, 64  # bytes; untouched pages take no memory
_PIECE = 16 << 20  # bytes of a weight that are reordered at a time


class _Arena(threading.local):
    """The chunk of memory for a thread's next weights, and its used bytes. A chunk lives as long as any weight in it."""

    chunk: weakref.ref[mmap.mmap] | None = None
    used = 0


_arena = _Arena()


@dataclass(frozen=True)
class Layout:
    """The panels of a weight.

    Args:
        kernel: the C++ function, in `native`.
        width: outputs of a panel.
        inputs: inputs of a step; for each output, they are adjacent.
        lanes: bfloat16 only: in each block of 2 * lanes outputs, outputs j and j + lanes share a word. 0: outputs are in order.
        shifted: int8 only: the kernel takes unsigned activations and subtracts `Panels.shift` from the sums.
        scratch: int8 only: bytes per input to quantise all rows before the matmul. 0: each thread quantises rows itself.
        few: another function for up to `_FEW_ROWS` rows, which gives the same bits and is faster there. Empty: none.
    """

    kernel: str
    width: int
    inputs: int
    lanes: int = 0
    shifted: bool = False
    scratch: int = 0
    few: str = ""


def _floats(kernel: str, width: int, lanes: int) -> dict[torch.dtype, Layout]:
    """Return the layouts of a kernel that widens weights to float32 and multiplies int8 in pairs."""
    plain = Layout(kernel, width, 1)
    return {
        torch.float32: plain,
        torch.bfloat16: Layout(kernel, width, 1, lanes),
        torch.float16: plain,
        torch.int8: Layout(kernel, width, 2, scratch=2 if width == 64 else 0),
    }


_AVX2, _AVX512, _NEON = _floats("avx2", 16, 8), _floats("avx512", 64, 16), _floats("neon", 16, 4)
_VNNI = _AVX512 | {torch.int8: Layout("avx512_vnni", 64, 4, shifted=True, scratch=1)}
_DOT = _NEON | {torch.int8: Layout("neon_dot", 16, 4)}
_NEON_BF16 = _DOT | {torch.bfloat16: Layout("neon_bf16", 16, 2)}
_LAYOUTS = {
    "avx2": _AVX2,
    "avx_vnni": _AVX2 | {torch.int8: Layout("avx_vnni", 16, 4, shifted=True)},
    "avx512": _AVX512,
    "avx512_vnni": _VNNI,
    "avx512_bf16": _VNNI | {torch.bfloat16: Layout("avx512_bf16", 64, 2)},
    "amx": _AVX512 | {torch.bfloat16: Layout("amx", 64, 2), torch.int8: Layout("amx", 64, 4, shifted=True, few="avx512_vnni")},
    "neon": _NEON,
    "neon_dot": _DOT,
    "neon_bf16": _NEON_BF16,
    "neon_i8mm": _NEON_BF16 | {torch.int8: Layout("neon_i8mm", 16, 8, scratch=1)},
}
"""Layouts by instruction set (`native.products`) and dtype of the weight."""
_NO_PANELS = Layout("", 1, 1)
_CHOSEN = (torch.float32, torch.bfloat16, torch.int8)  # types whose body is chosen by its rate


def layout(dtype: torch.dtype) -> Layout:
    """Return the layout of weights of this dtype on this CPU."""
    name = native.products() or ""
    chosen = bodies.body(f"linear_{str(dtype).removeprefix('torch.')}") if dtype in _CHOSEN else ""
    return _LAYOUTS.get(chosen, _LAYOUTS.get(name, {})).get(dtype, _NO_PANELS)


def layouts_of(name: str) -> Mapping[torch.dtype, Layout]:
    """Return the layouts of the C++ kernels of an instruction set."""
    return _LAYOUTS[name]


def linear_kernels() -> dict[str, str]:
    """Return weight type -> name of its C++ kernel on this CPU, for `sensorium doctor`."""
    return {str(dtype).removeprefix("torch."): layout(dtype).kernel for dtype in _LAYOUTS.get(native.products() or "", {})}


def to_panels(weight: Tensor) -> Tensor:
    """Reorder `[out, in]` to the layout's `[panels, steps, width, inputs]`; `out` and `in` are padded with zeros.

    With lanes the shape is `[panels, steps, width / 2 / lanes, lanes, 2]`.
    """
    spec, (outputs, inputs) = layout(weight.dtype), weight.shape
    steps = -(-inputs // spec.inputs)
    panel = (spec.width // 2 // spec.lanes, spec.lanes, 2) if spec.lanes else (spec.width, spec.inputs)
    panels = allocate((-(-outputs // spec.width), steps, *panel), weight.dtype)
    each = max(_PIECE // (steps * spec.inputs * spec.width * weight.itemsize), 1)
    for some, rows in zip(panels.split(each), weight.split(each * spec.width), strict=True):
        padded = F.pad(rows, (0, -inputs % spec.inputs, 0, -len(rows) % spec.width))
        if spec.lanes:
            some.copy_(padded.view(len(some), *panel[:1], 2, spec.lanes, steps).permute(0, 4, 1, 3, 2))
        else:
            some.copy_(padded.view(len(some), spec.width, steps, spec.inputs).transpose(1, 2))
    return panels


def read_panel_rows(panels: Tensor, ids: Tensor) -> Tensor:
    """Return rows `[ids, in]` of a floating-point weight that `to_panels` has packed."""
    if panels.dim() == 5:
        lanes = panels.shape[3]
        width = panels.shape[2] * 2 * lanes
        at = ids % width
        index = [ids // width, None, at // (2 * lanes), at % lanes, at // lanes % 2]
    else:
        index = [ids // panels.shape[2], None, ids % panels.shape[2]]
    # an index of integers; that of Tensor's brackets may be a mask, whose result could not be recorded
    rows: Tensor = torch.ops.aten._unsafe_index.Tensor(panels, index)
    return rows.flatten(1)


def pad_outputs(values: Tensor, width: int) -> Tensor:
    """Pad `[out]` with zeros to whole panels of `width` outputs."""
    return F.pad(values, (0, -values.shape[0] % width))


@dataclass(frozen=True, eq=False)
class Panels:
    """A weight for a C++ kernel.

    Args:
        form: layout of `weight`.
        weight: see `to_panels`.
        bias: float32, padded like the outputs.
        outputs: number of outputs without padding.
        scale: int8 only: float32, padded like the outputs.
        shift: int8 only, if `form.shifted`: int32, padded like the outputs: 128 times the sum of the output's weights.
    """

    form: Layout
    weight: Tensor
    bias: Tensor
    outputs: int
    scale: Tensor | None = None
    shift: Tensor | None = None


def pack_panels(weight: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> Panels:
    """Pack `weight [out, in]`, or int8 with a `scale [out]`."""
    spec, wide = layout(weight.dtype), torch.zeros(len(weight)) if bias is None else bias.float()
    shift = pad_outputs(weight.sum(1, dtype=torch.int32).mul_(128), spec.width) if spec.shifted else None
    padded = None if scale is None else pad_outputs(scale, spec.width)
    return Panels(spec, to_panels(weight), pad_outputs(wide, spec.width), len(weight), padded, shift)


def multiply_panels(x: Tensor, w: Panels) -> Tensor:
    """Compute `x [rows, in]` -> `[rows, out]` in x's dtype."""
    (rows, inputs), spec, steps = x.shape, w.form, w.weight.shape[1]
    out = x.new_empty(rows, w.outputs)
    # quantised rows and their scales
    scratch = torch.empty(rows, steps * spec.inputs * spec.scratch + 4, dtype=torch.uint8) if spec.scratch else None
    weights = (w.weight, w.shift, w.scale, w.bias, steps, w.outputs)
    kernel = spec.few if spec.few and rows <= _FEW_ROWS else spec.kernel
    native.call(f"linear_{kernel}", x.dtype, _TYPES[w.weight.dtype], x.contiguous(), rows, inputs, *weights, scratch, out)
    return out


def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate an uninitialised tensor, on huge pages if the system has them."""
    count = prod(shape)
    if not count or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    size, chunk = count * dtype.itemsize, None if _arena.chunk is None else _arena.chunk()
    if chunk is None or _arena.used + size > len(chunk):
        chunk = map_pages(max(_CHUNK, -(-size // _PAGE) * _PAGE))
        _arena.chunk, _arena.used = weakref.ref(chunk), 0
    start = _arena.used
    _arena.used += -(-size // _LINE) * _LINE
    return torch.frombuffer(chunk, dtype=dtype, count=count, offset=start).view(shape)


def map_pages(size: int) -> mmap.mmap:
    """Return `size` bytes of zeros, on huge pages if the system has them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
