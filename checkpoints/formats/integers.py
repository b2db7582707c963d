"""Integers of 4 or 8 bits in int32 words, as GPTQ and AWQ store them: transposed, with packed zero points."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.linear.grouped import GroupedWeight


def unpack(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Return the codes of int32 `words [..., n]` as uint8 `[..., n * codes per word]`.

    `order[i]` is the code at place i of a word, from the lowest bits on; None: the first code is in the lowest bits.
    """
    each = 32 // bits
    places = range(each) if order is None else sorted(range(each), key=order.__getitem__)
    mask = (1 << bits) - 1
    return torch.stack([((words >> bits * position) & mask).to(torch.uint8) for position in places], -1).flatten(-2)


def integer_weight(
    codes: Tensor, scales: Tensor, zero: Tensor | None, bits: int, group: int, group_index: Tensor | None = None
) -> GroupedWeight:
    """Return the weight of unsigned `codes [in, out]`, `scales [groups, out]` and `zero [groups, out]`.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    (inputs, outputs), grid = codes.shape, scales.shape
    if grid != (-(-inputs // group), outputs) or (zero is not None and zero.shape != grid):
        raise ValueError(f"codes {[inputs, outputs]} with scales {list(grid)} for groups of {group}")
    codes = codes.t()
    if bits == 4:
        codes = torch.nn.functional.pad(codes, (0, inputs % 2))
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    zeros = None if zero is None else zero.t().contiguous()
    return GroupedWeight(
        codes.contiguous(), scales.t().contiguous(), group, inputs, packed=bits == 4, zero=zeros, group_index=group_index
    )
