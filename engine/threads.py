"""How many threads torch's operations take and which GPU is theirs, by thread of ours. Knows nothing that runs in them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

Result = TypeVar("Result")


def use_threads(count: int) -> None:
    """So many threads for torch's operations in this thread, whatever others are set to.

    torch keeps the number per thread, but gives a thread at its first operation what any thread was set to last; so that is
    made to happen now.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


def computing_on(device: torch.device) -> AbstractContextManager[object]:
    """Kernels, events and pinned memory of this thread are that GPU's meanwhile; a thread begins with the first one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def in_passing(work: Callable[[], Result]) -> Result:
    """`work()` in a thread that ends with it, and with it its team of OpenMP threads.

    Every thread that computes in parallel has a team of its own. While there are more of them than cores, libgomp lets them
    sleep between operations instead of waiting awake, and waking them takes longer than the products of a decode step.
    """
    with ThreadPoolExecutor(1, "sensorium-load", initializer=use_threads, initargs=(torch.get_num_threads(),)) as pool:
        return pool.submit(work).result()
