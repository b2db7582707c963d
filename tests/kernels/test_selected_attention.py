"""Attention to selected keys, against a loop over rows, for steps that mix prompt chunks and decode rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged import LIMITS, REQUESTS, TYPES, case
from sensorium.kernels.attention import selected
from sensorium.kernels.attention.selected import select_keys, selected_attention, slots_of

HEADS, SCORING, DIM, TOP = (
    5,
    16,
    24,
    60,
)  # SCORING: so many that few keys have the score 0; TOP: some rows of a chunk have more keys, some fewer


def attend(q, keys, scale):
    """Return what a row `q [heads, dim]` attends to, over `keys [n, dim]`."""
    return (q.float() @ keys.float().T * scale).softmax(-1) @ keys.float()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("invariant", [False, True])
def test_rows_attend_to_the_best_keys(dtype: torch.dtype, invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected, "SCORES", 9000)  # several tiles
    torch.manual_seed(0)
    q, row, _, cache, meta = case(REQUESTS, HEADS, 1, DIM, dtype, planes=1, rest=torch.nan)
    torch.manual_seed(0)
    queries, index, _, index_cache, _ = case(REQUESTS, SCORING, 1, DIM, dtype, planes=1, rest=torch.nan)
    meta, weights, scale = replace(meta, batch_invariant=invariant), torch.randn(len(q), SCORING), DIM**-0.5
    selection = select_keys(queries, weights, index, index_cache, meta, TOP)
    out = selected_attention(q, row, cache, meta, selection, scale)
    assert {part.request for part in selection.sparse} == {1, 2, 3, 4, 5, 6}
    for request in range(len(meta.seq_lens)):
        slots, first, stop = slots_of(meta, request), *meta.query_start_loc[request : request + 2]
        keys, scored = (each.flatten(0, 3)[slots] for each in (cache, index_cache))
        for number in range(first, stop):
            count = meta.seq_lens[request] - (stop - number) + 1
            scores = weights[number] @ (queries[number].float() @ scored[:count].float().T).relu()
            chosen = scores.topk(min(TOP, count)).indices
            expected = attend(q[number], keys[chosen], scale)
            assert (out[number].float() - expected).abs().max() < LIMITS[dtype]


def test_bits_of_a_row_do_not_depend_on_chunks() -> None:
    """With `batch_invariant`, a prompt of 200 tokens gives the same bits whole and in chunks, beside other requests."""
    torch.manual_seed(1)
    q, row, _, cache, meta = case([(0, 200)], HEADS, 1, DIM, torch.float32, planes=1)
    queries, index, weights = torch.randn(200, SCORING, DIM), torch.randn(200, 1, DIM), torch.randn(200, SCORING)
    index_cache, meta = torch.zeros_like(cache), replace(meta, batch_invariant=True)
    whole = selected_attention(q, row, cache, meta, select_keys(queries, weights, index, index_cache, meta, TOP), DIM**-0.5)
    cache.zero_(), index_cache.zero_()
    for start, stop in ((0, 50), (50, 90), (90, 199), (199, 200)):
        part = replace(meta, query_start_loc=(0, stop - start), seq_lens=(stop,), slot_mapping=meta.slot_mapping[start:stop])
        rows = slice(start, stop)
        selection = select_keys(queries[rows], weights[rows], index[rows], index_cache, part, TOP)
        assert torch.equal(selected_attention(q[rows], row[rows], cache, part, selection, DIM**-0.5), whole[rows])


def test_short_contexts_need_no_scores() -> None:
    q, row, _, cache, meta = case([(3, 4), (9, 1)], HEADS, 1, DIM, torch.float32, planes=1)
    index_cache = torch.zeros_like(cache)
    selection = select_keys(q, torch.ones(len(q), HEADS), row, index_cache, meta, 64)
    assert selection.sparse == ()
    assert torch.equal(index_cache.flatten(0, 3)[meta.slot_mapping], row[:, 0])
