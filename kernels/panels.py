"""Weight layouts of the C++ matmuls (cpu/linear.cpp, cpu/linear_avx2.cpp) and their memory.

Every step reads every weight, so TLB misses cost time: with 16 rows, pages of 2 MB are 3 % faster than pages of 4 KB.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from . import native

_WORD = 4  # bytes
_PAGE, _CHUNK, _LINE = 2 << 20, 64 << 20, 64  # bytes; untouched pages take no memory


class _Arena(threading.local):
    """The chunk of memory for a thread's next weights, and its used bytes. A chunk lives as long as any weight in it."""

    chunk: weakref.ref[mmap.mmap] | None = None
    used = 0


_arena = _Arena()


def panel_width() -> int:
    """Return the number of outputs of a panel."""
    return 64 if native.products() == "avx512" else 16


def step_inputs(dtype: torch.dtype) -> int:
    """Return how many inputs of an output lie together."""
    if native.products() == "avx512":
        return _WORD // dtype.itemsize
    return 2 if dtype == torch.int8 else 1


def to_panels(weight: Tensor) -> Tensor:
    """Reorder `[out, in]` to `[panels, steps, panel_width(), step_inputs()]`; `out` and `in` are padded with zeros.

    bfloat16 for AVX2 has the outputs of a step in the order 0, 8, 1, 9 ... 7, 15, and the shape `[panels, steps, 8, 2]`.
    """
    each, wide = step_inputs(weight.dtype), panel_width()
    padded = F.pad(weight, (0, -weight.shape[1] % each, 0, -weight.shape[0] % wide))
    if weight.dtype == torch.bfloat16 and wide == 16:
        panels = padded.view(-1, 2, 8, padded.shape[1]).permute(0, 3, 2, 1)
    else:
        panels = padded.view(-1, wide, padded.shape[1] // each, each).transpose(1, 2)
    return allocate(panels.shape, panels.dtype).copy_(panels)


def read_panel_rows(panels: Tensor, ids: Tensor) -> Tensor:
    """Return rows `[ids, in]` of a bfloat16 or float32 weight that `to_panels` has packed."""
    if panels.shape[2] == 8:
        index = [ids // 16, None, ids % 8, ids // 8 % 2]
    else:
        index = [ids // panels.shape[2], None, ids % panels.shape[2]]
    # an index of integers; that of Tensor's brackets may be a mask, whose result could not be recorded
    rows: Tensor = torch.ops.aten._unsafe_index.Tensor(panels, index)
    return rows.flatten(1)


def pad_outputs(values: Tensor) -> Tensor:
    """Pad `[out]` with zeros to whole panels."""
    return F.pad(values, (0, -values.shape[0] % panel_width()))


def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate an uninitialised tensor, on huge pages if the system has them."""
    count = prod(shape)
    if not count or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    size, chunk = count * dtype.itemsize, None if _arena.chunk is None else _arena.chunk()
    if chunk is None or _arena.used + size > len(chunk):
        chunk = mmap.mmap(-1, max(_CHUNK, -(-size // _PAGE) * _PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        chunk.madvise(mmap.MADV_HUGEPAGE)
        _arena.chunk, _arena.used = weakref.ref(chunk), 0
    start = _arena.used
    _arena.used += -(-size // _LINE) * _LINE
    return torch.frombuffer(chunk, dtype=dtype, count=count, offset=start).view(shape)
