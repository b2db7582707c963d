"""The program of a rank other than 0: it loads its part of the model and runs the steps of `rank_executor.RankExecutor`."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from ...callers.errors import SensoriumError
from ...callers.exits import end_process
from ...callers.garbage import freeze_loaded
from ...models.registry import register_model
from ...processors.text.tokenizer import Tokenizer
from ..config import EngineConfig
from ..errors import error_text
from ..executor import Executor
from ..model_files import load_model_files
from ..setup.loader import load_engine
from ..setup.resolve import load_processing
from .channel import Channel, pack
from .engine_core import EngineCore
from .errors_as_data import describe_error
from .process import PACKAGE
from .rank_executor import join, signature
from .server import end_with_parent

_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent ends
_RESULTS = ("transfer", "transfer_stats")  # verbs whose results rank 0 joins
_log = logging.getLogger(f"{__package__}.rank_server")


def _load(
    config: EngineConfig, rank: int, rendezvous: str, num_threads: int, level: int, rows: Sequence[tuple[str, str, str]]
) -> Executor:
    """Return the executor of this rank's part. Arguments: see `rank_executor.Peers`."""
    logging.getLogger(PACKAGE).setLevel(max(level, logging.ERROR))  # rank 0 logs what all ranks would
    torch.set_num_threads(num_threads)
    for architecture, model, processing in rows:
        register_model(architecture, model=model, processing=processing)
    ranks = join(config, rank, rendezvous)
    files = load_model_files(config.model, config.adapter, config.hf_overrides)
    tokenizer = Tokenizer(files.tokenizer_folder)
    core, _ = load_engine(config, files, load_processing(files, config.mm_processor_kwargs, tokenizer), tokenizer, ranks)
    assert isinstance(core, EngineCore)
    core.bind_thread(num_threads)
    freeze_loaded()
    return core.executor


def _answer(executor: Executor, verb: str, arguments: Sequence[Any]) -> Any:
    """Call a method of the executor. Return what rank 0 reads: of a step its tokens, of an adapter its identity."""
    if verb == "step":
        return signature(executor.poll(executor.execute(*arguments)))
    if verb == "sleep":
        gc.unfreeze()  # so that the model is collected
    result = getattr(executor, verb)(*arguments)
    if verb == "wake_up":
        freeze_loaded()
    if verb == "load_adapter":
        return result.identity
    return result if verb in _RESULTS else None


def main() -> None:
    """Run the program. Its arguments are the file descriptors of the pipe and of `Activity`, which is not used."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # also ends it while a signal has stopped it
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    end_with_parent(connection.fileno(), seconds=0)  # the parent may have ended before the signal was set
    threading.Thread(target=end_with_parent, args=(connection.fileno(),), daemon=True).start()
    channel = Channel(connection)
    executor: Executor | None = None
    while True:
        try:
            verb, arguments = channel.receive()
        except (EOFError, OSError):
            os._exit(1)
        if verb == "close":
            if executor is not None:
                executor.close()
            end_process(0)
        try:
            if verb == "load":
                executor = _load(*arguments)
            assert executor is not None
            reply: tuple[bool, Any] = False, None if verb == "load" else _answer(executor, verb, arguments)
        except Exception as error:
            if not isinstance(error, SensoriumError):
                _log.exception("%s failed", verb)
            reply = True, describe_error(error) if verb == "load" else f"{verb} failed: {error_text(error)}"
        channel.send(*pack(reply, share=False))


if __name__ == "__main__":
    main()
