"""Weights in the block formats of GGML: each block holds codes of 32 or 256 adjacent inputs, and their scales.

The C++ kernels multiply with the stored codes and scales, see groups.py. Elsewhere blocks stay as they are stored, and
`grouped_linear` dequantises a panel of outputs at a time, with the bits of ggml's own dequantisation in float32.

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
        kind: a key of BLOCKS.
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

    def parse(self) -> BlockParts:
        """Take all blocks apart, output by output. The blocks may be on the meta device."""
        return _PARSE[self.kind](self.codes.reshape(-1, BLOCKS[self.kind][1]))

    def dequantize(self, first: int = 0, last: int | None = None) -> Tensor:
        codes = self.codes[first:last]
        return replace(self, codes=codes).parse().values().reshape(len(codes), self.inputs)


@dataclass(frozen=True, eq=False)
class BlockParts:
    """The numbers of blocks: `(v - offset) * scale * fine_scale + low * fine_low`; v is the code or its level.

    Args:
        codes: `[blocks, numbers]`; uint8 with 4 bits, or int8.
        scale, low: float16 `[blocks, 1]`, of a block. No `low`: nothing is added.
        fine_scale, fine_low: int8 `[blocks, groups]`, of adjacent numbers of a block; None: 1.
        levels: codes stand for entries of LEVELS.
    """

    codes: Tensor
    scale: Tensor
    fine_scale: Tensor | None = None
    low: Tensor | None = None
    fine_low: Tensor | None = None
    offset: int = 0
    levels: bool = False

    def values(self) -> Tensor:
        """Return the numbers in float32, with the bits of ggml's own dequantisation."""
        values = self._levels() if self.levels else self.codes.float()
        if self.offset:
            values.sub_(self.offset)
        groups = values.unflatten(1, (1 if self.fine_scale is None else self.fine_scale.shape[1], -1))
        groups.mul_(_products(self.scale, self.fine_scale))
        if self.low is not None:
            groups.add_(_products(self.low, self.fine_low))
        return values

    def _levels(self) -> Tensor:
        table = torch.tensor(LEVELS, dtype=torch.float32, device=self.codes.device)
        return table.index_select(0, self.codes.flatten().int()).view(self.codes.shape)


def _products(coarse: Tensor, fine: Tensor | None) -> Tensor:
    return (coarse.float() if fine is None else coarse.float() * fine.float())[..., None]


def _half(blocks: Tensor, offset: int) -> Tensor:
    """Return the float16 number at this byte of each block `[blocks, 1]`."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16)


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


def _q4_0(blocks: Tensor) -> BlockParts:
    return BlockParts(_nibbles(blocks[:, 2:]), _half(blocks, 0), offset=8)


def _q4_1(blocks: Tensor) -> BlockParts:
    return BlockParts(_nibbles(blocks[:, 4:]), _half(blocks, 0), low=_half(blocks, 2))


def _q5_0(blocks: Tensor) -> BlockParts:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return BlockParts(codes.view(torch.int8) - 16, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> BlockParts:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return BlockParts(codes.view(torch.int8), _half(blocks, 0), low=_half(blocks, 2))


def _q8_0(blocks: Tensor) -> BlockParts:
    return BlockParts(blocks[:, 2:].view(torch.int8), _half(blocks, 0))


def _with_lows(blocks: Tensor, codes: Tensor) -> BlockParts:
    """Return the parts of Q4_K and Q5_K: scale and minimum of each 32 numbers are 6 bits each, in 16 bytes."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat([first & 63, (third & 15) | (first >> 2 & 48)], 1)
    least = torch.cat([second & 63, (third >> 4) | (second >> 2 & 48)], 1)
    return BlockParts(codes, _half(blocks, 0), scale.view(torch.int8), -_half(blocks, 2), least.view(torch.int8))


def _q4_k(blocks: Tensor) -> BlockParts:
    return _with_lows(blocks, _bits(blocks[:, 16:].unflatten(1, (4, 32)), 2, 4).flatten(1))


def _q5_k(blocks: Tensor) -> BlockParts:
    low = _bits(blocks[:, 48:].unflatten(1, (4, 32)), 2, 4).flatten(1)
    return _with_lows(blocks, (low | _bits(blocks[:, 16:48], 8, 1).flatten(1) << 4).view(torch.int8))


def _q6_k(blocks: Tensor) -> BlockParts:
    low = _bits(blocks[:, :128].unflatten(1, (2, 64)), 2, 4).flatten(1)
    high = _bits(blocks[:, 128:192].unflatten(1, (2, 32)), 4, 2).flatten(1)
    return BlockParts((low | high << 4).view(torch.int8) - 32, _half(blocks, 208), blocks[:, 192:208].view(torch.int8))


def _q2_k(blocks: Tensor) -> BlockParts:
    scale, least = (blocks[:, :16] & 15).view(torch.int8), (blocks[:, :16] >> 4).view(torch.int8)
    codes = _bits(blocks[:, 16:80].unflatten(1, (2, 32)), 4, 2).flatten(1)
    return BlockParts(codes, _half(blocks, 80), scale, -_half(blocks, 82), least)


def _q3_k(blocks: Tensor) -> BlockParts:
    low, high = _nibbles(blocks[:, 96:104]), _bits(blocks[:, 104:108], 4, 2).flatten(1)
    codes = _bits(blocks[:, 32:96].unflatten(1, (2, 32)), 4, 2).flatten(1) | _bits(blocks[:, :32], 8, 1).flatten(1) << 2
    return BlockParts(codes, _half(blocks, 108), (low | high << 4).view(torch.int8) - 32, offset=4)


def _iq4_nl(blocks: Tensor) -> BlockParts:
    return BlockParts(_nibbles(blocks[:, 2:]), _half(blocks, 0), levels=True)


def _iq4_xs(blocks: Tensor) -> BlockParts:
    high, low = _bits(blocks[:, 2:4], 4, 2).transpose(1, 2).flatten(1), _bits(blocks[:, 4:8], 2, 4).transpose(1, 2).flatten(1)
    codes = _bits(blocks[:, 8:].unflatten(1, (8, 16)), 2, 4).flatten(1)
    return BlockParts(codes, _half(blocks, 0), (low | high << 4).view(torch.int8) - 32, levels=True)


LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The unevenly spaced values of the codes of IQ4_NL and IQ4_XS."""
BLOCKS: Mapping[str, tuple[int, int]] = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84),
    "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "IQ4_NL": (32, 18), "IQ4_XS": (256, 136),
}  # fmt: skip
"""Kind -> numbers and bytes of a block."""
_PARSE: Mapping[str, Callable[[Tensor], BlockParts]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip
"""Kind -> function from blocks, uint8 `[blocks, bytes]`, to their parts."""
