"""Prompts in, answers out, in one process: media work in threads beside the engine's steps. Knows no chat and no checkpoint."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count

import torch

from ..processors.text import Tokenizer
from .core import EngineCore
from .input import Prepared
from .output import Assembly
from .runner import describe
from .sampler import mix
from .sampling_params import SamplingParams
from .types import EngineRequest, RequestOutput, TokenOutput

_MEDIA_BYTES = 512 << 20  # processed items held for running requests; beyond it no more are prepared


@dataclass(frozen=True)
class Job:
    """One prompt: how to prepare it (in a worker thread if it has media), and what to ask of the answer."""

    prepare: Callable[[], Prepared]
    params: SamplingParams
    has_media: bool = True


@dataclass(frozen=True)
class _Pending:
    index: int
    number: int  # of the request, over the driver's life
    job: Job
    prepared: Future[Prepared]


class Driver:
    """Owns the engine's loop. Several `serve` generators may be open, in several threads; whichever is asked steps for all."""

    def __init__(
        self, core: EngineCore, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], seed: int = 0, workers: int = 2
    ) -> None:
        self.core, self._tokenizer, self._eos, self._seed = core, tokenizer, eos_token_ids, seed
        self._pool = ThreadPoolExecutor(workers, "sensorium-media", initializer=torch.set_num_threads, initargs=(1,))
        self._window = 2 * core.scheduler.max_num_seqs  # prompts prepared or running at once
        self._ahead = 4 * workers  # prompts with media being prepared
        self._owners: dict[str, Assembly] = {}
        self._numbers = count()
        self._home, self._threads = threading.get_ident(), torch.get_num_threads()
        self._lock = threading.RLock()  # callers' threads take turns at the engine

    def serve(self, jobs: Sequence[Job], partial: bool = False) -> Iterator[tuple[int, RequestOutput]]:
        """(index, output) of each job as it finishes, with `partial` also after every step that added to it.

        A job that fails yields an output with `error`; the others go on. Closing the generator, or an exception in
        it, aborts what is left and frees its memory.
        """
        coming = deque(enumerate(jobs))
        pending: deque[_Pending] = deque()
        live: dict[int, Assembly] = {}
        try:
            while coming or pending or live:
                while coming and self._room(pending, live):
                    pending.append(self._submit(*coming.popleft()))
                while pending and (not live or pending[0].prepared.done()):
                    first = pending.popleft()
                    live[first.index] = self._start(first)
                yield from self._advance(live, partial)
        finally:
            for waiting in pending:
                waiting.prepared.cancel()
            with self._lock:
                for assembly in live.values():
                    self._free(assembly)
                if not self._owners:
                    self.core.step()  # nothing is left to compute: the worker only frees

    def _advance(self, live: dict[int, Assembly], partial: bool) -> list[tuple[int, RequestOutput]]:
        """One step of the engine for all callers, and what there is to tell of these; finished ones leave `live`."""
        with self._lock:
            if any(not assembly.finished for assembly in live.values()):
                self._step()
            outputs = []
            for index, assembly in [entry for entry in live.items() if entry[1].changed]:
                assembly.changed = False
                if assembly.finished:
                    del live[index]
                if assembly.finished or partial:
                    outputs.append((index, assembly.output()))
            return outputs

    def _submit(self, index: int, job: Job) -> _Pending:
        prepared = self._pool.submit(job.prepare) if job.has_media else _done(job.prepare)
        return _Pending(index, next(self._numbers), job, prepared)

    def _room(self, pending: deque[_Pending], live: dict[int, Assembly]) -> bool:
        """Whether another prompt may be prepared: bounded in number, in media under way, and in bytes held."""
        if sum(waiting.job.has_media for waiting in pending) >= self._ahead:
            return False
        held = sum(assembly.media_bytes for assembly in live.values())
        return len(pending) + len(live) < self._window and (held < _MEDIA_BYTES or (not pending and not live))

    def _start(self, pending: _Pending) -> Assembly:
        """Hand the prepared prompt to the engine; whatever is wrong with it ends in the assembly."""
        assembly = Assembly(str(pending.number), pending.job.params, self._tokenizer)
        try:
            prepared = pending.prepared.result()
            assembly.prompt, assembly.prompt_token_ids = prepared.prompt, prepared.token_ids
            assembly.timings.update(prepared.timings)
            assembly.items, assembly.media_bytes = prepared.items, prepared.num_bytes
            for request in self._requests(pending, prepared, tuple(assembly.answers)):
                with self._lock:
                    self.core.add(request)
                    self._owners[request.request_id] = assembly
        except Exception as error:
            with self._lock:
                self._free(assembly)
            assembly.fail(describe(error))
        return assembly

    def _requests(self, pending: _Pending, prepared: Prepared, names: tuple[str, ...]) -> Iterator[EngineRequest]:
        params = pending.job.params
        base = params.seed if params.seed is not None else mix(mix(self._seed) + pending.number)
        words = tuple(dict.fromkeys(ids for word in params.bad_words or () for ids in bad_word_ids(word, self._tokenizer)))
        for i, name in enumerate(names):
            own = replace(params, n=1, prompt_logprobs=params.prompt_logprobs if i == 0 else None) if params.n > 1 else params
            seed = mix(mix(base) ^ i)
            yield EngineRequest(name, prepared.token_ids, own, self._eos, prepared.features, seed=seed, bad_word_ids=words)

    def _step(self) -> None:
        if threading.get_ident() != self._home and torch.get_num_threads() == 1:
            torch.set_num_threads(self._threads)  # a thread started after the media workers inherits their one
        try:
            outputs = self.core.step()
        except BaseException:  # half a step is done: nobody's state can be trusted
            for assembly in set(self._owners.values()):
                self._free(assembly)
                assembly.fail("the engine's step was interrupted; ask again")
            raise
        for output in outputs:
            self._deliver(self._owners[output.request_id], output)

    def _deliver(self, assembly: Assembly, output: TokenOutput) -> None:
        try:
            if assembly.add(output):
                self.core.abort(output.request_id)
            if output.request_id not in assembly.open:
                del self._owners[output.request_id]
        except Exception as error:
            self._free(assembly)
            assembly.fail(describe(error))

    def _free(self, assembly: Assembly) -> None:
        for name in assembly.open:
            self.core.abort(name)
            self._owners.pop(name, None)


def _done(prepare: Callable[[], Prepared]) -> Future[Prepared]:
    """Prepared here and now."""
    future: Future[Prepared] = Future()
    try:
        future.set_result(prepare())
    except Exception as error:
        future.set_exception(error)
    return future


def bad_word_ids(word: str, tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    """The token sequences a word has at the start of a text and after a space."""
    for spelled in (word.lstrip(), " " + word.lstrip()):
        ids = tuple(tokenizer.encode(spelled, add_special_tokens=False))
        if ids:
            yield ids
