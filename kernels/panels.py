"""How the C++ kernel of cpu/linear.cpp wants a weight to lie, and where. Knows not what the numbers mean, nor who multiplies.

Every step reads every weight, so looking up pages of 4 KB takes time: products of 16 rows are 3 % faster from pages of 2 MB.
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

WIDTH = 64  # outputs of a panel
_WORD = 4  # bytes
_PAGE, _CHUNK, _LINE = 2 << 20, 64 << 20, 64  # bytes; what nothing is written to takes no memory


class _Open(threading.local):
    """Where a thread's next weights go. The chunk lives as long as any weight in it."""

    chunk: weakref.ref[mmap.mmap] | None = None
    used = 0


_open = _Open()


def to_panels(weight: Tensor) -> Tensor:
    """`[out, in]` -> `[panels, words, WIDTH, inputs of a word]`, `out` and `in` padded with zeros to whole panels and words."""
    each = _WORD // weight.itemsize
    padded = F.pad(weight, (0, -weight.shape[1] % each, 0, -weight.shape[0] % WIDTH))
    panels = padded.view(-1, WIDTH, padded.shape[1] // each, each).transpose(1, 2)
    return _room(panels.shape, panels.dtype).copy_(panels)


def pad_outputs(values: Tensor) -> Tensor:
    """`[out]` -> `[out of all panels]`, zeros for the padding."""
    return F.pad(values, (0, -values.shape[0] % WIDTH))


def _room(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory that nothing is written to yet, in large pages where the system has them."""
    count = prod(shape)
    if not count or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    size, chunk = count * dtype.itemsize, None if _open.chunk is None else _open.chunk()
    if chunk is None or _open.used + size > len(chunk):
        chunk = mmap.mmap(-1, max(_CHUNK, -(-size // _PAGE) * _PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        chunk.madvise(mmap.MADV_HUGEPAGE)
        _open.chunk, _open.used = weakref.ref(chunk), 0
    start = _open.used
    _open.used += -(-size // _LINE) * _LINE
    return torch.frombuffer(chunk, dtype=dtype, count=count, offset=start).view(shape)
