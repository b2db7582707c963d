"""Rotary positions whose cosines and sines are learned mixtures over several frequencies (FoPE).

Sources: arXiv 2412.17739, and the published code of Intern-S1-Pro. Frequencies that make less than one turn within the trained
length are left out. Their numbers of a head turn by no position: cosine and sine are both 1, a fixed turn by 45 degrees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels.rope import rotary_cos_sin
from ..layers.basic import Converter, Convertible
from ..layers.linear import Linear
from ..memory_formulas import FLOAT32
from .rope import FOURIER, CosSin, Rotary, scaled_frequencies, scaling_type
from .spec import RopeSpec


class FourierRotary(nn.Module, Convertible):
    """Positions `[axes, rows]` -> mixed cosines and sines of each row.

    Checkpoints store `cos_coef` and `sin_coef`, `[mixtures, frequencies, frequencies]`, or a matrix if all heads share one.
    `mixtures` of the rope parameters is the number of KV heads, or 1.
    """

    def __init__(self, rope: RopeSpec, device: torch.device) -> None:
        super().__init__()
        frequencies, _ = scaled_frequencies(rope)
        self.count, self.mixtures, self.pairs = len(frequencies), int(rope.scaling["mixtures"]), rope.dim // 2
        self.frequencies, self.axes = frequencies.to(device), torch.tensor(rope.axes[: self.count], device=device)
        outputs = self.mixtures * self.count
        self.cos, self.sin = (
            Linear(self.count, {name: outputs}, False, torch.float32, device, exact=True) for name in ("cos_coef", "sin_coef")
        )

    def converters(self, path: str) -> Iterator[tuple[str, Converter]]:
        for name in (*self.cos.shards, *self.sin.shards):
            yield f"{path}.{name}", partial(_as_weight, f"{path}.{name}.weight")

    def __call__(self, positions: Tensor) -> CosSin:
        """Return float32 `[rows, dim / 2]`, or `[mixtures, rows, dim / 2]` if there are several."""
        cos, sin = rotary_cos_sin(positions, self.frequencies, self.axes)
        return CosSin(self._mix(self.cos, cos), self._mix(self.sin, sin), positions=positions[0])

    def _mix(self, mixture: Linear, values: Tensor) -> Tensor:
        mixed = mixture(values).unflatten(1, (self.mixtures, self.count)).transpose(0, 1)
        padded = F.pad(mixed, (0, self.pairs - self.count), value=1.0)
        return padded[0].contiguous() if self.mixtures == 1 else padded.contiguous()


def _as_weight(name: str, stored: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Return mixtures `[..., frequencies, mixed]` as the weight of a linear layer, `[mixtures * mixed, frequencies]`."""
    yield name, stored.mT.reshape(-1, stored.shape[-2])


def build_rotary(rope: RopeSpec, device: torch.device) -> Rotary | FourierRotary:
    """Return the rotary positions of a decoder; with mixtures they are a module, which has weights."""
    kind = scaling_type(rope.scaling)
    return FourierRotary(rope, device) if kind == FOURIER else Rotary(rope, device)


def rotary_bytes(rope: RopeSpec) -> int:
    """Return the bytes per row of cosines and sines."""
    return int(rope.scaling.get("mixtures", 1)) * rope.dim * FLOAT32
