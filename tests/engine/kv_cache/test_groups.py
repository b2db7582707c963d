"""Cache groups: layers that share block tables, and the blocks and bytes they take."""

import pytest
import torch
from sensorium.engine.kv_cache.groups import CacheGroup, group_layers
from sensorium.models.interface import CacheSpec

SMALL, LARGE = CacheSpec("full", 1, 8, torch.float32), CacheSpec("full", 2, 16, torch.bfloat16)
LATENT = CacheSpec("latent", 1, 24, torch.float32)


def test_layers_of_equal_spec_share_a_group():
    groups = group_layers([SMALL, LARGE, CacheSpec("full", 1, 8, torch.float32)])
    assert [(group.spec, group.layers) for group in groups] == [(SMALL, (0, 2)), (LARGE, (1,))]


def test_blocks_hold_keys_and_values_or_latent_rows():
    assert [spec.block_bytes(4) for spec in (SMALL, LARGE, LATENT)] == [256, 512, 384]


@pytest.mark.parametrize(("window", "rows", "block"), [(1, 1, 4), (4, 1, 4), (5, 1, 4), (7, 3, 4), (16, 10, 4), (3, 9, 5)])
def test_a_sequence_holds_as_many_blocks_as_its_window_touches_at_most(window, rows, block):
    group = CacheGroup(CacheSpec("window", 1, 8, torch.float32, window), (0, 1))
    touched = [(at + rows - 1) // block - max(0, at - window + 1) // block + 1 for at in range(100)]
    assert group.max_blocks(10_000, rows, block) == max(touched)
    assert group.max_blocks(3, rows, block) == 1
    assert group.block_bytes(block) == block * 128
