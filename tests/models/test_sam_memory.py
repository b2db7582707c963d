"""SAM's memory formula against measured peaks; in the small models of the families other parts hide it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from measured import filled, peak_bytes
from sensorium.models.interface import StepLimits
from sensorium.models.vision.sam import SAM, SamSpec, SamTower, sam_bytes
from sensorium.models.vision.spec import TableSpec, TowerSpec

CPU = torch.device("cpu")
SCRATCH = 20 << 10  # allocated by torch per thread
TOWER = TowerSpec(
    depth=2, width=64, heads=4, inner=256, patch_dim=48, act="gelu", eps=1e-6, table=TableSpec(28, fit="bicubic"), names=SAM
)
SIDES = {
    "windows without padding": (28, 14, frozenset[int](), True),
    "padded windows": (20, 7, frozenset[int](), True),
    "a layer of full attention": (32, 14, frozenset({1}), True),
    "no relative positions": (32, 14, frozenset({1}), False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", SIDES)
def test_sam_tower_stays_within_its_plan(case: str, dtype: torch.dtype) -> None:
    side, window, full, relative = SIDES[case]
    tower = replace(TOWER, window=window, full_layers=full, table=TableSpec(side, fit="bicubic"))
    spec = SamSpec(tower, 32, (48, 64), relative)
    model, patches = filled(SamTower(spec, dtype, CPU)), torch.randn(side**2, TOWER.patch_dim).to(dtype)
    live, planned = peak_bytes(lambda: model(patches, side)), sam_bytes(spec, side**2, dtype, StepLimits(1, 1, 1, CPU))
    assert live <= planned + SCRATCH * torch.get_num_threads()
    assert planned <= 1.1 * live
