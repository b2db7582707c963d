"""Shipped launch configurations of Triton kernels, read by kernels/gpu/launch_config.py.

TABLE[op][shape class][architecture] holds keyword arguments of a launch: block sizes, num_warps, num_stages. The row "any" is
complete and fits every GPU (at most 64 KiB of shared memory). The row of an architecture, "sm_80", "sm_90" or "gfx942", holds
only what differs from it. The shape class "" is used for classes without rows.
"""

from __future__ import annotations

from collections.abc import Mapping

TABLE: Mapping[str, Mapping[str, Mapping[str, Mapping[str, int]]]] = {
    # ROWS rows, or heads, per program; classes by the next power of two of the width.
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
    # BLOCK results of one row per program.
    "activation": {"": {"any": {"BLOCK": 1024, "num_warps": 4, "num_stages": 1}}},
    # HEADS heads of one row per program; classes by half of the rotated part of a head.
    "rotary": {
        "": {"any": {"HEADS": 16, "num_warps": 4, "num_stages": 1}},
        "128": {"any": {"HEADS": 8, "num_warps": 4, "num_stages": 1}},
        "256": {"any": {"HEADS": 4, "num_warps": 4, "num_stages": 1}},
    },
    # The same, with QK norm before and the cache write after.
    "qkv_prepare": {
        "": {"any": {"HEADS": 8, "num_warps": 4, "num_stages": 1}},
        "256": {"any": {"HEADS": 4, "num_warps": 4, "num_stages": 1}},
        "512": {"any": {"HEADS": 2, "num_warps": 4, "num_stages": 1}},
    },
    # A tile of one expert's pairs (of row and expert) times BLOCK_N outputs; classes by pairs of a tile, "wide" for float32.
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
    # One row per program; classes by the next power of two of its width.
    "quantize_rows": {
        "": {"any": {"num_warps": 4, "num_stages": 1}},
        "8192": {"any": {"num_warps": 8, "num_stages": 1}},
        "16384": {"any": {"num_warps": 16, "num_stages": 1}},
        "32768": {"any": {"num_warps": 16, "num_stages": 1}},
    },
    # A tile has BLOCK_M rows (queries times heads of one key head) and BLOCK_N keys. There are fewer keys than threads, so that
    # every thread looks up the blocks of the keys that it copies. "decode": up to 16 rows; "heads": one row of more heads;
    # "prompt": many rows; "invariant": the one shape of batch-invariant steps; then the next power of two of the head size,
    # 1024 for MLA. "quant": an 8-bit cache, which takes registers for the conversion.
    "paged_attention": {
        "": {"any": {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}},
        "decode 64": {
            "any": {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
            "sm_80": {"num_stages": 4},
            "sm_90": {"num_stages": 5},
        },
        "decode 64 quant": {
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
        "prompt 128 quant": {
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
        "invariant 64": {"any": {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}},
        "invariant 128": {"any": {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}},
    },
    "combine_splits": {"": {"any": {"WIDTH": 128, "num_warps": 4, "num_stages": 1}}},
    "write_cache": {"": {"any": {"BLOCK": 1024, "num_warps": 4, "num_stages": 1}}},
    # HEADS heads of one row per program; classes by the next power of two of the head size.
    "write_kv_quant": {
        "": {"any": {"HEADS": 4, "num_warps": 4, "num_stages": 1}},
        "256": {"any": {"HEADS": 2, "num_warps": 4, "num_stages": 1}},
        "512": {"any": {"HEADS": 1, "num_warps": 4, "num_stages": 1}},
    },
    # QUERIES rows of a head against KEYS at a time; classes by the sum of the two powers of two of a head size.
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
    # BLOCK channels of a row, or BLOCK values of a head of a sequence, per program.
    "causal_conv": {"": {"any": {"BLOCK": 1024, "num_warps": 4, "num_stages": 1}}},
    "linear_recurrence": {"": {"any": {"BLOCK": 32, "num_warps": 4, "num_stages": 1}}},
    # BLOCK values of a row per program.
    "scatter": {"": {"any": {"BLOCK": 2048, "num_warps": 4, "num_stages": 1}}},
    # A program gathers the candidates of a row in blocks of BLOCK tokens, or searches them.
    "gather_candidates": {"": {"any": {"BLOCK": 4096, "num_warps": 16, "num_stages": 2}}},
    "sample": {"": {"any": {"BLOCK": 1024, "num_warps": 8, "num_stages": 1}}},
    # A tile of BLOCK_M rows and BLOCK_N outputs, weights in 8 bits; "few": up to 16 rows, "some": up to 64; "wide": float32;
    # otherwise by the bits of an activation.
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
    # The same with weights in 4 bits; BLOCK_K is at most a group.
    "int4": {
        "": {"any": {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP": 8, "num_warps": 4, "num_stages": 2}},
        "few": {"any": {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP": 1, "num_warps": 4, "num_stages": 3}},
        "some": {"any": {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP": 1, "num_warps": 4, "num_stages": 3}},
        "wide": {"any": {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP": 8, "num_warps": 4, "num_stages": 2}},
    },
    "linear_sum": {"": {"any": {"BLOCK": 512, "num_warps": 4, "num_stages": 1}}},
    "penalties": {"": {"any": {"BLOCK": 512, "num_warps": 4, "num_stages": 1}}},
    "log_probs": {"": {"any": {"BLOCK": 4096, "num_warps": 16, "num_stages": 2}}},
    # ROWS x COLUMNS pixels per program: of all channels when columns are resized, of one channel when lines are ("rows").
    "pixels": {
        "": {"any": {"ROWS": 4, "COLUMNS": 128, "num_warps": 4, "num_stages": 1}},
        "rows": {"any": {"ROWS": 16, "COLUMNS": 128, "num_warps": 4, "num_stages": 1}},
    },
    # All bands of ROWS windows per program.
    "mel": {"": {"any": {"ROWS": 8, "num_warps": 4, "num_stages": 1}}},
}
