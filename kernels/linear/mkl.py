"""Float32 products in torch on a CPU, in which a row's bits do not depend on the other rows of the batch.

torch multiplies dense float32 matrices with MKL, which has other kernels for fewer than 12 rows: fewer are padded to 16.
On Intel CPUs without AVX-512, the order of MKL's sums also depends on larger numbers of rows; there all products have exactly
48 rows. Pieces of 24, 48 and 96 rows kept every row's bits on such a CPU, pieces of 32 and 64 did not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

_MIN_ROWS, PIECE_ROWS = 16, 48


@cache
def needs_pieces() -> bool:
    """Return whether the CPU is one of Intel's on which torch or MKL (if its variable restricts it) uses no AVX-512."""
    restricted = "AVX512" not in os.environ.get("MKL_ENABLE_INSTRUCTIONS", "AVX512").upper()
    if "AVX512" in torch.backends.cpu.get_cpu_capability() and not restricted:
        return False
    cpus = Path("/proc/cpuinfo")
    return cpus.exists() and "GenuineIntel" in cpus.read_text("utf-8")


def multiplied_rows(rows: int) -> int:
    """Return the number of rows that MKL multiplies for a batch of `rows`, including the padding."""
    return max(-(-rows // PIECE_ROWS), 1) * PIECE_ROWS if needs_pieces() else max(rows, _MIN_ROWS)


def pad_rows(x: Tensor) -> Tensor:
    """Return `x [rows, n]`, on a CPU with rows of zeros added to `multiplied_rows`."""
    missing = multiplied_rows(len(x)) - len(x)
    return F.pad(x, (0, 0, 0, missing)) if missing and x.device.type == "cpu" else x


def multiply_padded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `x [rows, in]` from `pad_rows` times `weight [out, in]`, plus `bias [out]`: `[rows, out]`."""
    if x.device.type != "cpu" or not needs_pieces():
        return F.linear(x, weight, bias)
    return in_pieces(x, PIECE_ROWS, len(weight), lambda piece: F.linear(piece, weight, bias))


def in_pieces(x: Tensor, rows: int, outputs: int, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """Call `multiply` for each `rows` rows of `x [count, in]` and return the results `[count, outputs]`."""
    if len(x) <= rows:
        return multiply(x)
    out = x.new_empty(len(x), outputs)
    for piece, result in zip(x.split(rows), out.split(rows), strict=True):
        result.copy_(multiply(piece))
    return out
