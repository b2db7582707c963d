"""Weight layout of the C++ matmul (cpu/linear.cpp) and its memory.

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

PANEL_WIDTH = 64  # outputs of a panel
_WORD = 4  # bytes
_PAGE, _CHUNK, _LINE = 2 << 20, 64 << 20, 64  # bytes; untouched pages take no memory


class _Arena(threading.local):
    """The chunk of memory for a thread's next weights, and its used bytes. A chunk lives as long as any weight in it."""

    chunk: weakref.ref[mmap.mmap] | None = None
    used = 0


_arena = _Arena()


def to_panels(weight: Tensor) -> Tensor:
    """Reorder `[out, in]` to `[panels, words, PANEL_WIDTH, inputs per word]`; `out` and `in` are padded with zeros."""
    each = _WORD // weight.itemsize
    padded = F.pad(weight, (0, -weight.shape[1] % each, 0, -weight.shape[0] % PANEL_WIDTH))
    panels = padded.view(-1, PANEL_WIDTH, padded.shape[1] // each, each).transpose(1, 2)
    return _allocate(panels.shape, panels.dtype).copy_(panels)


def pad_outputs(values: Tensor) -> Tensor:
    """Pad `[out]` with zeros to whole panels."""
    return F.pad(values, (0, -values.shape[0] % PANEL_WIDTH))


def _allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
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
