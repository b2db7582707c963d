"""Shipped launch configurations: numbers only. Knows no kernel; kernels/gpu/tune.py reads it.

TABLE[op][shape class][card] is what a launcher splats into its launch: block sizes under the kernel's own names, num_warps,
num_stages. The row "any" is whole and fits every card (at most 64 KiB of shared memory); a row of a card, "sm_80", "sm_90" or
"gfx942", says only what differs there. The shape class "" answers for every class that has no rows.
"""

from __future__ import annotations

from collections.abc import Mapping

TABLE: Mapping[str, Mapping[str, Mapping[str, Mapping[str, int]]]] = {
    # A program normalises a row of up to BLOCK elements; classes by next power of two of the row.
    "rms_norm": {
        "": {"any": {"num_warps": 4, "num_stages": 1}},
        "8192": {"any": {"num_warps": 8, "num_stages": 1}},
        "16384": {"any": {"num_warps": 16, "num_stages": 1}},
    },
}
