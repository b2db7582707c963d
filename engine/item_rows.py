"""Which encoder rows a sequence reads in a step, and which of them have to be made. Knows no block and no token budget."""

from __future__ import annotations

from collections.abc import Iterable

from ..mm.errors import InputError
from ..mm.types import MultiModalFeature
from .encoder_cache import EncoderCache, User
from .request import CROSS, Request
from .types import EncodeTask


class ItemRows:
    """Items of sequences against the encoder cache.

    Args:
        whole: a prompt's items are read all at once or not at all (a prefix-LM).
        beside: rows are made beside steps and read in a later one.
    """

    def __init__(self, encoder: EncoderCache, whole: bool, beside: bool = False) -> None:
        self.encoder, self._whole, self._beside = encoder, whole, beside

    def hold(self, request: Request, items: Iterable[tuple[int, MultiModalFeature]]) -> None:
        """Announce items of a sequence: all or, with an InputError, none."""
        held: list[tuple[str, User]] = []
        for index, feature in items:
            try:
                self.encoder.hold(feature.hash, feature.range.num_embeds, request.user(index))
            except InputError:
                for key, user in held:
                    self.encoder.release(key, user)
                raise
            held.append((feature.hash, request.user(index)))

    def release(self, request: Request) -> None:
        """The sequence ends."""
        for index, feature in request.items():
            self.encoder.release(feature.hash, request.user(index))

    def read(self, request: Request, count: int, budget: int, first: bool) -> tuple[int, list[EncodeTask]]:
        """Of the next `count` tokens those before the first item whose rows are not there in this step, and what to make.

        Args:
            budget: rows that encoders may still make in this step.
            first: nothing is to be encoded in this step yet; then one item may be larger than the budget.
        """
        tasks: list[EncodeTask] = []
        stop = count
        for index, feature in self._needed(request, count):
            rows = feature.range.num_embeds
            before = max(0, feature.range.offset - request.num_computed) if index != CROSS else 0
            alone = before == 0 or self._whole  # without this item nothing can be computed
            if rows > budget and not (first and (alone or not tasks)) and feature.hash not in self.encoder:
                return min(stop, before), self._leave(request, index, tasks)
            here = self.encoder.read(feature.hash, request.user(index))
            if here is None:
                return min(stop, before), self._leave(request, index, tasks)
            request.sources.setdefault(index, "cache" if here else "encoded")
            if not here:
                tasks.append(EncodeTask(request.request_id, index, feature.hash))
                budget -= rows
                if self._beside:
                    self.encoder.postpone(feature.hash)
            if feature.hash in self.encoder.coming:
                stop = min(stop, before)
        return stop, tasks

    def stand(self, request: Request, tasks: list[EncodeTask], keep: bool) -> list[EncodeTask]:
        """The sequence is not computed in this step; what is made for it all the same. `keep`: rows that are there stay."""
        if not keep:
            self.unread(request, () if self._beside else tasks)
        return tasks if self._beside else []

    def awaits(self, request: Request) -> bool:
        """Rows of an item that it has not computed are coming."""
        if not self.encoder.coming:
            return False
        return any(feature.hash in self.encoder.coming for _, feature in self._needed(request, len(request.token_ids)))

    def unread(self, request: Request, tasks: Iterable[EncodeTask] = ()) -> None:
        """The sequence is not computed after all; `tasks` of it are not run."""
        for task in tasks:
            self.encoder.fail(task.hash)
        for index, feature in request.items():
            self.encoder.unread(feature.hash, request.user(index))

    def computed(self, request: Request) -> None:
        """Items whose tokens are all computed are not read any more."""
        features = request.features
        while request.next_feature < len(features) and features[request.next_feature].range.end <= request.num_computed:
            self.encoder.computed(features[request.next_feature].hash, request.user(request.next_feature))
            request.next_feature += 1
        if request.cross_done and request.message.cross is not None:
            self.encoder.computed(request.message.cross.hash, request.user(CROSS))

    def _leave(self, request: Request, index: int, tasks: list[EncodeTask]) -> list[EncodeTask]:
        """The tasks that remain where an item cannot be read: not that of the item it shares its range with."""
        other = index - 1
        if index < 1 or request.item(other).range.offset != request.item(index).range.offset:
            return tasks
        self.encoder.unread(request.item(other).hash, request.user(other))
        if tasks and tasks[-1].index == other:
            self.encoder.fail(tasks.pop().hash)
        return tasks

    def _needed(self, request: Request, count: int) -> Iterable[tuple[int, MultiModalFeature]]:
        """Items whose rows the next `count` tokens read."""
        if count and not request.cross_done and request.message.cross is not None:
            yield CROSS, request.message.cross
        for index in range(request.next_feature, len(request.features)):
            feature = request.features[index]
            if feature.range.offset >= request.num_computed + count:
                return
            yield index, feature
