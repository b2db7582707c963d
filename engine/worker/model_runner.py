"""Runs one step on one device: encode, build the batch, forward, sample. Knows no queue and no block pool."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..kernels.dispatch import using
from ..mm.errors import InputError
from ..mm.types import name_item
from ..models.interface import Model
from .batch import Caches, Row, Track, build_batch
from .decode_graphs import DecodeGraphs
from .encoder_store import EncoderStore
from .encoding import Encoding, is_finite
from .failures import describe
from .kv import allocate_caches, group_layers, group_of_layer
from .pooling import Pooling, pool
from .quarantine import bisect
from .sampler import NOT_FINITE, Sampled, gather_logprobs, sample, sample_together
from .staging import Staging, fetch
from .structured import GrammarFactory, StructuredOutputs
from .types import EncodeResult, Logprob, ScheduledRequest, SchedulerOutput, StepOutput, TokenOutput

_LOGITS_ROWS = 256  # prompt rows whose logits are held at once
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Launched:
    """A step on its way.

    Args:
        collect: waits for it; to be called once.
        index: place of each sequence in `tokens`.
        tokens: int64 `[sequences]` on the device, what each of them got; None where only `collect` can say.
    """

    collect: Callable[[], StepOutput]
    index: Mapping[str, int] = field(default_factory=dict)
    tokens: Tensor | None = None


class ModelRunner:
    """The one path of prompt and decode rows. All it needs arrives in SchedulerOutput; it keeps tokens, rows and caches."""

    def __init__(
        self,
        model: Model,
        num_blocks: Sequence[int],
        block_size: int,
        device: torch.device,
        store: EncoderStore,
        grammars: GrammarFactory | None = None,
        invariant: bool = False,
        prefill: str = "causal",
        kernels: str = "",
        overlaps: bool = False,
    ) -> None:
        """`num_blocks`: of each cache group. `prefill`: as in SchedulerLimits. `kernels`: as in EngineConfig.

        `grammars`: of the checkpoint's tokenizer; without it none are asked for. `overlaps`: a step may start before the
        tokens of the one before are on the host, and items are encoded beside steps that do not need them.
        """
        self.model, self.device, self.store, self.grammars = model, device, store, grammars
        groups = group_layers(model.cache_specs)
        self._specs, self._num_blocks = model.cache_specs, num_blocks
        specs = [group.spec for group in groups]
        self.caches = Caches(self._allocate(block_size), group_of_layer(groups), specs, block_size, invariant)
        self.prefill, self.kernels = prefill, kernels
        self.tracks: dict[str, Track] = {}
        self.graphs, self.staging, self.overlaps = DecodeGraphs(device), Staging(device), overlaps
        self.encoding = Encoding(store, device)
        self.draws_there = device.type != "cpu"  # all rows at once; on a CPU one by one, and looked at

    def check_grammar(self, wanted: StructuredOutputs) -> None:
        """InputError when it cannot be compiled."""
        if self.grammars is None:
            raise InputError("structured_outputs need a tokenizer, which this engine was made without")
        self.grammars.check(wanted)

    def sleep(self, empty: Model) -> None:
        """Give back what takes memory, all that sequences had here with it. `empty`: the model without any."""
        self.model, self.caches = empty, replace(self.caches, tensors=())
        self.tracks.clear()
        self.encoding.clear()
        self.graphs, self.staging = DecodeGraphs(self.device), Staging(self.device)
        gc.collect()
        _give_back(self.device)

    def wake(self, make: Callable[[], Model]) -> None:
        """Take it again, with a model that is full. An exception of `make` leaves all asleep."""
        tensors = self._allocate(self.caches.block_size)
        self.model = make()
        self.caches = replace(self.caches, tensors=tensors)
        _give_back(self.device)

    def _allocate(self, block_size: int) -> Sequence[Tensor]:
        return allocate_caches(self._specs, self._num_blocks, block_size, self.device)

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput, after: Launched | None = None) -> Launched:
        """Start one step; `after`: the step before, if each row is computed from the token that its sequence got there."""
        with using(self.kernels), self.staging:
            return self._launch(output, after)

    def _launch(self, output: SchedulerOutput, after: Launched | None) -> Launched:
        self._update(output)
        items = [self.tracks[task.request_id].item(task.index) for task in output.encode]
        encoded = () if self.overlaps else self.encoding.encode(self.model, items)
        failed = {result.hash: result.error for result in encoded if result.error is not None}
        rows: list[Row] = []
        results: dict[str, TokenOutput] = {}
        for task in output.scheduled:
            track = self.tracks[task.request_id]
            if task.sample:  # a step that was interrupted may have chosen a token that nobody heard of
                del track.token_ids[task.num_computed + task.num_tokens :]
            broken = next((item.hash for item in track.read_items(task) if item.hash in failed), None) if failed else None
            if broken is None:
                rows.append((track, task))
            else:
                error = f"{name_item(track.features, broken)}: {failed[broken]}"
                results[task.request_id] = TokenOutput(task.request_id, (), error=error)
        hidden, starts = self._forward(rows, after) if rows else (None, ())
        if self.overlaps:
            self.encoding.begin(self.model, items)  # behind the forward, which needs none of it: beside it
        if hidden is not None:
            if self.overlaps and all(_is_free(*row, self.draws_there) for row in rows):
                return self._choose_there(output, rows, hidden, starts)
            results.update((result.request_id, result) for result in self._results(rows, hidden, starts))
        tokens = tuple(results[task.request_id] for task in output.scheduled)
        return Launched(lambda: StepOutput(tokens, encoded or self._arrived(wait=not tokens)))

    def _choose_there(
        self,
        output: SchedulerOutput,
        rows: Sequence[Row],
        hidden: Tensor,
        starts: Sequence[int],
    ) -> Launched:
        """A token of every sequence on the device, and what the host will make of it."""
        logits = self.model.compute_logits(self._pick(hidden, [stop - 1 for stop in starts[1:]]))
        ahead = rows[0][1].num_computed + rows[0][1].num_tokens - len(rows[0][0].token_ids)
        sampling = sample_together(logits, [track.row for track, _ in rows], self.staging, ahead)
        finite = fetch(is_finite(hidden))

        def collect() -> StepOutput:
            fine, results = finite(), []
            for (track, task), found, start, stop in zip(rows, sampling.read(), starts, starts[1:], strict=False):
                whole = all(fine[start:stop])
                results.append(_book(track, found) if whole else TokenOutput(task.request_id, (), error=NOT_FINITE))
            return StepOutput(tuple(results), self._arrived(wait=False))

        return Launched(collect, {task.request_id: i for i, task in enumerate(output.scheduled)}, sampling.tokens)

    @torch.inference_mode()
    def _arrived(self, wait: bool) -> tuple[EncodeResult, ...]:
        """What became of items that were encoded beside steps. `wait`: there is nothing else to do."""
        with using(self.kernels):
            return self.encoding.arrived(self.model, wait)

    def _update(self, output: SchedulerOutput) -> None:
        for request_id in output.finished:
            self.tracks.pop(request_id, None)
        self.encoding.drop(output.free_encoder)
        for tensor, number in zip(self.caches.tensors, self.caches.group_of, strict=True):
            if output.zero_blocks and output.zero_blocks[number]:
                tensor[:, list(output.zero_blocks[number])] = 0
        for message in output.new_requests:
            self.tracks[message.request_id] = Track(message, self.model.rope_axes, self.prefill, grammars=self.grammars)
        for change in output.updates:
            self.tracks[change.request_id].update(change)

    def _forward(self, rows: list[Row], after: Launched | None) -> tuple[Tensor, Sequence[int]]:
        """Hidden rows, and where those of each sequence begin."""
        model = self.model
        batch = build_batch(rows, self.store.rows, self.caches, self.staging, model.routes_by_modality, model.adapters)
        if after is not None:
            assert after.tokens is not None, "that step's tokens were never on the device"
            where = self.staging(np.array([after.index[task.request_id] for _, task in rows]))
            batch = replace(batch, input_ids=after.tokens.index_select(0, where))
        return self.graphs(model.forward, batch), batch.attn[0].query_start

    def _results(self, rows: list[Row], hidden: Tensor, starts: Sequence[int]) -> list[TokenOutput]:
        # logits of a sampled row say by themselves whether it is finite, so steps of nothing else are not looked at twice
        decode = all(task.sample and task.num_tokens == 1 and track.message.pooling is None for track, task in rows)
        whole = [True] * len(rows) if decode else _whole(is_finite(hidden), starts)
        good = [(row, start) for row, start, fine in zip(rows, starts, whole, strict=False) if fine]
        prompts = {task.request_id: self._prompt_logprobs(track, task, hidden, start) for (track, task), start in good}
        lasts = [(row[0], stop - 1) for row, stop, fine in zip(rows, starts[1:], whole, strict=True) if row[1].sample and fine]
        sampled = self._sample(lasts, hidden)
        return [
            _with_prompt(sampled.get(task.request_id) or TokenOutput(task.request_id, ()), prompts[task.request_id])
            if fine
            else TokenOutput(task.request_id, (), error=NOT_FINITE)
            for (_, task), fine in zip(rows, whole, strict=True)
        ]

    def _sample(self, lasts: Sequence[tuple[Track, int]], hidden: Tensor) -> dict[str, TokenOutput]:
        """One token for each sequence from its last row, or what it is pooled to; one that cannot be sampled fails alone."""
        results = self._pool([(track, end) for track, end in lasts if track.message.pooling is not None], hidden)
        lasts = [(track, end) for track, end in lasts if track.message.pooling is None]
        for (track, _), found in zip(lasts, bisect(lasts, partial(self._choose, hidden)), strict=True):
            results[track.message.request_id] = _book(track, found)
        return results

    def _pool(self, lasts: Sequence[tuple[Track, int]], hidden: Tensor) -> dict[str, TokenOutput]:
        """What the sequences are wanted for instead of an answer."""
        wanted = {track.message.request_id: track.message.pooling or Pooling() for track, _ in lasts}
        if not lasts:
            return {}
        rows = pool(hidden[[end for _, end in lasts]], list(wanted.values()), self.model.compute_logits)
        return {
            name: TokenOutput(name, (), pooled=made) if made.isfinite().all() else TokenOutput(name, (), error=NOT_FINITE)
            for name, made in zip(wanted, rows, strict=True)
        }

    def _choose(self, hidden: Tensor, lasts: Sequence[tuple[Track, int]]) -> list[Sampled | Exception]:
        last = self._pick(hidden, [end for _, end in lasts])
        return sample(self.model.compute_logits(last), [track.row for track, _ in lasts], self.staging)

    def _pick(self, hidden: Tensor, ends: Sequence[int]) -> Tensor:
        """These rows; they are in order, each once."""
        return hidden if len(ends) == hidden.shape[0] else hidden[self.staging(np.array(ends))]

    def _prompt_logprobs(
        self, track: Track, task: ScheduledRequest, hidden: Tensor, start: int
    ) -> tuple[dict[int, Logprob] | None, ...] | None:
        """Extend the prompt's log probabilities by this chunk; all of them once the prompt is complete, else None.

        Of a prompt that was rolled back meanwhile, those of what stayed.
        """
        count, done = track.message.params.prompt_logprobs, track.prompt_logprobs
        if count is None or done is None:
            return None
        prompt = track.message.prompt_token_ids[: track.prompt_length]
        del done[len(prompt) :]
        if not done:
            done.append(None)  # nothing predicts the first token
        stop = min(task.num_computed + task.num_tokens, len(prompt) - 1)
        for first in range(len(done) - 1, stop, _LOGITS_ROWS):
            last = min(first + _LOGITS_ROWS, stop)
            base = start - task.num_computed
            logits = self.model.compute_logits(hidden[base + first : base + last])
            done.extend(gather_logprobs(logits, prompt[first + 1 : last + 1], [count] * (last - first)))
        if len(done) < len(prompt):
            return None
        track.prompt_logprobs = None
        return tuple(done)


def _give_back(device: torch.device) -> None:
    """What allocators keep of memory that nobody uses."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc, which keeps what lies between what is used
        if trim is not None:
            trim(0)


def _book(track: Track, found: Sampled | Exception) -> TokenOutput:
    """What was sampled for a sequence, which now holds it."""
    name = track.message.request_id
    if isinstance(found, Exception):
        _log.warning("sampling failed", exc_info=found if not isinstance(found, InputError) else None)
        reason = describe(found)
        told = reason if reason == NOT_FINITE else f"sampling failed: {reason}; ask again with other parameters"
        return TokenOutput(name, (), error=told)
    track.token_ids.append(found.token)
    return TokenOutput(name, (found.token,), None if found.logprobs is None else (found.logprobs,))


def _is_free(track: Track, task: ScheduledRequest, drawn: bool) -> bool:
    """Its token follows from its logits alone, and no more is wanted of the step. `drawn`: it need not be the likeliest."""
    asked = track.message.pooling is not None or track.message.params.prompt_logprobs is not None
    free = not track.row.constrained if drawn else track.row.plain
    return task.sample and free and not asked


def _with_prompt(result: TokenOutput, logprobs: tuple[dict[int, Logprob] | None, ...] | None) -> TokenOutput:
    return result if logprobs is None else replace(result, prompt_logprobs=logprobs)


def _whole(finite: Tensor, starts: Sequence[int]) -> list[bool]:
    """Whether all rows of each sequence are finite."""
    if finite.all():
        return [True] * (len(starts) - 1)
    return [bool(finite[start:stop].all()) for start, stop in pairwise(starts)]
