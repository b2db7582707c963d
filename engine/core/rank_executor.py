"""An executor over several processes, the ranks, each of which holds a part of the decoder's weights and KV cache.

Every rank gets every message in the same order, encodes the same items, samples the same tokens, and joins its part of the
decoder with those of the others. A rank that ends, stands still or computes something else ends this process, so that all ranks
end and the engine is started again.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from ...callers.errors import InputError, SensoriumError
from ...kernels.bodies import bodies_in_use
from ...models.layers.ranks import Ranks, make_process_groups, rank_groups
from ...models.registry import registered_models
from ..config import EngineConfig
from ..core_info import CoreInfo
from ..errors import error_text
from ..executor import LocalExecutor
from ..stats import TransferStats, add_transfers
from ..types import (
    GrammarResult,
    KVLookupResult,
    KVTransfer,
    LoadedAdapter,
    SchedulerOutput,
    StepHandle,
    StepOutput,
    WorkerUpdate,
)
from .channel import Packed, discard, duplicate, pack
from .child import Child, start_child
from .death_watch import CHECK_SECONDS, STOPPED_CHECKS, state_of
from .errors_as_data import restore_error

GATHER_SECONDS = 300.0  # the longest wait of one rank for another within a layer
_END_SECONDS = 1.0
EXIT_CODE = 70  # of a process whose ranks are no longer alike: EX_SOFTWARE
_log = logging.getLogger(__name__)
Result = TypeVar("Result")
Signature = tuple[tuple[str, tuple[int, ...], bool], ...]
Places = tuple[tuple[int, int], ...]
"""Blocks of a prompt, as in KVLookupResult."""


def join(config: EngineConfig, rank: int, rendezvous: str) -> Sequence[Ranks]:
    """Wait until all ranks of a model are here. Return the groups of this one. `rendezvous`: path of a file that they share."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    size = config.num_ranks
    store: Any = distributed.FileStore(rendezvous, size)  # type: ignore[attr-defined]
    limit = timedelta(seconds=GATHER_SECONDS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    make_process_groups(config.tensor_parallel_size, config.pipeline_parallel_size, limit)
    return rank_groups(rank, config.tensor_parallel_size, config.pipeline_parallel_size, config.enable_expert_parallel)


def signature(output: StepOutput) -> Signature:
    """Return what all ranks must agree on: the tokens of each sequence, and whether it failed."""
    return tuple((token.request_id, tuple(token.token_ids), token.error is None) for token in output.tokens)


class Peers:
    """The other ranks: child processes that run `rank_server`. This process is rank 0 and divides its threads among all."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the processes and wait until they have met."""
        size = config.num_ranks
        threads = max(1, torch.get_num_threads() // size)
        torch.set_num_threads(threads)
        level = logging.getLogger(__name__.partition(".")[0]).getEffectiveLevel()
        models = [(name, row.model, row.processing) for name, row in registered_models().items()]
        bodies = bodies_in_use() if config.torch_device.type == "cpu" else ()
        self.children: list[Child] = []
        self._closed = False
        self._rendezvous: int | None = os.memfd_create("rendezvous")  # it leaves no file, however this process ends
        rendezvous = f"/proc/{os.getpid()}/fd/{self._rendezvous}"
        try:
            for rank in range(1, size):
                self.children.append(start_child(bodies, "rank_server"))
                self.send_one(rank, "load", config, rank, rendezvous, threads, level, models)
            threading.Thread(target=self._watch, name="sensorium-ranks", daemon=True).start()
            self.ranks = join(config, 0, rendezvous)
        except BaseException as error:
            self.abandon(error)
            raise

    def send_one(self, rank: int, verb: str, *arguments: object) -> None:
        self.children[rank - 1].channel.send(*pack((verb, arguments)))

    def send(self, verb: str, *arguments: object) -> None:
        """Send a message to all."""
        for rank in range(1, len(self.children) + 1):
            self.send_one(rank, verb, *arguments)

    def send_packed(self, packed: Packed) -> None:
        """Send a message that is packed already to all, which share the memory of its tensors."""
        for child in self.children:
            child.channel.send(*duplicate(packed))

    def receive(self) -> list[tuple[bool, Any]]:
        """Return the reply of each: True and the error's text (of `load`, see `describe_error`), or False and the result."""
        return [child.channel.receive() for child in self.children]

    def check_loaded(self) -> None:
        """Wait until all have loaded their parts. Raise the error of one that could not; RuntimeError if it has no code."""
        replies = self.receive()
        self._close_rendezvous()  # until now, a rank might have read the file
        for rank, (failed, value) in enumerate(replies, 1):
            if failed:
                error = restore_error(*value)
                raise error if isinstance(error, SensoriumError) else RuntimeError(f"rank {rank}: {error}")

    def abandon(self, error: BaseException) -> None:
        """Kill the processes of a model that could not be loaded.

        If one of them has ended, it is the reason of the failure. This process then ends, too, and all are started again.
        """
        end = time.monotonic() + _END_SECONDS
        while (
            not isinstance(error, SensoriumError) and time.monotonic() < end
        ):  # an ending process closes its connections first
            for rank, child in enumerate(self.children, 1):
                if child.process.poll() is not None:
                    fail(self, f"rank {rank} has ended while the model was loaded")
            time.sleep(_END_SECONDS / 10)
        self._closed = True
        for child in self.children:
            child.process.kill()  # while it loads, it reads no message
        self.close()

    def begin_close(self) -> None:
        """Ask the processes to end, which takes as long as they have blocks to write."""
        self._closed = True
        for child in self.children:
            child.ask_to_end()

    def close(self) -> None:
        """End the processes."""
        self.begin_close()
        self._close_rendezvous()
        for child in self.children:
            child.end()
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def _close_rendezvous(self) -> None:
        if self._rendezvous is not None:
            os.close(self._rendezvous)
            self._rendezvous = None

    def _watch(self) -> None:
        """End this process when another one has ended or stands still."""
        stopped = dict.fromkeys(range(len(self.children)), 0)
        while not self._closed:
            time.sleep(CHECK_SECONDS)
            for index, child in enumerate(self.children):
                state = state_of(child.process.pid)
                stopped[index] = stopped[index] + 1 if state in "tT" else 0
                if (state in "ZX" or stopped[index] >= STOPPED_CHECKS) and not self._closed:
                    fail(self, f"rank {index + 1} has {'ended' if state in 'ZX' else 'been stopped'}")


def fail(peers: Peers, reason: str) -> None:
    """End all ranks at once. The engine's other process starts them again."""
    print(f"sensorium: {reason}; the engine's processes end", file=sys.stderr, flush=True)
    for child in peers.children:
        child.process.kill()
    os._exit(EXIT_CODE)


def _common(parts: Sequence[Places]) -> Places:
    """Return the places that all have, in the order of the first."""
    others = [set(part) for part in parts[1:]]
    return tuple(place for place in parts[0] if all(place in other for other in others))


class RankExecutor:
    """Runs each step on all ranks. See `Executor`. `local`: the executor of rank 0, in this process."""

    def __init__(self, local: LocalExecutor, peers: Peers) -> None:
        self._local, self._peers = local, peers
        self._adapters = set[str]()  # identities that all ranks have loaded
        self._ended: dict[int, list[Places]] = {}  # lookups that some ranks have ended, with what each of these has read

    def describe(self, max_model_len: int, max_num_seqs: int) -> CoreInfo:
        return self._local.describe(max_model_len, max_num_seqs)

    def bind_thread(self, num_threads: int) -> None:
        self._local.bind_thread(max(1, num_threads // (len(self._peers.children) + 1)))

    def execute(self, output: SchedulerOutput) -> StepHandle:
        self._send("step", output)
        return self._or_fail(lambda: self._local.execute(output))

    def poll(self, handle: StepHandle) -> StepOutput:
        result = self._or_fail(lambda: self._local.poll(handle))
        for rank, (failed, value) in enumerate(self._receive(), 1):
            if failed or value != signature(result):
                fail(self._peers, f"rank {rank} {value if failed else 'computed other tokens than rank 0'}")
        return result

    def update(self, update: WorkerUpdate) -> tuple[GrammarResult, ...]:
        if update.release or update.compile:
            self._send("update", update)
            self._receive()
        return self._local.update(update)

    def transfer(self, transfer: KVTransfer) -> tuple[KVLookupResult, ...]:
        """See `Executor`. Each rank saves and reads its part of a block.

        A lookup is reported once it has ended on all ranks, with the blocks of which all have read their parts. What one rank
        has not, because it is missing, damaged or late there, is computed by all.
        """
        for number in transfer.cancel:
            self._ended.pop(number, None)
        for ended in self._all("transfer", transfer):
            for result in ended:
                self._ended.setdefault(result.number, []).append(result.blocks)
        whole = [number for number, parts in self._ended.items() if len(parts) > len(self._peers.children)]
        return tuple(KVLookupResult(number, _common(self._ended.pop(number))) for number in whole)

    def transfer_stats(self) -> tuple[TransferStats, ...]:
        """Return the sums over all ranks."""
        return add_transfers(self._all("transfer_stats")) if self._local.transfer_stats() else ()

    def register(self, name: str, path: str) -> None:
        self._all("register", name, path)

    def load_adapter(self, folder: str, seconds: float = math.inf, resume: bool = False) -> LoadedAdapter:
        """See `Executor`. It is read at once, on rank 0 first, which reports what is wrong with it.

        Raises:
            InputError: another rank fails, or reads other files. Then no rank keeps what it has read.
        """
        loaded = self._local.load_adapter(folder)
        assert loaded is not None
        self._send("load_adapter", folder)
        replies = self._receive()
        for rank, (failed, value) in enumerate(replies, 1):
            if failed or value != loaded.identity:
                read = {loaded.identity, *(identity for error, identity in replies if not error)}
                for identity in read - self._adapters:
                    self._all("unload_adapter", identity)
                reason = value if failed else "its files have changed"
                raise InputError(f"the adapter {folder} could not be read on rank {rank} ({reason}); load it again")
        self._adapters.add(loaded.identity)
        return loaded

    def cancel_loading(self) -> None:
        """Do nothing: an adapter is read in one call."""

    def unload_adapter(self, identity: str) -> None:
        self._adapters.discard(identity)
        self._all("unload_adapter", identity)

    def stage_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `Executor`. Rank 0 checks the weights before the others get them. Each rank takes its part when it reloads.

        The other ranks share one copy: each load reads it, and nobody changes it.

        Raises:
            InputError: there is too little memory for the copy. Then no rank has taken them.
        """
        try:
            packed = pack(("stage_weights", (dict(weights),)))
        except MemoryError as error:
            raise InputError(f"there is too little memory for the other ranks: {error}", code="out_of_memory") from None
        try:
            self._local.stage_weights(weights)
            self._or_fail(lambda: self._peers.send_packed(packed))
        finally:
            discard(packed)
        for rank, (failed, value) in enumerate(self._receive(), 1):
            if failed:
                fail(self._peers, f"rank {rank}: {value}")

    def sleep(self, keep_sequences: bool = False) -> None:
        self._adapters.clear()
        self._all("sleep", keep_sequences)

    def wake_up(self) -> None:
        """See `Executor`. If a rank fails, all sleep again."""
        try:
            self._all("wake_up")
        except Exception:
            self._all("sleep")
            raise

    def close(self) -> None:
        self._peers.begin_close()
        self._local.close()
        self._peers.close()

    def _all(self, verb: str, *arguments: object) -> list[Any]:
        """Call a method on all ranks. Return their results (see `rank_server`).

        Raises:
            RuntimeError: another rank fails, and rank 0 does not, whose error is raised as it is.
        """
        self._send(verb, *arguments)
        try:
            result = getattr(self._local, verb)(*arguments)
        finally:
            replies = self._receive()
        for rank, (failed, value) in enumerate(replies, 1):
            if failed:
                raise RuntimeError(f"rank {rank}: {value}")
        return [result, *(value for _, value in replies)]

    def _send(self, verb: str, *arguments: object) -> None:
        self._or_fail(lambda: self._peers.send(verb, *arguments))

    def _receive(self) -> list[tuple[bool, Any]]:
        return self._or_fail(self._peers.receive)

    def _or_fail(self, act: Callable[[], Result]) -> Result:
        """Return `act()`. Its failure leaves the ranks at different places."""
        try:
            return act()
        except Exception as error:
            fail(self._peers, f"a step of rank 0 failed: {error_text(error)}")
            raise
