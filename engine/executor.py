"""Computes the steps of a core: the interface `Executor`, and its implementation in this process.

Every argument and result is plain data that `codec` can encode, so that an implementation may send it to several processes
that hold parts of the model: each gets every message, in the same order, and the first one answers.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..callers.errors import InputError, is_out_of_memory
from ..kernels.bodies import bodies_in_use
from ..models.interface import Model, SupportsClassification, SupportsPooling
from .core_info import CoreInfo
from .errors import error_info
from .logits_processors import register_path
from .stats import TransferStats
from .threads import use_threads
from .types import (
    GrammarResult,
    KVLookupResult,
    KVTransfer,
    LoadedAdapter,
    SchedulerOutput,
    StepHandle,
    StepOutput,
    WorkerUpdate,
)
from .worker.model_runner import AsyncStepOutput, ModelRunner


class Executor(Protocol):
    """Computes steps. One thread uses it.

    It keeps sequences, encoder rows, KV caches and grammars as the messages say, and decides nothing about them.
    """

    def describe(self, max_model_len: int, max_num_seqs: int) -> CoreInfo:
        """Return the constants of a core with these limits of its scheduler."""

    def bind_thread(self, num_threads: int) -> None:
        """Prepare the calling thread for the other methods. `num_threads`: number of torch's threads."""

    def execute(self, output: SchedulerOutput) -> StepHandle:
        """Start a step. It raises if the step cannot start.

        The step before need not be polled yet if `output.ahead`. Otherwise the results of steps that were not polled are lost.
        """

    def poll(self, handle: StepHandle) -> StepOutput:
        """Wait for a step and return its results, and those of encoder calls that have finished. Raise if the step failed."""

    def update(self, update: WorkerUpdate) -> tuple[GrammarResult, ...]:
        """Change what the workers keep beside steps. Return the grammars whose compilation has ended, each once."""

    def transfer(self, transfer: KVTransfer) -> tuple[KVLookupResult, ...]:
        """Copy KV blocks between the caches and the connectors. If asked, return the lookups that have ended, each once.

        What a lookup has read is kept until it is placed or cancelled. An exception leaves the blocks to be placed undefined.
        """

    def transfer_stats(self) -> tuple[TransferStats, ...]:
        """Return what each connector did."""

    def register(self, name: str, path: str) -> None:
        """Register a logits processor that requests name. Raise InputError if it cannot be imported from its path."""

    def load_adapter(self, folder: str, seconds: float = math.inf, resume: bool = False) -> LoadedAdapter | None:
        """Read an adapter for requests. Arguments, result and errors: see `AdapterStore.load`."""

    def cancel_loading(self) -> None:
        """Free what `load_adapter` has read so far of an adapter that is not complete."""

    def unload_adapter(self, identity: str) -> None:
        """Free an adapter. No sequence uses it."""

    def stage_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Let the next `wake_up` take these weights in place of the checkpoint's. Errors: see `UpdatedWeights.stage`."""

    def sleep(self, keep_sequences: bool = False) -> None:
        """Free weights, caches and adapters of requests. `keep_sequences`: sequences stay, and are computed again."""

    def wake_up(self) -> None:
        """Allocate memory and read the weights again. On failure it stays asleep; the errors are those of the core's verb."""

    def close(self) -> None:
        """End threads and processes. The memory is freed with the object."""


class ModelReloader(Protocol):
    """Builds the runner's model again, for `sleep` and `wake_up`."""

    @property
    def modalities(self) -> tuple[str, ...]:
        """Modalities of items that the model takes."""

    def build_on_meta(self) -> Model:
        """Return the model without memory."""

    def stage_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `Executor`."""

    def reload(self) -> Model:
        """Return the model on its device, with its weights."""


class LocalExecutor:
    """Runs steps on one model runner in this process. See `Executor`.

    Without `source`, which reloads the runner's model, it cannot sleep.
    """

    def __init__(self, runner: ModelRunner, source: ModelReloader | None = None) -> None:
        self.runner, self._source = runner, source
        self._launched: dict[int, AsyncStepOutput] = {}  # steps that were not polled yet
        self._last_step = 0
        self._grammars: dict[str, Future[Any]] = {}  # by request; keeps the grammars of unfinished requests alive
        self._compiling: dict[str, Future[Any]] = {}

    def describe(self, max_model_len: int, max_num_seqs: int) -> CoreInfo:
        runner, source, model = self.runner, self._source, self.runner.model
        cross = [spec for spec in model.cache_specs if spec.kind == "cross" and not spec.optional]  # others return no weights
        return CoreInfo(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            row_bytes=runner.store.row_bytes,
            dtype=str(runner.store.dtype).removeprefix("torch."),
            device=str(runner.device),
            adapters=tuple(model.adapters),
            modalities=() if source is None else source.modalities,
            structured_outputs=runner.grammars is not None,
            can_sleep=source is not None,
            can_generate=model.can_generate,
            num_labels=model.num_labels if isinstance(model, SupportsClassification) else 0,
            labels_tokens=getattr(model, "labels_tokens", False),
            cross_attention=(len(cross), cross[0].kv_heads if cross else 0),
            captured_layers=getattr(model, "captured_layers", 0),
            pooling=model.pooling if isinstance(model, SupportsPooling) else "last",
            normalizes=model.normalizes if isinstance(model, SupportsPooling) else True,
            vector_size=_vector_size(model),
            token_size=model.token_size if isinstance(model, SupportsPooling) else model.hidden_size,
            bodies=bodies_in_use() if runner.device.type == "cpu" else (),
        )

    def bind_thread(self, num_threads: int) -> None:
        """Set torch's threads and the GPU of the calling thread."""
        use_threads(num_threads)
        if self.runner.device.type == "cuda":
            torch.cuda.set_device(self.runner.device)

    def execute(self, output: SchedulerOutput) -> StepHandle:
        if not output.ahead:
            self._launched.clear()
        launched = self.runner.execute_model(output, self._launched[self._last_step] if output.ahead else None)
        self._last_step += 1
        self._launched[self._last_step] = launched
        return StepHandle(self._last_step, launched.sampled_token_ids is not None)

    def poll(self, handle: StepHandle) -> StepOutput:
        return self._launched.pop(handle.number).get_output()

    def update(self, update: WorkerUpdate) -> tuple[GrammarResult, ...]:
        for name in update.release:
            self._grammars.pop(name, None)
            self._compiling.pop(name, None)
        for task in update.compile:
            assert self.runner.grammars is not None, "grammars need a tokenizer"
            self._compiling[task.request_id] = self.runner.grammars.begin(task.params, task.tenant)
        ended = {name: future for name, future in self._compiling.items() if future.done()}
        results = []
        for name, future in ended.items():
            self._grammars[name] = self._compiling.pop(name)
            error = future.exception()
            results.append(GrammarResult(name, None if error is None else error_info(error, "compiling a grammar")))
        return tuple(results)

    def transfer(self, transfer: KVTransfer) -> tuple[KVLookupResult, ...]:
        return self.runner.transfer(transfer)

    def transfer_stats(self) -> tuple[TransferStats, ...]:
        blocks = self.runner.kv_blocks
        return self.runner.store.stats + (() if blocks is None else blocks.store.stats)

    def register(self, name: str, path: str) -> None:
        register_path(name, path)

    def load_adapter(self, folder: str, seconds: float = math.inf, resume: bool = False) -> LoadedAdapter | None:
        return self.runner.load_adapter(Path(folder), seconds, resume)

    def cancel_loading(self) -> None:
        if self.runner.adapters is not None:
            self.runner.adapters.cancel_loading()

    def unload_adapter(self, identity: str) -> None:
        if self.runner.adapters is not None:
            self.runner.adapters.unload(identity)

    def stage_weights(self, weights: Mapping[str, Tensor]) -> None:
        assert self._source is not None
        self._source.stage_weights(weights)
        self.runner.store.drop_folder()  # files have rows of the former weights
        if self.runner.kv_blocks is not None:
            self.runner.kv_blocks.forget_saved()

    def sleep(self, keep_sequences: bool = False) -> None:
        assert self._source is not None
        self._launched.clear()
        self.runner.sleep(self._source.build_on_meta(), keep_sequences)

    def wake_up(self) -> None:
        assert self._source is not None
        try:
            self.runner.wake_up(self._source.reload)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold tensors of the failed attempt
            self.runner.sleep(self.runner.model)
            if not is_out_of_memory(error):
                raise
            reason = "there is too little memory to wake up; make room on the device, then call wake_up() again"
            raise InputError(reason, code="out_of_memory") from None

    def close(self) -> None:
        """Write what waits for connectors, and end the threads and processes that compile grammars."""
        self.runner.store.close()
        if self.runner.kv_blocks is not None:
            self.runner.kv_blocks.close()
        if self.runner.grammars is not None:
            self.runner.grammars.close()


def _vector_size(model: Model) -> int:
    """Return the length of the vector of a prompt with the model's own pooling."""
    if not isinstance(model, SupportsPooling):
        return model.hidden_size
    return model.vector_size * (1 if model.vector_head is not None else model.pooling.count("+") + 1)
