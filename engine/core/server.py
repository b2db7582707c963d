"""The program of the core's child process. It loads the model and answers the verbs of `process.ProcessCore`."""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from ...callers.errors import SensoriumError
from ...callers.exits import end_process
from ...callers.garbage import freeze_loaded
from ...callers.heap import trim_heap
from ...models.registry import register_model
from ...processors.text.tokenizer import Tokenizer
from ..config import EngineConfig
from ..core_info import CoreInfo
from ..model_files import load_model_files
from ..setup.loader import load_ranks
from ..setup.resolve import load_processing
from ..stats import EngineStats
from .channel import Activity, Channel, pack
from .errors_as_data import describe_error
from .process import PACKAGE

_log = logging.getLogger(f"{__package__}.server")
_TRIM_SECONDS, _TRIM_SHARE = 10.0, 0.01
"""How often free memory is returned to the system, and the largest share of the time that this may take: 10 ms with few holes,
over a second with gigabytes of them. Encoder rows and other small blocks stay, and the large tensors of steps lie around them;
without this, the free memory between them grew to several times the rows' size."""


class _Records(logging.Handler):
    """Collects log records for the next reply to the parent, which logs them."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.waiting.append((record.name, record.levelno, self.format(record)))

    def take(self) -> list[tuple[str, int, str]]:
        taken, self.waiting = self.waiting, []
        return taken


def end_with_parent(descriptor: int, seconds: float | None = None) -> None:
    """End this process as soon as the other side of the pipe is closed, even during a step. Runs in a thread.

    `seconds`: return after this time if the other side is still open; None: wait without a limit.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    if poll.poll(None if seconds is None else 1000 * seconds):
        os._exit(1)


class _Server:
    """Answers verbs until "close"."""

    def __init__(self, channel: Channel, records: _Records, activity: Activity) -> None:
        self._channel, self._records, self._activity = channel, records, activity
        self._core: Any = None
        self._trim_at = time.monotonic() + _TRIM_SECONDS

    def run(self) -> None:
        """Answer verbs. Raise EOFError or OSError if the parent is gone."""
        while True:
            try:
                verb, arguments = self._channel.receive()
            except (EOFError, OSError):
                raise
            except Exception as error:  # it was received whole, but its values cannot be read
                reply: tuple[bool, Any] = True, describe_error(error)
            else:
                if verb == "close":
                    self._close()
                    return
                reply = self._answer(verb, arguments)
                del arguments  # frees tensors together with their request
            try:
                packed = pack((*reply, self._records.take()), share=False)
            except Exception as error:
                packed = pack((True, describe_error(error), []), share=False)
            self._channel.send(*packed)
            if (started := time.monotonic()) > self._trim_at:  # while the parent reads the reply
                trim_heap()
                ended = time.monotonic()
                self._trim_at = ended + max(_TRIM_SECONDS, (ended - started) / _TRIM_SHARE)

    def _answer(self, verb: str, arguments: Sequence[Any]) -> tuple[bool, Any]:
        """Return (False, result) or (True, error) of a verb."""
        try:
            if verb == "load":
                return False, self._load(*arguments)
            if verb == "stats":
                return False, self._core.stats
            if verb == "sleep":
                gc.unfreeze()  # so that the model is collected
            result = getattr(self._core, verb)(*arguments)
            if verb == "wake_up":
                freeze_loaded()
            return False, result
        except BaseException as error:
            if not isinstance(error, SensoriumError):
                _log.exception("%s failed in the engine's process", verb)
            return True, describe_error(error)

    def _close(self) -> None:
        """Let the core write what waits for connectors, and end other processes."""
        if self._core is not None:
            self._core.close()

    def _load(
        self, config: EngineConfig, num_threads: int, level: int, rows: Sequence[tuple[str, str, str]]
    ) -> tuple[CoreInfo, EngineConfig, EngineStats]:
        logging.getLogger(PACKAGE).setLevel(level)
        torch.set_num_threads(num_threads)
        for architecture, model, processing in rows:
            register_model(architecture, model=model, processing=processing)
        files = load_model_files(config.model, config.adapter, config.hf_overrides)
        tokenizer = Tokenizer(files.tokenizer_folder)
        info = load_processing(files, config.mm_processor_kwargs, tokenizer)
        self._core, config = load_ranks(config, files, info, tokenizer)
        self._core.report_encoding = self._activity.write
        self._core.bind_thread(num_threads)
        freeze_loaded()
        return self._core.info, config, self._core.stats


def main() -> None:
    """Run the child's program. Its arguments are the file descriptors of the pipe and of `Activity`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    threading.Thread(target=end_with_parent, args=(connection.fileno(),), daemon=True).start()
    records, logger = _Records(), logging.getLogger(PACKAGE)
    logger.addHandler(records)
    logger.propagate = False
    try:
        _Server(Channel(connection), records, Activity(int(sys.argv[2]))).run()
    except (EOFError, OSError):  # the parent is gone
        os._exit(1)
    end_process(0)


if __name__ == "__main__":
    main()
