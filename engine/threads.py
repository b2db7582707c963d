"""Sets the number of torch's threads and the current GPU of a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

Result = TypeVar("Result")
_lock = threading.Lock()  # held until the inherited number is restored


def use_threads(count: int) -> None:
    """Set how many threads torch's operations use in the calling thread. Call once per thread.

    torch keeps this number per thread, but a thread's first operation inherits the number that any thread set last. So the
    inherited number is read first, and a temporary thread sets it again for threads that start later.
    """
    with _lock:
        inherited = torch.get_num_threads()
        torch.set_num_threads(count)
        restoring = threading.Thread(target=torch.set_num_threads, args=(inherited,))
        restoring.start()
        restoring.join()


def computing_on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which this thread's kernels, events and pinned memory use the device, if it is a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def run_in_thread(work: Callable[[], Result]) -> Result:
    """Run `work()` in a temporary thread and return its result. The thread's team of OpenMP threads ends with it.

    Each thread that computes in parallel has its own OpenMP team. With more OpenMP threads than cores, libgomp puts them to
    sleep between operations, and waking them takes longer than the matrix products of a decode step.
    """
    with ThreadPoolExecutor(1, "sensorium-load", initializer=use_threads, initargs=(torch.get_num_threads(),)) as pool:
        return pool.submit(work).result()
