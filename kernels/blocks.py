"""Weights in the block formats of GGML: each block holds codes of 32 or 256 adjacent inputs, and their scales.

Blocks stay as they are stored; `grouped.grouped_linear` dequantises a panel of outputs at a time, with the bits of ggml's own
dequantisation in float32.

Source: ggml-quants.c of ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class BlockWeight:
    """A weight `[out, in]`.

    Args:
        codes: uint8 `[out, bytes]`, the blocks of each output.
        kind: a key of DEQUANTIZE.
    """

    codes: Tensor
    kind: str

    @property
    def inputs(self) -> int:
        numbers, size = BLOCKS[self.kind]
        return self.codes.shape[1] // size * numbers

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.inputs

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes

    def map(self, change: Callable[[Tensor], Tensor]) -> BlockWeight:
        return replace(self, codes=change(self.codes))

    def select(self, rows: slice) -> BlockWeight:
        return replace(self, codes=self.codes[rows])

    def dequantize(self, first: int = 0, last: int | None = None) -> Tensor:
        codes = self.codes[first:last]
        return DEQUANTIZE[self.kind](codes.reshape(-1, BLOCKS[self.kind][1])).reshape(len(codes), self.inputs)


def _half(blocks: Tensor, place: int) -> Tensor:
    """Return the float16 number at this byte of each block as float32 `[blocks, 1]`."""
    return blocks[:, place : place + 2].contiguous().view(torch.float16).float()


def _bits(data: Tensor, count: int, width: int) -> Tensor:
    """Return uint8 `[..., 8 / width, n]` for data `[..., n]`: the first `count` groups of `width` bits, the lowest first."""
    shifts = torch.arange(0, count * width, width, dtype=torch.uint8, device=data.device)
    return (data.unsqueeze(-2) >> shifts[:, None]) & ((1 << width) - 1)


def _nibbles(data: Tensor) -> Tensor:
    """Return codes `[blocks, 32]`: those in the low bits of 16 bytes, then those in the high bits."""
    return _bits(data, 2, 4).flatten(1)


def _fifth_bits(data: Tensor) -> Tensor:
    """Return a fifth bit for each of 32 codes, from four bytes."""
    return (_bits(data, 8, 1) << 4).transpose(1, 2).flatten(1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return codes.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and minimum of each 32 numbers, float32 `[blocks, 8, 1]`, from 16 bytes of Q4_K and Q5_K."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat([first & 63, (third & 15) | (first >> 2 & 48)], 1)
    least = torch.cat([second & 63, (third >> 4) | (second >> 2 & 48)], 1)
    return (_half(blocks, 0) * scale.float())[..., None], (_half(blocks, 2) * least.float())[..., None]


def _q4_k(blocks: Tensor) -> Tensor:
    scale, least = _scales(blocks)
    return _bits(blocks[:, 16:].unflatten(1, (4, 32)), 2, 4).flatten(1, 2).float().mul_(scale).sub_(least)


def _q5_k(blocks: Tensor) -> Tensor:
    scale, least = _scales(blocks)
    low = _bits(blocks[:, 48:].unflatten(1, (4, 32)), 2, 4).flatten(1, 2)
    return (low | _bits(blocks[:, 16:48], 8, 1) << 4).float().mul_(scale).sub_(least)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _bits(blocks[:, :128].unflatten(1, (2, 64)), 2, 4).reshape(-1, 16, 16)
    high = _bits(blocks[:, 128:192].unflatten(1, (2, 32)), 4, 2).reshape(-1, 16, 16)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return (low | high << 4).float().sub_(32).mul_(scale[..., None])


def _q2_k(blocks: Tensor) -> Tensor:
    scale = _half(blocks, 80) * (blocks[:, :16] & 15).float()
    least = _half(blocks, 82) * (blocks[:, :16] >> 4).float()
    codes = _bits(blocks[:, 16:80].unflatten(1, (2, 32)), 4, 2).reshape(-1, 16, 16)
    return codes.float().mul_(scale[..., None]).sub_(least[..., None])


def _q3_k(blocks: Tensor) -> Tensor:
    low, high = _nibbles(blocks[:, 96:104]), _bits(blocks[:, 104:108], 4, 2).flatten(1)
    scale = _half(blocks, 108) * (low | high << 4).float().sub_(32)
    codes = _bits(blocks[:, 32:96].unflatten(1, (2, 32)), 4, 2).reshape(-1, 16, 16)
    minus = _bits(blocks[:, :32], 8, 1).reshape(-1, 16, 16) ^ 1
    return codes.float().sub_(minus << 2).mul_(scale[..., None])


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _levels(_nibbles(blocks[:, 2:])).mul_(_half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Tensor:
    high, low = _bits(blocks[:, 2:4], 4, 2).transpose(1, 2).flatten(1), _bits(blocks[:, 4:8], 2, 4).transpose(1, 2).flatten(1)
    scale = _half(blocks, 0) * (low | high << 4).float().sub_(32)
    codes = _bits(blocks[:, 8:].unflatten(1, (8, 16)), 2, 4).flatten(2)
    return _levels(codes).mul_(scale[..., None])


def _levels(codes: Tensor) -> Tensor:
    """Look up the values of 4-bit codes in a table of unevenly spaced levels."""
    values = torch.tensor(_IQ4_VALUES, dtype=torch.float32, device=codes.device)
    return values.index_select(0, codes.flatten().int()).view(codes.shape)


_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
BLOCKS: Mapping[str, tuple[int, int]] = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84),
    "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "IQ4_NL": (32, 18), "IQ4_XS": (256, 136),
}  # fmt: skip
"""Kind -> numbers and bytes of a block."""
DEQUANTIZE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip
"""Kind -> function from blocks, uint8 `[blocks, bytes]`, to their numbers in float32."""
