"""Finds the encoder rows that a sequence needs in a step, and follows the items that are encoded for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...callers.errors import InputError, media_error
from ...mm.types import MultiModalFeature, item_index
from ..types import CROSS, EncodeResult, EncodeTask
from .encoder_cache import EncoderCache, ItemUser, PinResult
from .quarantine import Quarantine
from .request import Request


class EncoderInputs:
    """Matches the items of sequences against the encoder cache.

    Args:
        quarantine: gets the items that make the encoder fail.
        all_at_once: all items of a prompt must be resident in one step (a bidirectional prompt, or bidirectional media).
        beside: encoder calls run beside steps; rows are read in a later step than the one that requests them.
    """

    def __init__(self, cache: EncoderCache, quarantine: Quarantine, all_at_once: bool, beside: bool = False) -> None:
        self.cache, self.quarantine, self._all_at_once, self._beside = cache, quarantine, all_at_once, beside
        self._tasks: dict[str, EncodeTask] = {}  # items that workers encode, by hash
        self.calls = self.disk_hits = 0  # items encoded, and items read from disk

    @property
    def encoding(self) -> list[str]:
        """Hashes of the items that workers encode and that are still needed."""
        return [key for key in self._tasks if key in self.cache.pending or not self._beside]

    def start(self, tasks: Iterable[EncodeTask]) -> None:
        """Record that workers encode these items. Earlier ones whose rows were dropped are forgotten: they get no result."""
        pending = {key: task for key, task in self._tasks.items() if key in self.cache.pending}
        self._tasks = pending | {task.hash: task for task in tasks}

    def record(self, results: Sequence[EncodeResult], requests: Mapping[str, Request]) -> list[tuple[EncodeTask, EncodeResult]]:
        """Record encoder results. Return those of items that failed, with their tasks."""
        failed = []
        for result in results:
            task = None if result.source == "dropped" else self._tasks.pop(result.hash, None)
            if task is None:  # its requests have ended meanwhile
                self.calls += result.source != "disk" and result.error is None
                continue
            request = requests.get(task.request_id)
            if request is not None:
                request.encode_seconds += result.seconds
            self.cache.pending.discard(result.hash)
            if result.error is not None:
                failed.append((task, result))
                self.cache.discard(result.hash)
                if result.item_failed:
                    self.quarantine.add(result.hash)
            elif result.source == "disk":
                self.disk_hits += 1
                if request is not None:
                    request.item_sources[task.index] = "disk"
            else:
                self.calls += 1
        return failed

    def undo(self, tasks: Iterable[EncodeTask]) -> None:
        """Mark items as not encoded, because their step was interrupted."""
        for task in tasks:
            self._tasks.pop(task.hash, None)
            self.cache.discard(task.hash)

    def reset(self) -> None:
        """Free all rows, and forget the items that workers encode. No sequence may pin any."""
        self._tasks.clear()
        self.cache.reset()

    def register(self, request: Request, items: Iterable[tuple[int, MultiModalFeature]]) -> None:
        """Register items of a sequence with the cache. On an InputError, none is registered."""
        done: list[tuple[str, ItemUser]] = []
        for index, feature in items:
            try:
                self.cache.register(feature.hash, feature.range.num_embeds, request.item_user(index))
            except InputError as error:
                for key, user in done:
                    self.cache.unregister(key, user)
                items_and_index = (request.message.cross, CROSS - index) if index <= CROSS else (request.features, index)
                raise media_error(error, *item_index(*items_and_index)) from None
            done.append((feature.hash, request.item_user(index)))

    def unregister(self, request: Request) -> None:
        """Forget all items of a sequence that ends."""
        for index, feature in request.items():
            self.cache.unregister(feature.hash, request.item_user(index))
        self.discard_chunks(request)

    def discard_chunks(self, request: Request) -> None:
        """Free the rows of chunks of a live stream, and end their encoder calls: no other sequence has these chunks."""
        for feature in request.features:
            if feature.stream is not None:
                self.cache.discard(feature.hash)

    def schedule(self, request: Request, count: int, budget: int, first: bool) -> tuple[int, list[EncodeTask]]:
        """Pin the rows that the next `count` tokens need.

        Args:
            budget: rows that encoders may still make in this step.
            first: True if no item is encoded in this step yet; one item may then exceed the budget.

        Returns:
            The number of tokens that can be computed now (up to the first item without encoder rows), and the items to encode.
        """
        tasks: list[EncodeTask] = []
        if request.cross_written and request.next_feature == len(request.features):
            return count, tasks
        stop = count
        for index, feature in self._needed(request, count):
            rows = feature.range.num_embeds
            before = max(0, feature.range.offset - request.num_computed) if index > CROSS else 0
            required = before == 0 or self._all_at_once  # without this item the sequence can compute nothing
            over_budget = rows > budget and not (first and (required or not tasks))
            if over_budget and feature.hash not in self.cache:
                return min(stop, before), self._unpin_shared(request, index, tasks)
            result = self.cache.pin(feature.hash, request.item_user(index))
            if result is PinResult.NO_ROOM:
                return min(stop, before), self._unpin_shared(request, index, tasks)
            request.item_sources.setdefault(index, "cache" if result is PinResult.RESIDENT else "encoded")
            if result is PinResult.TO_ENCODE:
                tasks.append(EncodeTask(request.request_id, index, feature.hash))
                budget -= rows
                if self._beside:
                    self.cache.pending.add(feature.hash)
            if feature.hash in self.cache.pending:
                stop = min(stop, before)
        return stop, tasks

    def skip(self, request: Request, tasks: list[EncodeTask], keep: bool) -> list[EncodeTask]:
        """Undo `schedule` for a sequence that computes nothing in this step.

        Return the tasks that still have to run: all of them if encoder calls run beside steps, else none. `keep`: the rows
        stay pinned.
        """
        if not keep:
            self.unpin(request, () if self._beside else tasks)
        return tasks if self._beside else []

    def is_pending(self, request: Request) -> bool:
        """Return whether an item that the sequence has not computed is still being encoded."""
        if not self.cache.pending:
            return False
        return any(feature.hash in self.cache.pending for _, feature in self._needed(request, len(request.token_ids)))

    def unpin(self, request: Request, tasks: Iterable[EncodeTask] = ()) -> None:
        """Unpin all items of a sequence. `tasks`: its encode tasks that will not run."""
        for task in tasks:
            self.cache.discard(task.hash)
        for index, feature in request.items():
            self.cache.unpin(feature.hash, request.item_user(index))

    def mark_computed(self, request: Request) -> None:
        """Unpin the items whose tokens are all computed."""
        features = request.features
        while request.next_feature < len(features) and features[request.next_feature].range.end <= request.num_computed:
            self.cache.mark_computed(features[request.next_feature].hash, request.item_user(request.next_feature))
            request.next_feature += 1
        if request.cross_written and request.message.cross:
            for index, item in request.cross_items():
                self.cache.mark_computed(item.hash, request.item_user(index))

    def _unpin_shared(self, request: Request, index: int, tasks: list[EncodeTask]) -> list[EncodeTask]:
        """Unpin the item before `index` if they share a range, since neither can be computed. Return the remaining tasks."""
        other = index - 1
        if index < 1 or request.item(other).range.offset != request.item(index).range.offset:
            return tasks
        self.cache.unpin(request.item(other).hash, request.item_user(other))
        if tasks and tasks[-1].index == other:
            self.cache.discard(tasks.pop().hash)
        return tasks

    def _needed(self, request: Request, count: int) -> Iterable[tuple[int, MultiModalFeature]]:
        """Yield the items whose rows the next `count` tokens need."""
        if count and not request.cross_written:
            yield from request.cross_items()
        for index in range(request.next_feature, len(request.features)):
            feature = request.features[index]
            if feature.range.offset >= request.num_computed + count:
                return
            yield index, feature
