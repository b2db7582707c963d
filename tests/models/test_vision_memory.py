"""Memory formulas of each kind of packed tower and a projector after it, against live tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from measured import filled, peak_bytes
from sensorium.kernels.dispatch import backend
from sensorium.models.interface import StepLimits
from sensorium.models.layers.connectors import Projector, ProjectorSpec
from sensorium.models.vision.vit import VisionTower, tower_bytes
from torch import Tensor
from towers import CASES, PIXELS

CPU = torch.device("cpu")


@pytest.mark.parametrize("side", [24, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_memory_is_planned(name: str, dtype: torch.dtype, side: int) -> None:
    """The plan is within 10 % of the peak and never below it."""
    spec = CASES[name].spec
    table = spec.table and replace(spec.table, side=side if spec.table.fit == "exact" else 16)
    spec = replace(spec, width=96, inner=256, patch_dim=588 * (spec.patch_dim // PIXELS), table=table)
    grids, patches, group = [(3, side, side), (1, side, side)], 4 * side**2, spec.merge**2
    merger = ProjectorSpec(spec.width, 80, ("0", "2"), group, norm="norm")
    tower, projector = filled(VisionTower(spec, dtype, CPU)), filled(Projector(merger, dtype, CPU))

    def encode() -> list[Tensor]:
        pixels = torch.zeros(patches, spec.patch_dim, dtype=dtype)
        return list(projector(tower(pixels, grids)[-1]).split([3 * side**2 // group, side**2 // group]))

    measured, planned = peak_bytes(encode), tower_bytes(spec, patches, merger, dtype, StepLimits(1, 1, 1, CPU))
    native = backend("varlen_attention", CPU, dtype) == "native"
    assert measured <= planned
    assert not native or planned <= 1.1 * measured
