"""Ranks divide the items that are encoded. Here, each rank is a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sensorium.engine.connectors.disk import DiskConnector
from sensorium.engine.worker.encoder_ranks import assign_ranks, encoder_cost
from sensorium.engine.worker.encoder_runner import EncoderRunner
from sensorium.engine.worker.encoder_store import EncoderStore
from sensorium.mm.fields import BatchedField, FieldElem, FlatField
from sensorium.mm.hashing import digest
from sensorium.mm.types import ItemGeometry, MultiModalFeature, PlaceholderRange
from sensorium.models.layers.ranks import Ranks, all_ranks, rank_groups
from torch import Tensor

CPU, WIDTH = torch.device("cpu"), 3


class Wire:
    """The exchanges of ranks, and the bytes that each rank sends to each other one."""

    def __init__(self, size: int) -> None:
        self.barrier, self.slots, self.sent = Barrier(size, timeout=20), list[Tensor](), [0] * size

    def exchange(self, rank: int, own: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks in order."""
        self.sent[rank] += own.nbytes
        if self.barrier.wait() == 0:
            self.slots = [torch.empty(0)] * len(self.sent)
        self.barrier.wait()
        self.slots[rank] = own.clone()
        self.barrier.wait()
        slots = list(self.slots)
        self.barrier.wait()
        return slots


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    """Ranks that are threads of this process."""

    wire: Wire = field(kw_only=True)

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.wire.exchange(self.rank, x), 1)

    def share_rows_(self, x: Tensor, bounds: Sequence[int]) -> None:
        own = x[bounds[self.rank] : bounds[self.rank + 1]]
        x.copy_(torch.cat(self.wire.exchange(self.rank, own)))


class Encoder:
    """Encodes an item as its numbers plus 1. Fails for those below 0."""

    recordable = False

    def __init__(self) -> None:
        self.calls = list[int]()

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        self.calls.append(len(tensors["counts"]))
        if (tensors["numbers"] < 0).any():
            raise RuntimeError("negative")
        return list((tensors["numbers"] + 1).split(tensors["counts"].tolist()))


def item(seed: int, rows: int, sign: int = 1, **more: FieldElem) -> MultiModalFeature:
    numbers = torch.full((rows, WIDTH), float(seed)) * sign
    kwargs = {"numbers": FieldElem(numbers, FlatField()), "counts": FieldElem(torch.tensor(rows), BatchedField()), **more}
    return MultiModalFeature("image", kwargs, PlaceholderRange(0, rows), ItemGeometry(1, 1, rows), digest("item", seed))


def on_ranks(size: int, act: Callable[[Ranks], Any]) -> tuple[list[Any], Wire]:
    """Run a function on each rank at the same time. Return the results and the wire."""
    wire = Wire(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(act, [ThreadRanks(rank, size, wire=wire) for rank in range(size)])), wire


def encode(items: Sequence[MultiModalFeature], ranks: Ranks | None, folder: Path | None = None) -> Any:
    store = EncoderStore([DiskConnector(folder, 1 << 20)] if folder else (), "x", WIDTH, torch.float32, CPU)
    encoder: Any = Encoder()
    results = EncoderRunner(store, CPU, ranks=ranks).encode(encoder, items)
    store.flush()
    return SimpleNamespace(rows=store.rows, results=results, calls=encoder.calls)


ITEMS = [item(1, 9), item(2, 1), item(3, 2), item(4, 3), item(5, 1)]


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_encodes_its_items_and_has_the_rows_of_all(size: int) -> None:
    alone = encode(ITEMS, None)
    found, wire = on_ranks(size, lambda ranks: encode(ITEMS, ranks))
    for one in found:
        assert one.rows.keys() == alone.rows.keys()
        assert all(torch.equal(one.rows[key], rows) for key, rows in alone.rows.items())
        assert {result.hash for result in one.results} == {each.hash for each in ITEMS}
    assert sum(sum(one.calls) for one in found) == len(ITEMS)
    assert found[0].calls == [1], "the largest item is larger than the others together"
    rows = sum(each.range.num_embeds for each in ITEMS)
    flags = 2 * len(ITEMS)  # of each rank: which it has not on disk, and which failed
    assert sum(wire.sent) == rows * WIDTH * 4 + size * flags


def test_all_ranks_have_the_error_of_an_item_that_one_could_not_encode() -> None:
    items = [*ITEMS, item(9, 2, sign=-1)]
    found, _ = on_ranks(2, lambda ranks: encode(items, ranks))
    for one in found:
        errors = {result.hash: result.error for result in one.results if result.error is not None}
        assert list(errors) == [items[-1].hash]
        assert errors[items[-1].hash].code == "encoder_failed"
        assert one.rows.keys() == {each.hash for each in ITEMS}


def test_rows_that_one_rank_cannot_read_from_disk_are_encoded(tmp_path: Path) -> None:
    encode(ITEMS, None, tmp_path / "full")
    folders = [tmp_path / "full", tmp_path / "empty"]
    found, _ = on_ranks(2, lambda ranks: encode(ITEMS, ranks, folders[ranks.rank]))
    assert [sum(one.calls) for one in found] == [1, len(ITEMS) - 1]
    for one in found:
        assert one.rows.keys() == {each.hash for each in ITEMS}
        assert sorted(result.hash for result in one.results) == sorted(each.hash for each in ITEMS)
    again, _ = on_ranks(2, lambda ranks: encode(ITEMS, ranks, tmp_path / "full"))
    assert [one.calls for one in again] == [[], []]
    assert {result.source for one in again for result in one.results} == {"disk"}


def test_chunks_of_live_streams_stay_on_all_ranks() -> None:
    stream = item(7, 2, audio_stream=FieldElem(torch.tensor([0]), BatchedField()))
    found, _ = on_ranks(2, lambda ranks: encode([stream, *ITEMS], ranks))
    assert all(one.rows.keys() == {stream.hash, *(each.hash for each in ITEMS)} for one in found)
    assert sum(sum(one.calls) for one in found) == len(ITEMS) + 2


def test_items_are_assigned_by_cost() -> None:
    assert encoder_cost(item(1, 6)) - encoder_cost(item(1, 5)) == 4 * WIDTH
    assert assign_ranks([1, 9, 5, 4], 2) == [0, 0, 1, 1]
    assert assign_ranks([], 2) == []
    loads = [0, 0, 0]
    costs = [7 * number % 31 + 1 for number in range(40)]
    for cost, owner in zip(costs, assign_ranks(costs, 3), strict=True):
        loads[owner] += cost
    assert max(loads) - min(loads) <= max(costs)


def test_all_ranks_of_several_groups() -> None:
    assert all_ranks(()) is None
    assert [all_ranks(rank_groups(rank, 2, 3)) for rank in range(6)] == [Ranks(rank, 6) for rank in range(6)]
