"""The part of a decoder that a rank holds: a part of each layer (tensor parallelism), or whole layers; how results are joined.

A layer's weights are split by outputs, never by inputs. One rank computes each number, from a whole sum, so that it has the
same bits as on one device. Parts are gathered where the next layer reads all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

_groups: dict[tuple[int, ...], Any] = {}  # ranks -> their process group; all ranks together use torch's default group


def _gather_columns(x: Tensor, members: list[int]) -> Tensor:
    sent = x.contiguous().view(torch.uint8)  # gloo knows few dtypes
    parts = [torch.empty_like(sent) for _ in members]
    torch.distributed.all_gather(parts, sent, group=_groups.get(tuple(members)))
    return torch.cat(parts, 1).view(x.dtype)


def _gather_on_meta(x: Tensor, members: list[int]) -> Tensor:
    return x.new_empty(len(x), len(members) * x.shape[1])


def _share(x: Tensor, source: int, members: list[int]) -> Tensor:
    shared = x.clone(memory_format=torch.contiguous_format)
    torch.distributed.broadcast(shared.view(torch.uint8), members[source], group=_groups.get(tuple(members)))
    return shared


_library = torch.library.Library("sensorium", "FRAGMENT")  # an operator, so that recorded steps repeat it
_library.define("gather_columns(Tensor x, int[] members) -> Tensor")
_library.impl("gather_columns", _gather_on_meta, "Meta")
_library.define("share_from_rank(Tensor x, int source, int[] members) -> Tensor")
_library.impl("share_from_rank", lambda x, source, members: torch.empty_like(x), "Meta")
for _device in ("CPU", "CUDA"):
    _library.impl("gather_columns", _gather_columns, _device)
    _library.impl("share_from_rank", _share, _device)


@dataclass(frozen=True)
class Ranks:
    """A group of processes that divide a model in one of the two ways, as one of them sees the group.

    Args:
        rank: number of this process in the group, from 0.
        size: number of processes in the group, at least 2.
        layers: the group divides the list of the decoder's layers (pipeline); if False, it divides the outputs of each layer
            (tensor).
        experts: the group, which divides outputs, also divides the experts of mixtures.
        members: ranks of these processes in torch's default process group, in order; () for all of them.
    """

    rank: int
    size: int
    layers: bool = False
    experts: bool = False
    members: tuple[int, ...] = ()

    @property
    def _members(self) -> Sequence[int]:
        return self.members or range(self.size)

    def divides(self, *counts: int) -> bool:
        """Return whether each count splits into equal parts."""
        return all(count % self.size == 0 for count in counts)

    def part(self, count: int) -> slice:
        """Return this rank's part of `count` outputs, which `size` divides."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def range_of(self, rank: int, count: int) -> range:
        """Return which of `count` layers or experts a rank has. Earlier ranks have earlier ones, and at most one more."""
        starts = [-(-count * number // self.size) for number in (rank, rank + 1)]
        return range(*starts)

    def share(self, x: Tensor, add: Tensor | None, source: int) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the output to be added to it, `[rows, hidden]`, of the rank `source`. All call it."""
        both = torch.stack((x, torch.zeros_like(x) if add is None else add))
        shared: Tensor = torch.ops.sensorium.share_from_rank(both, source, self._members)
        return shared[0], shared[1]

    def share_rows_(self, x: Tensor, bounds: Sequence[int]) -> None:
        """Fill `x [rows, dim]` with the rows of all ranks: a rank has rows `bounds[rank]` to `bounds[rank + 1]`.

        All ranks call it. Unlike the other two, it is no operator: its callers read numbers of rows on the host, so that
        their steps are not recorded.
        """
        members, group = self._members, _groups.get(tuple(self._members))
        parts = [(source, x[start:end]) for source, (start, end) in zip(members, pairwise(bounds), strict=True) if end > start]
        for work in [
            torch.distributed.broadcast(part.view(torch.uint8), source, group=group, async_op=True) for source, part in parts
        ]:
            work.wait()

    def gather(self, x: Tensor) -> Tensor:
        """Return the columns of all ranks in their order: `[rows, part]` -> `[rows, size * part]`. All ranks call it."""
        gathered: Tensor = torch.ops.sensorium.gather_columns(x, self._members)
        return gathered


def rank_groups(rank: int, tensor_size: int, pipeline_size: int, experts: bool = False) -> tuple[Ranks, ...]:
    """Return the tensor group and the pipeline group of a process. A group of one process is left out.

    Args:
        rank: number of the process, from 0. Those of one pipeline stage have consecutive numbers.
        tensor_size: `tensor_parallel_size`. pipeline_size: `pipeline_parallel_size`.
        experts: `enable_expert_parallel`.
    """
    stage, part = divmod(rank, tensor_size)
    all_ranks = tensor_size == 1 or pipeline_size == 1
    of_stage = () if all_ranks else tuple(range(rank - part, rank - part + tensor_size))
    outputs = Ranks(part, tensor_size, experts=experts, members=of_stage)
    num_ranks = tensor_size * pipeline_size
    layers = Ranks(stage, pipeline_size, True, members=() if all_ranks else tuple(range(part, num_ranks, tensor_size)))
    return tuple(group for group in (outputs, layers) if group.size > 1)


def all_ranks(groups: Sequence[Ranks]) -> Ranks | None:
    """Return all ranks of a model as one group. `groups`: those of this process; without any, the result is None."""
    rank, size = 0, 1
    for group in groups:  # that of outputs comes first
        rank, size = group.rank * size + rank, group.size * size
    return Ranks(rank, size) if groups else None


def make_process_groups(tensor_size: int, pipeline_size: int, timeout: timedelta) -> None:
    """Make the process groups of all ranks. Each process calls it after `init_process_group`.

    Args:
        timeout: the longest wait of one rank for another; torch does not take that of the default group.
    """
    for rank in range(tensor_size * pipeline_size):
        for group in rank_groups(rank, tensor_size, pipeline_size):
            if group.members and group.members not in _groups:
                _groups[group.members] = torch.distributed.new_group(list(group.members), timeout)


@dataclass(frozen=True)
class RankTraffic:
    """Messages and bytes that a rank sends to each other rank in a step.

    Args:
        messages: their number.
        row_bytes: for each row of the step; of experts, the mean over the ranks.
        logits_row_bytes: for each row of which logits are computed.
        encoder_row_bytes: for each encoder row, if ranks divide items; the mean over the ranks. A step that encodes also
            sends up to two bytes for each item.
    """

    messages: int
    row_bytes: int
    logits_row_bytes: int
    encoder_row_bytes: int = 0

    def __str__(self) -> str:
        logits = f", {self.logits_row_bytes:,} more per row with logits" if self.logits_row_bytes else ""
        encoder = f", {self.encoder_row_bytes:,} per encoder row" if self.encoder_row_bytes else ""
        return f"{self.row_bytes:,} bytes per row{logits}{encoder}, in {self.messages} messages per step"


def rank_traffic(model: nn.Module) -> RankTraffic | None:
    """Return what a rank sends, by the widths of its modules; None for a model that is not divided.

    A module that sends something says so in `sent_bytes`: bytes of a row to each other rank, 0 if it is not divided.
    """
    sent = [(name, int(getattr(module, "sent_bytes", 0))) for name, module in model.named_modules()]
    sizes = {name: size for name, size in sent if size}
    logits = sum(size for name, size in sizes.items() if name.startswith("head."))
    return RankTraffic(len(sizes), sum(sizes.values()) - logits, logits) if sizes else None


@dataclass(frozen=True)
class Rows:
    """The rows of a stored tensor that a rank holds: `slices` of its `total` rows, in this order."""

    total: int
    slices: Sequence[slice]

    def of(self, stored: Tensor) -> Tensor:
        """Return the rows. A tensor of another length is returned as it is, and its shape is refused later."""
        if not stored.dim() or len(stored) != self.total:
            return stored
        return stored[self.slices[0]] if len(self.slices) == 1 else torch.cat([stored[rows] for rows in self.slices])


def absent_caches(model: object) -> frozenset[int]:
    """Return which entries of a model's `cache_specs` only other ranks read and write."""
    absent: frozenset[int] = getattr(getattr(model, "language_model", None), "absent_caches", frozenset())
    return absent


def is_below(name: str, paths: Collection[str]) -> bool:
    """Return whether a name with dots is below one of the paths."""
    return bool(paths) and any(name[:end] in paths for end, letter in enumerate(name) if letter == ".")


_ranks: ContextVar[Sequence[Ranks]] = ContextVar("sensorium_ranks", default=())


@contextmanager
def building_for(*groups: Ranks | None) -> Iterator[None]:
    """Build decoder layers with the part of their weights that this process has in these groups."""
    token = _ranks.set([group for group in groups if group is not None])
    try:
        yield
    finally:
        _ranks.reset(token)


def current_ranks(layers: bool = False) -> Ranks | None:
    """Return the ranks of `building_for` if they divide the outputs of each layer; with `layers`, if they divide the layers."""
    return next((group for group in _ranks.get() if group.layers == layers), None)
