"""An executor whose messages are encoded and decoded both ways, as if the model runner were in another process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sensorium.engine.core.codec import decode, encode
from sensorium.engine.core_info import CoreInfo
from sensorium.engine.executor import LocalExecutor
from sensorium.engine.stats import TransferStats
from sensorium.engine.types import (
    GrammarResult,
    KVLookupResult,
    KVTransfer,
    LoadedAdapter,
    SchedulerOutput,
    StepHandle,
    StepOutput,
    WorkerUpdate,
)
from torch import Tensor


def through_bytes(message: Any) -> Any:
    received = decode(encode(message))
    assert type(received) is type(message)
    return received


class WireExecutor:
    """Sends every message through bytes. `seen` counts messages by class."""

    def __init__(self, *arguments: Any) -> None:
        self._local, self.seen = LocalExecutor(*arguments), dict[str, int]()
        self.runner = self._local.runner  # for tests

    def _through(self, message: Any) -> Any:
        name = type(message).__name__
        self.seen[name] = self.seen.get(name, 0) + 1
        return through_bytes(message)

    def describe(self, max_model_len: int, max_num_seqs: int) -> CoreInfo:
        info: CoreInfo = self._through(self._local.describe(max_model_len, max_num_seqs))
        return info

    def bind_thread(self, num_threads: int) -> None:
        self._local.bind_thread(num_threads)

    def execute(self, output: SchedulerOutput) -> StepHandle:
        handle: StepHandle = self._through(self._local.execute(self._through(output)))
        return handle

    def poll(self, handle: StepHandle) -> StepOutput:
        output: StepOutput = self._through(self._local.poll(self._through(handle)))
        return output

    def update(self, update: WorkerUpdate) -> tuple[GrammarResult, ...]:
        return tuple(map(self._through, self._local.update(self._through(update))))

    def transfer(self, transfer: KVTransfer) -> tuple[KVLookupResult, ...]:
        return tuple(map(self._through, self._local.transfer(self._through(transfer))))

    def transfer_stats(self) -> tuple[TransferStats, ...]:
        return tuple(map(self._through, self._local.transfer_stats()))

    def load_adapter(self, folder: str, seconds: float = math.inf, resume: bool = False) -> LoadedAdapter | None:
        loaded: LoadedAdapter | None = self._through(self._local.load_adapter(folder, seconds, resume))
        return loaded

    def cancel_loading(self) -> None:
        self._local.cancel_loading()

    def unload_adapter(self, identity: str) -> None:
        self._local.unload_adapter(identity)

    def stage_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._local.stage_weights(through_bytes(dict(weights)))

    def sleep(self, keep_sequences: bool = False) -> None:
        self._local.sleep(keep_sequences)

    def wake_up(self) -> None:
        self._local.wake_up()

    def close(self) -> None:
        self._local.close()
