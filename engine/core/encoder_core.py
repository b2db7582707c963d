"""The core of an engine with `parts="encoder"`: it returns the encoder rows of items, and has no decoder and no KV cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Never

import torch

from ...callers.errors import InputError
from ...kernels.bodies import bodies_in_use
from ...kernels.dispatch import use_backends
from ...mm.types import MultiModalFeature, find_item
from ...models.interface import Model
from ..config import EngineConfig
from ..core_info import CoreInfo
from ..scheduler.policy import make_policy
from ..scheduler.quarantine import Quarantine
from ..stats import EngineStats, SequenceStats
from ..threads import use_threads
from ..types import CoreOutputs, EncodeResult, EngineRequest, TokenOutput
from ..worker.encoder_runner import EncoderRunner
from ..worker.encoder_store import EncoderStore


@dataclass(frozen=True)
class _Waiting:
    """A request in the queue, as work of a scheduling policy."""

    request: EngineRequest
    arrival: int
    time: float = field(default_factory=time.perf_counter)

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def remaining(self) -> int:
        """Encoder rows that it needs."""
        return sum(item.range.num_embeds for item in self.request.features)


class EncoderCore:
    """Encodes the items of requests behind the verbs of `CoreClient`, in this process.

    A step takes requests in the order of the scheduling policy until they have `max_encoder_tokens` rows, at least one, and
    encodes each distinct item once, in calls of at most as many rows. Rows are kept on disk only (`encoder_cache_dir`).
    """

    asleep = False
    restart = None  # the core lives as long as its process

    def __init__(
        self, model: Model, config: EngineConfig, max_model_len: int, store: EncoderStore, modalities: tuple[str, ...]
    ) -> None:
        self._model, self._kernels, self._max_rows = model, config.kernels, config.max_encoder_tokens
        self._store, self._runner = store, EncoderRunner(store, config.torch_device)
        self._quarantine = Quarantine(config.quarantine_seconds)
        self._policy = make_policy(config.scheduling_policy)
        self._waiting: dict[str, _Waiting] = {}  # by request
        self._arrivals = count()
        self._stats = EngineStats()
        # called when the items being encoded change
        self.report_encoding: Callable[[Iterable[str]], object] = lambda keys: None
        self.info = CoreInfo(
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            row_bytes=store.row_bytes,
            dtype=str(store.dtype).removeprefix("torch."),
            device=str(config.torch_device),
            modalities=modalities,
            can_generate=False,
            scheduling_policy=config.scheduling_policy,
            bodies=bodies_in_use() if config.torch_device.type == "cpu" else (),
        )

    def bind_thread(self, num_threads: int) -> None:
        """Set torch's threads and the GPU of the calling thread, which will call `step`."""
        use_threads(num_threads)
        if self.info.device != "cpu":
            torch.cuda.set_device(self.info.device)

    def watch(self, on_end: Callable[[], object]) -> None:
        """Do nothing: the core lives in this process."""

    def check_alive(self) -> None:
        """Do nothing: the core lives in this process."""

    @property
    def stats(self) -> EngineStats:
        transfers = self._store.stats
        return replace(self._stats, waiting=len(self._waiting), quarantined=len(self._quarantine), transfers=transfers)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raise InputError for an item in quarantine, or an id that is in use."""
        self._quarantine.check_items(request.features)
        if request.request_id in self._waiting:
            raise InputError(f"request {request.request_id!r} is already being served")
        self._waiting[request.request_id] = _Waiting(request, next(self._arrivals))

    def abort(self, request_id: str) -> TokenOutput | None:
        return TokenOutput(request_id, ()) if self._waiting.pop(request_id, None) else None

    def step(self) -> CoreOutputs:
        """Encode the items of the next requests and return their rows."""
        batch = self._next_batch()
        if not batch:
            return CoreOutputs((), True, self.stats)
        items = {item.hash: item for entry in batch for item in entry.request.features}
        start = time.perf_counter()
        try:
            results = self._encode(items.values())
            outputs = tuple(self._output(entry.request, entry.time, start, results) for entry in batch)
        finally:
            self._store.drop(items)
            self.report_encoding(())
        for result in results.values():
            if result.item_failed:
                self._quarantine.add(result.hash)
        num_stored = sum(result.source == "disk" for result in results.values())
        self._stats = replace(
            self._stats,
            steps=self._stats.steps + 1,
            encoder_calls=self._stats.encoder_calls + len(results) - num_stored,
            encoder_disk_hits=self._stats.encoder_disk_hits + num_stored,
        )
        return CoreOutputs(outputs, False, self.stats)

    def _encode(self, items: Iterable[MultiModalFeature]) -> dict[str, EncodeResult]:
        """Encode items in calls of at most `max_encoder_tokens` rows, at least one item, as the memory plan counts them."""
        calls, rows = list[list[MultiModalFeature]](), self._max_rows
        for item in items:
            rows += item.range.num_embeds
            if rows > self._max_rows:
                calls.append([])
                rows = item.range.num_embeds
            calls[-1].append(item)
        results: dict[str, EncodeResult] = {}
        with use_backends(self._kernels), torch.inference_mode():
            for call in calls:
                self.report_encoding([item.hash for item in call])
                results |= {result.hash: result for result in self._runner.encode(self._model, call)}
        return results

    def _next_batch(self) -> Sequence[_Waiting]:
        """Remove the requests of the next step from the queue and return them."""
        batch, rows = list[_Waiting](), 0
        for entry in sorted(self._waiting.values(), key=self._policy.order):
            rows += entry.remaining
            if batch and rows > self._max_rows:
                break
            batch.append(entry)
            del self._waiting[entry.request.request_id]
        return batch

    def _output(self, request: EngineRequest, arrival: float, start: float, results: Mapping[str, EncodeResult]) -> TokenOutput:
        encoded, name = [results[item.hash] for item in request.features], request.request_id
        timings = {"queue": start - arrival, "encode": sum(result.seconds for result in encoded)}
        for result in encoded:
            if result.error is not None:
                error = result.error.for_item(*find_item(request.features, result.hash))
                return TokenOutput(name, (), finish_reason="error", error=error, timings=timings)
        rows = tuple(self._store.rows[item.hash].to("cpu", copy=True) for item in request.features)
        stats = SequenceStats(items=tuple(result.source for result in encoded))
        return TokenOutput(name, (), finish_reason="length", timings=timings, stats=stats, encoder_rows=rows)

    def append(self, *_: object, **__: object) -> Never:
        raise InputError("this engine has only the encoder; live sessions need the whole model", code="unsupported")

    truncate = pause = append

    def load_adapter(self, folder: str, seconds: float = math.inf, resume: bool = False) -> Never:
        raise InputError("this engine has only the encoder; adapters of requests need the decoder", code="unsupported")

    def cancel_loading(self) -> None:
        """Do nothing: there are no adapters."""

    def unload_adapter(self, identity: str) -> None:
        """Do nothing: there are no adapters."""

    def stage_weights(self, weights: object) -> Never:
        raise InputError("the weights of an engine that has only the encoder cannot be updated", code="unsupported")

    def restart_answer(self, request_id: str) -> int:
        """Return 0: there are no answers."""
        return 0

    def reset_prefix_cache(self) -> bool:
        """Return True: there is no prefix cache."""
        return True

    def sleep(self, keep_sequences: bool = False) -> Never:
        raise InputError("an engine with <<parts=>>'encoder' cannot sleep; close it and make a new one")

    def wake_up(self) -> None:
        """Do nothing: the engine cannot sleep."""

    def close(self) -> None:
        """Write pending rows to the connectors, and close them."""
        self._store.close()
