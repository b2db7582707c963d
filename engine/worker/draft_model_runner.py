"""Runs a smaller model after each step, and returns the tokens that it expects next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ...mm.embeddings import PROMPT_EMBEDS
from ...mm.types import MultiModalFeature
from ...models.interface import CacheSpec, ForwardBatch, Model
from ..kv_cache.groups import group_layers, group_of_layer
from ..types import ScheduledRequest
from .batch import KVCaches, ModelRows, build_batch
from .draft_cache import DraftCache, DraftRows
from .encoder_store import EncoderStore
from .predictor import ComputedPart
from .sequence_state import PlacedSequence, SequenceState


@dataclass(frozen=True)
class DraftModelOptions:
    """How a draft model runs.

    Args:
        count: tokens that it predicts after each step.
        shares_encoder: its encoders equal the model's, so that it reads the same encoder rows. Otherwise it sees tokens alone.
        max_rows: rows of one of its steps.
        cross_blocks: blocks of its cache for encoder rows that are read by cross-attention; 0 for none.
        mask_token: the token that stands for each token to be predicted except the first, if all are predicted in one forward
            pass; None if they are predicted one after another.
    """

    count: int
    shares_encoder: bool
    max_rows: int
    cross_blocks: int = 0
    mask_token: int | None = None


@dataclass(eq=False)
class _Drafted:
    """A sequence as the draft model sees it.

    Args:
        features: items whose encoder rows it reads, as far as they are in the store.
        known: `SequenceState.positions`, which is another array once tokens or items were changed from outside.
    """

    placed: PlacedSequence
    features: list[MultiModalFeature]
    known: np.ndarray


@dataclass(eq=False)
class _Task:
    """The rest of the work for one sequence in this step.

    Args:
        first: index of the token to compute next. stop: number of known tokens. masks: mask tokens after the known tokens.
        sample: whether tokens are predicted. guesses: tokens predicted so far.
    """

    drafted: _Drafted
    rows: DraftRows
    cross: DraftRows | None
    first: int
    stop: int
    masks: tuple[int, ...]
    sample: bool
    guesses: list[int] = field(default_factory=list)


class DraftModelRunner:
    """Predicts tokens greedily with a model of its own. See `Predictor`.

    It computes the tokens that it has not computed yet, whatever step, prefix cache or rollback they came from: it compares the
    tokens of its cache with those of the sequence. So it needs no word about acceptance, preemption and truncation.
    """

    def __init__(
        self,
        load: Callable[[], Model],
        specs: Sequence[CacheSpec],
        cache: DraftCache,
        store: EncoderStore,
        options: DraftModelOptions,
        device: torch.device,
    ) -> None:
        """`load`: returns the model with its weights. `cache`: for its layers that cache tokens."""
        self._load, self._specs, self.cache, self._store = load, specs, cache, store
        self._options, self._device = options, device
        cross = [spec for spec in specs if spec.kind == "cross"]
        self.cross = DraftCache(cross, options.cross_blocks, cache.block_size, device) if cross else None
        self._groups = group_layers(specs)
        self._group_of = group_of_layer(self._groups)
        self.model: Model | None = None
        self._drafted: dict[str, _Drafted] = {}

    def watch(self, batch: ForwardBatch) -> ForwardBatch:
        return batch

    def states(self, hidden: Tensor) -> Tensor:
        return hidden

    def predict(self, model: Model, parts: Sequence[ComputedPart]) -> list[tuple[int, ...]]:
        keep = {part.sequence.request_id for part in parts}
        crossing = {_cross_key(part.sequence) for part in parts}
        tasks = [self._begin(part.sequence, part.task, keep, crossing) for part in parts]
        wanted = [task for task in tasks if task is not None]
        self._catch_up(wanted)
        sampled = [task for task in wanted if task.sample]
        in_turn = self._options.mask_token is None
        for _ in range(self._options.count - 1 if in_turn else 0):
            self._run([(task, 1) for task in sampled])
        for task in wanted:
            ids = task.drafted.placed.token_ids
            task.rows.token_ids = [*ids, *(task.guesses[:-1] if in_turn else ())] if task.sample else ids[: task.first]
        return [() if task is None else tuple(task.guesses) for task in tasks]

    def free(self, request_id: str) -> None:
        self.cache.free(request_id)
        self._drafted.pop(request_id, None)

    def sleep(self) -> None:
        self.model = None
        self._drafted.clear()
        for cache in self._caches():
            cache.clear()

    def load(self, model: Model) -> None:
        self.model = self._load()

    def wake_up(self, model: Model) -> None:
        for cache in self._caches():
            cache.allocate()
        self.load(model)

    def _caches(self) -> Iterator[DraftCache]:
        yield self.cache
        if self.cross is not None:
            yield self.cross

    def _begin(self, sequence: SequenceState, task: ScheduledRequest, keep: set[str], crossing: set[str]) -> _Task | None:
        """Return what is to be computed for a sequence; None if nothing is, or there is no room."""
        assert self.model is not None
        count = self._options.count
        stop = len(sequence.token_ids) if task.sample else task.num_computed + task.num_tokens
        reads_rows = self._options.shares_encoder and bool(sequence.features or sequence.message.cross)
        if not (task.sample or reads_rows) or stop + count > self.model.max_positions:
            return None  # the rows of an item are there in the step that computes it; a text can wait until it is sampled
        drafted, request_id = self._drafted_of(sequence), sequence.request_id
        cross = self._cross_rows(sequence, crossing) if self.cross is not None else None
        rows = self.cache.grow(request_id, stop + count, keep)
        if rows is None or (self.cross is not None and cross is None):
            return None
        first = min(_common(rows.token_ids, sequence.token_ids), stop - 1)
        mask = self._options.mask_token
        masks = (mask,) * (count - 1) if mask is not None and task.sample else ()
        return _Task(drafted, rows, cross, first, stop, masks, task.sample)

    def _drafted_of(self, sequence: SequenceState) -> _Drafted:
        """Return a sequence as the model sees it, made again if tokens or items were changed from outside."""
        assert self.model is not None
        drafted = self._drafted.get(sequence.request_id)
        if drafted is not None and drafted.known is sequence.positions:
            return drafted
        shares = self._options.shares_encoder
        features = [item for item in sequence.features if shares and item.modality != PROMPT_EMBEDS]
        if drafted is not None:  # keys after an item that changed are those of the old one
            same = next((i for i, (a, b) in enumerate(zip(drafted.features, features, strict=False)) if a is not b), None)
            rows = self.cache.get(sequence.request_id)
            if same is not None and rows is not None:
                del rows.token_ids[features[same].range.offset :]
        prompt = tuple(sequence.token_ids[: sequence.positions.shape[1]])
        cross = sequence.message.cross if shares else ()
        request = replace(sequence.message, prompt_token_ids=prompt, features=tuple(features), cross=cross)
        placed = PlacedSequence(request, self.model.rope_axes)
        placed.token_ids = sequence.token_ids
        drafted = self._drafted[sequence.request_id] = _Drafted(placed, features, sequence.positions)
        return drafted

    def _cross_rows(self, sequence: SequenceState, crossing: set[str]) -> DraftRows | None:
        """Return the blocks for the keys of a sequence's encoder rows; None if neither they nor the rows are there.

        Sequences with the same input share them. `stop` is 0 until they are written.
        """
        assert self.cross is not None
        key = _cross_key(sequence)
        rows = self.cross.get(key)
        if rows is not None and rows.stop:
            return rows
        if not all(item.hash in self._store.rows for item in sequence.message.cross):
            return None
        return self.cross.grow(key, sequence.cross_rows, crossing)

    def _catch_up(self, tasks: Sequence[_Task]) -> None:
        """Compute the known tokens and mask tokens of each sequence in steps of at most `max_rows` rows, and guess tokens."""
        left = list(tasks)
        while left:
            step, room = list[tuple[_Task, int]](), self._options.max_rows
            for task in left:
                count = min(task.stop + len(task.masks) - task.first, room)
                if count:
                    step.append((task, count))
                    room -= count
            self._run(step)
            left = [task for task in left if task.first < task.stop + len(task.masks)]

    def _run(self, step: Sequence[tuple[_Task, int]]) -> None:
        """Compute the next rows of each sequence, and guess a token from the last known one and from each one after it."""
        model = self.model
        if model is None or not step:
            return
        written = set[int]()
        scheduled = [(task.drafted.placed, self._schedule(task, count, written)) for task, count in step]
        needed = {item.hash for task, _ in step for item in (*task.drafted.features, *task.drafted.placed.message.cross)}
        dtype, rows = self._specs[0].dtype, self._store.rows
        encoder_rows = {name: rows[name].to(dtype) for name in needed if name in rows}
        for task, _ in step:
            task.drafted.placed.features = [item for item in task.drafted.features if item.hash in encoder_rows]
        routes = ModelRows(model.routes_by_modality)
        batch = build_batch(scheduled, encoder_rows, self._kv_caches(), self._to_device, routes)
        hidden = model.forward(replace(batch, input_ids=batch.input_ids.clamp(max=model.vocab_size - 1)))
        ends, row = list[tuple[_Task, int]](), 0
        for task, count in step:
            if task.cross is not None:
                task.cross.stop = task.drafted.placed.cross_rows
            if task.sample:
                first_sampled = max(0, task.stop - 1 - task.first)  # the row of the last known token
                ends += [(task, row + number) for number in range(first_sampled, count)]
            task.first += count
            row += count
        if ends:
            logits = model.compute_logits(hidden[[row for _, row in ends]])
            for (task, _), token in zip(ends, logits.argmax(-1).tolist(), strict=True):
                task.guesses.append(token)

    def _schedule(self, task: _Task, count: int, written: set[int]) -> ScheduledRequest:
        """Return the message of a sequence's part of a step. `written`: encoder rows that the step writes already."""
        tables = {False: tuple(task.rows.blocks), True: tuple(task.cross.blocks) if task.cross else ()}
        write = task.cross is not None and not task.cross.stop and id(task.cross) not in written
        written.add(id(task.cross))
        first, last = max(task.first, task.stop) - task.stop, task.first + count - task.stop  # after the known tokens
        return ScheduledRequest(
            task.drafted.placed.request_id,
            task.first,
            count,
            tuple(tables[group.spec.kind == "cross"] for group in self._groups),
            write_cross=write,
            draft_token_ids=(task.masks or tuple(task.guesses))[first : max(0, last)],
        )

    def _kv_caches(self) -> KVCaches:
        tokens, cross = iter(self.cache.tensors), iter(self.cross.tensors if self.cross is not None else ())
        tensors = [next(cross) if spec.kind == "cross" else next(tokens) for spec in self._specs]
        return KVCaches(tensors, self._group_of, [group.spec for group in self._groups], self.cache.block_size)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _cross_key(sequence: SequenceState) -> str:
    return " ".join(item.hash for item in sequence.message.cross)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    count = min(len(first), len(second))
    if first[:count] == second[:count]:
        return count
    return bisect_left(range(1, count + 1), True, key=lambda stop: first[:stop] != second[:stop])
