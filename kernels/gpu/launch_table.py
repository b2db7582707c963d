"""Shipped launch configurations: numbers only. Knows no kernel; kernels/gpu/tune.py reads it.

TABLE[op][shape class][card] is what a launcher splats into its launch: block sizes under the kernel's own names, num_warps,
num_stages. The row "any" is whole and fits every card (at most 64 KiB of shared memory); a row of a card, "sm_80", "sm_90" or
"gfx942", says only what differs there. The shape class "" answers for every class that has no rows.
"""

from __future__ import annotations

from collections.abc import Mapping

TABLE: Mapping[str, Mapping[str, Mapping[str, Mapping[str, int]]]] = {
    # A program normalises ROWS rows, or heads, of the class's width.
    "norm": {
        "": {"any": {"ROWS": 8, "num_warps": 4, "num_stages": 1}},
        "256": {"any": {"ROWS": 4, "num_warps": 4, "num_stages": 1}},
        "512": {"any": {"ROWS": 4, "num_warps": 4, "num_stages": 1}},
        "1024": {"any": {"ROWS": 2, "num_warps": 4, "num_stages": 1}},
        "2048": {"any": {"ROWS": 1, "num_warps": 4, "num_stages": 1}},
        "4096": {"any": {"ROWS": 1, "num_warps": 8, "num_stages": 1}},
        "8192": {"any": {"ROWS": 1, "num_warps": 16, "num_stages": 1}},
        "16384": {"any": {"ROWS": 1, "num_warps": 16, "num_stages": 1}},
        "32768": {"any": {"ROWS": 1, "num_warps": 16, "num_stages": 1}},
    },
    # A program makes BLOCK results of one row.
    "activation": {"": {"any": {"BLOCK": 1024, "num_warps": 4, "num_stages": 1}}},
    # A program turns HEADS heads of one row; classes by half of the turned part of a head.
    "rotary": {
        "": {"any": {"HEADS": 16, "num_warps": 4, "num_stages": 1}},
        "128": {"any": {"HEADS": 8, "num_warps": 4, "num_stages": 1}},
        "256": {"any": {"HEADS": 4, "num_warps": 4, "num_stages": 1}},
    },
    # The same with norms before and keys and values put into the cache after.
    "rotary_cache": {
        "": {"any": {"HEADS": 8, "num_warps": 4, "num_stages": 1}},
        "256": {"any": {"HEADS": 4, "num_warps": 4, "num_stages": 1}},
        "512": {"any": {"HEADS": 2, "num_warps": 4, "num_stages": 1}},
    },
    # A tile of pairs of one expert times BLOCK_N of its outputs; classes by pairs of a tile, "wide" for float32.
    "experts": {
        "": {"any": {"BLOCK_N": 64, "BLOCK_K": 128, "GROUP": 8, "num_warps": 4, "num_stages": 3}},
        "64": {"any": {"BLOCK_N": 64, "BLOCK_K": 64, "GROUP": 8, "num_warps": 4, "num_stages": 3}},
        "128": {
            "any": {"BLOCK_N": 128, "BLOCK_K": 64, "GROUP": 8, "num_warps": 8, "num_stages": 2},
            "sm_80": {"num_stages": 3},
            "sm_90": {"num_stages": 3},
        },
        "wide": {"any": {"BLOCK_N": 32, "BLOCK_K": 32, "GROUP": 8, "num_warps": 4, "num_stages": 2}},
    },
    "route": {"": {"any": {"num_warps": 4, "num_stages": 1}}},
    "order": {"": {"any": {"num_warps": 8, "num_stages": 1}}},
    "combine": {"": {"any": {"num_warps": 4, "num_stages": 1}}},
    # A program turns a row of up to BLOCK elements into 8 bits; classes by next power of two of the row.
    "quantize_rows": {
        "": {"any": {"num_warps": 4, "num_stages": 1}},
        "8192": {"any": {"num_warps": 8, "num_stages": 1}},
        "16384": {"any": {"num_warps": 16, "num_stages": 1}},
        "32768": {"any": {"num_warps": 16, "num_stages": 1}},
    },
    # A tile has BLOCK_M rows, queries times heads of one key head, and BLOCK_N keys, fewer than threads: then every thread
    # looks up the blocks of the keys that it copies. "decode": up to 16 rows; "heads": a row of more heads; "prompt": many
    # rows; "alike": the one shape of batch-invariant steps. By the next power of two of the head, 1024 for latent rows.
    # "codes": they take registers while they are widened.
    "paged_attention": {
        "": {"any": {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}},
        "decode 64": {
            "any": {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
            "sm_80": {"num_stages": 4},
            "sm_90": {"num_stages": 5},
        },
        "decode 64 codes": {
            "any": {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
            "sm_80": {"num_stages": 4},
            "sm_90": {"num_stages": 4},
        },
        "decode 128": {
            "any": {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 3},
            "sm_80": {"BLOCK_N": 64},
            "sm_90": {"BLOCK_N": 64, "num_stages": 4},
        },
        "decode 256": {
            "any": {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 3},
            "sm_80": {"BLOCK_N": 32},
            "sm_90": {"BLOCK_N": 32, "num_stages": 4},
        },
        "decode 1024": {
            "any": {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2},
            "sm_80": {"BLOCK_N": 32, "num_stages": 3},
            "sm_90": {"BLOCK_N": 32, "num_stages": 4},
        },
        "heads 64": {"any": {"BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}},
        "heads 128": {
            "any": {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4, "num_stages": 3},
            "sm_80": {"BLOCK_N": 64},
            "sm_90": {"BLOCK_N": 64},
        },
        "heads 1024": {
            "any": {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2},
            "sm_80": {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 8, "num_stages": 3},
            "sm_90": {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 8, "num_stages": 4},
        },
        "prompt 64": {
            "any": {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
            "sm_80": {"BLOCK_M": 128, "num_warps": 8},
            "sm_90": {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8},
        },
        "prompt 128": {
            "any": {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2},
            "sm_80": {"BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 4},
            "sm_90": {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3},
        },
        "prompt 128 codes": {
            "any": {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2},
            "sm_80": {"BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 4},
            "sm_90": {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3},
        },
        "prompt 256": {
            "any": {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2},
            "sm_80": {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 3},
            "sm_90": {"BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 3},
        },
        "prompt 1024": {
            "any": {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2},
            "sm_80": {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 8, "num_stages": 3},
            "sm_90": {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 8, "num_stages": 4},
        },
        "alike 64": {"any": {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}},
        "alike 128": {"any": {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}},
    },
    "join_attention": {"": {"any": {"WIDTH": 128, "num_warps": 4, "num_stages": 1}}},
    "write_cache": {"": {"any": {"BLOCK": 1024, "num_warps": 4, "num_stages": 1}}},
    # A program makes codes of HEADS heads of one row; classes by the power of two in a head.
    "write_codes": {
        "": {"any": {"HEADS": 4, "num_warps": 4, "num_stages": 1}},
        "256": {"any": {"HEADS": 2, "num_warps": 4, "num_stages": 1}},
        "512": {"any": {"HEADS": 1, "num_warps": 4, "num_stages": 1}},
    },
    # A program holds QUERIES of a head against KEYS at a time; classes by the power of two in a head.
    "varlen_attention": {
        "": {"any": {"QUERIES": 128, "KEYS": 64, "num_warps": 8, "num_stages": 2}, "gfx942": {"num_warps": 4, "num_stages": 1}},
        "short": {"any": {"QUERIES": 64, "KEYS": 64, "num_warps": 4, "num_stages": 2}, "gfx942": {"num_stages": 1}},
        "64": {
            "any": {"QUERIES": 128, "KEYS": 64, "num_warps": 8, "num_stages": 2},
            "sm_80": {"num_stages": 3},
            "sm_90": {"num_stages": 3},
            "gfx942": {"num_warps": 4, "num_stages": 1},
        },
        "128": {
            "any": {"QUERIES": 128, "KEYS": 32, "num_warps": 8, "num_stages": 2},
            "sm_80": {"KEYS": 64, "num_stages": 3},
            "sm_90": {"KEYS": 128},
            "gfx942": {"KEYS": 64, "num_stages": 1},
        },
        "192": {
            "any": {"QUERIES": 64, "KEYS": 32, "num_warps": 4, "num_stages": 1},
            "sm_80": {"QUERIES": 128, "num_warps": 8, "num_stages": 2},
            "sm_90": {"QUERIES": 128, "KEYS": 64, "num_warps": 8, "num_stages": 2},
        },
        "256": {
            "any": {"QUERIES": 64, "KEYS": 32, "num_warps": 4, "num_stages": 1},
            "sm_80": {"QUERIES": 128, "KEYS": 16, "num_warps": 8, "num_stages": 3},
            "sm_90": {"QUERIES": 128, "KEYS": 64, "num_warps": 8, "num_stages": 2},
        },
        "float32": {"any": {"QUERIES": 32, "KEYS": 32, "num_warps": 4, "num_stages": 1}},
    },
    # A program moves BLOCK numbers of a row.
    "scatter": {"": {"any": {"BLOCK": 2048, "num_warps": 4, "num_stages": 1}}},
    # A program gathers a row's candidates in blocks of BLOCK tokens, searches them, or sums over all.
    "gather_candidates": {"": {"any": {"BLOCK": 4096, "num_warps": 16, "num_stages": 2}}},
    "draw": {"": {"any": {"BLOCK": 1024, "num_warps": 8, "num_stages": 1}}},
    # A tile of BLOCK_M rows and BLOCK_N outputs, weights in 8 bits; "few", "some": up to 16, up to 64 rows; else by the bits of
    # the numbers in a row.
    "linear": {
        "": {"any": {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP": 8, "num_warps": 8, "num_stages": 2}},
        "few": {"any": {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP": 1, "num_warps": 4, "num_stages": 4}},
        "some": {"any": {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP": 1, "num_warps": 4, "num_stages": 3}},
        "8": {
            "any": {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "GROUP": 8, "num_warps": 8, "num_stages": 2},
            "sm_80": {"num_stages": 3},
            "sm_90": {"num_stages": 4},
        },
        "16": {
            "any": {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP": 8, "num_warps": 8, "num_stages": 2},
            "sm_80": {"num_stages": 3},
            "sm_90": {"num_stages": 3},
        },
        "wide": {"any": {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP": 8, "num_warps": 4, "num_stages": 2}},
    },
    "linear_sum": {"": {"any": {"BLOCK": 512, "num_warps": 4, "num_stages": 1}}},
    "penalise": {"": {"any": {"BLOCK": 512, "num_warps": 4, "num_stages": 1}}},
    "log_probs": {"": {"any": {"BLOCK": 4096, "num_warps": 16, "num_stages": 2}}},
    # A program makes ROWS x COLUMNS pixels, in all channels while columns are weighed, of one channel after that.
    "pixels": {
        "": {"any": {"ROWS": 4, "COLUMNS": 128, "num_warps": 4, "num_stages": 1}},
        "rows": {"any": {"ROWS": 16, "COLUMNS": 128, "num_warps": 4, "num_stages": 1}},
    },
    # A program hears all bands of ROWS windows.
    "mel": {"": {"any": {"ROWS": 8, "num_warps": 4, "num_stages": 1}}},
}
