"""Random weights in every format that has a scale per group of inputs."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf_files import Q, random_blocks
from sensorium.kernels.linear.blocks import BLOCKS, BlockWeight
from sensorium.kernels.linear.grouped import GroupedWeight, QuantizedWeight
from torch import Tensor

_NF4 = (-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
        0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)  # fmt: skip
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
STORED_FORMATS = (
    *BLOCKS, "fp8 blocks", "fp8 one scale", "mxfp4", "nvfp4", "nf4", "int8 outputs", "int8 groups", "int8 zeros", "uint8 zeros",
    "uint8 offset", "uint8 lows", "int4 lows", "reordered bytes",
)  # fmt: skip


def block_weight(kind: str, outputs: int, blocks: int, seed: int = 0) -> BlockWeight:
    """Return random blocks whose numbers are finite and of moderate size."""
    number, shape = Q[kind], (outputs, blocks * BLOCKS[kind][0])
    if number in (Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0):
        data = gguf.quantize(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32), number)
    else:
        data = random_blocks(shape, number, seed)
    return BlockWeight(torch.from_numpy(data), kind)


def stored_weight(name: str, outputs: int) -> QuantizedWeight:
    """Return a random weight in a format of STORED_FORMATS."""
    if name in BLOCKS:
        return block_weight(name, outputs, 2)
    gen = torch.Generator().manual_seed(0)
    small = torch.rand(outputs, 5, generator=gen) + 0.1
    packed = torch.randint(256, (outputs, 80), generator=gen).to(torch.uint8)
    signed = torch.randint(-127, 128, (outputs, 160), generator=gen).to(torch.int8)
    unsigned = torch.randint(256, (outputs, 160), generator=gen).to(torch.uint8)
    floats = torch.randn(outputs, 160, generator=gen).to(torch.float8_e4m3fn)
    index = torch.randperm(160, generator=gen).remainder(5).int()
    bytes_scale = (small / 64).bfloat16()

    def zeros(low: int, high: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, (outputs, 5), generator=gen).to(dtype)

    match name:
        case "fp8 blocks":
            return GroupedWeight(floats, small[: -(-outputs // 16)], 32, 160, 16)
        case "fp8 one scale":
            return GroupedWeight(floats, small[:1, :1], 160, 160, outputs)
        case "mxfp4":
            return GroupedWeight(packed, small.to(torch.float8_e8m0fnu), 32, 160, packed=True, table=torch.tensor(_FP4))
        case "nvfp4":
            scale = torch.rand(outputs, 10, generator=gen).to(torch.float8_e4m3fn)
            return GroupedWeight(packed, scale, 16, 160, packed=True, table=torch.tensor(_FP4), factor=torch.tensor([0.37]))
        case "nf4":
            return GroupedWeight(packed, small, 32, 160, packed=True, table=torch.tensor(_NF4))
        case "int8 outputs":
            return GroupedWeight(signed, bytes_scale[:, :1], 160, 160)
        case "int8 groups":
            return GroupedWeight(signed, bytes_scale, 32, 160)
        case "int8 zeros":
            return GroupedWeight(signed, bytes_scale, 32, 160, zero=zeros(-128, 128, torch.int8))
        case "uint8 zeros":
            return GroupedWeight(unsigned, bytes_scale, 32, 160, zero=zeros(0, 256, torch.uint8))
        case "uint8 offset":
            return GroupedWeight(unsigned, bytes_scale, 32, 160, offset=128)
        case "uint8 lows":
            return GroupedWeight(unsigned, bytes_scale, 32, 160, shift=-128 * bytes_scale)
        case "int4 lows":
            return GroupedWeight(packed, small.half(), 32, 160, packed=True, shift=-8 * small.half())
        case "reordered bytes":
            return GroupedWeight(signed, bytes_scale, 32, 160, group_index=index)
    raise KeyError(name)
