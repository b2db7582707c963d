"""Several items that cross-attention reads: what fits, and the keys that each row attends to."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from sensorium.callers.errors import InputError
from sensorium.engine.scheduler.limits import check_cross_items
from sensorium.engine.types import ScheduledRequest
from sensorium.engine.worker.batch import KVCaches, build_batch
from sensorium.engine.worker.sequence_state import SequenceState
from sensorium.mm.rules import Rule
from sensorium.mm.types import PlaceholderRange
from sensorium.models.families.mllama.rules import rows_of_tiles
from sensorium.models.interface import CacheSpec


def items(toy, offsets, hidden=2):
    made = [toy.item(0, 6, seed=number) for number in range(len(offsets))]
    return tuple(
        replace(
            item, range=PlaceholderRange(offset, 6), geometry=replace(item.geometry, visible=Rule.of(rows_of_tiles, hidden))
        )
        for item, offset in zip(made, offsets, strict=True)
    )


def test_items_that_do_not_fit_are_refused(toy):
    several = items(toy, (1, 2, 5))
    check_cross_items(several, 18, 18)
    check_cross_items(several[:1], 1, 1)  # other checks look at single items
    with pytest.raises(InputError, match="limit_mm_per_") as caught:
        check_cross_items(several, 17, 18)
    info = caught.value.info
    assert (info.code, info.limit, info.value) == ("too_long", 17, 18)
    with pytest.raises(InputError, match="encoder_cache_bytes") as caught:
        check_cross_items(several, 18, 17)
    info = caught.value.info
    assert (info.code, info.limit, info.value) == ("too_long", 17, 18)
    check_cross_items((several[0], several[0], several[0]), 18, 6)


def test_a_row_attends_to_the_items_of_its_group_that_have_come(toy):
    """Items 0 and 1 are adjacent, item 2 is apart. Their last two rows are hidden and stored behind all others."""
    caches = KVCaches([], [0], [CacheSpec("cross", 1, 8, torch.float32, optional=True)], 4)
    cross = items(toy, (1, 2, 5))
    request = replace(toy.make_request("r", random.Random(0), media=False), prompt_token_ids=tuple(range(4, 12)))
    several, single = (SequenceState(replace(request, cross=some), rope_axes=3) for some in (cross, cross[:1]))
    without = SequenceState(request, rope_axes=3)
    blocks = ((1, 2, 3, 4, 5),)
    tasks = [
        (several, ScheduledRequest("a", 0, 7, blocks, write_cross=True)),
        (single, ScheduledRequest("b", 1, 1, ((6, 7),))),
        (without, ScheduledRequest("c", 7, 1, ((),))),
    ]
    rows = {item.hash: torch.full((6, 8), float(number)) + torch.arange(6)[:, None] / 10 for number, item in enumerate(cross)}
    batch = build_batch(tasks, rows, caches, torch.from_numpy)
    (attn,) = batch.attn
    assert attn.query_start_loc == (0, 1, 7, 8, 9)
    assert attn.seq_lens == (18, 12, 4, 1)
    assert attn.key_range.is_contiguous()
    first, stop = attn.key_range.tolist()
    assert first == [0, 0, 0, 0, 0, 8, 8, 0, 0]
    assert stop == [18, 4, 8, 8, 8, 12, 12, 4, 1]
    assert batch.cross_rows[:, 0].tolist() == pytest.approx(
        [0, 0.1, 0.2, 0.3, 1, 1.1, 1.2, 1.3, 2, 2.1, 2.2, 2.3, 0.4, 0.5, 1.4, 1.5, 2.4, 2.5]
    )
    assert build_batch(tasks[1:], rows, caches, torch.from_numpy).attn[0].key_range is None
