"""The device under test: its name, its peak rates, and timing on it."""

from __future__ import annotations

import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_AHEAD = 1_000_000  # cycles the device sleeps while the host queues a run, about half a millisecond
_FLUSH = 256 << 20  # bytes; more than any cache of a card
_PACKAGES = ("sensorium", "torch", "triton", "transformers")


@dataclass(frozen=True)
class Bench:
    """The device under test and its peak rates.

    Args:
        tiny: use small shapes to test the script on a CPU; the numbers mean nothing.
        budget: seconds during which one measurement may repeat a run.
    """

    device: torch.device
    tiny: bool = False
    budget: float = 0.5

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.tiny else torch.bfloat16

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float16, torch.float32)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def pick(self, full: T, tiny: T) -> T:
        return tiny if self.tiny else full

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, dtype=dtype or self.dtype, device=self.device)

    @cached_property
    def copy(self) -> float:
        """Bytes per second that a large device-to-device copy reads and writes."""
        source = torch.empty(self.pick(4 << 30, 1 << 20), dtype=torch.uint8, device=self.device).zero_()
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.seconds(lambda: target.copy_(source))

    @cached_property
    def matmul(self) -> float:
        """Operations per second of a large matrix product in the dtype under test."""
        n = self.pick(8192, 64)
        a, b = self.randn(n, n), self.randn(n, n)
        out = torch.empty_like(a)
        return 2 * n**3 / self.seconds(lambda: torch.mm(a, b, out=out))

    @property
    def ceiling(self) -> str:
        return f"of {str(self.dtype).removeprefix('torch.')} ceiling"

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the median seconds of a few runs with cold caches; the host's launch time is hidden where possible."""
        run()
        if not self.cuda:
            return of_host(run, 3 if self.tiny else 10)
        run()
        torch.cuda.synchronize(self.device)
        flush = torch.empty(_FLUSH, dtype=torch.uint8, device=self.device)
        times: list[float] = []
        end = time.perf_counter() + self.budget
        while len(times) < 5 or (len(times) < 50 and time.perf_counter() < end):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            torch.cuda._sleep(_AHEAD)
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1000)
        return statistics.median(times)

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)


def of_host(run: Callable[[], object], count: int) -> float:
    """Return the median seconds on the host clock."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return max(statistics.median(times), 1e-9)


def card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " CPU"


def slug(name: str) -> str:
    """Make a file name: "NVIDIA H100 80GB HBM3" -> "nvidia-h100-80gb-hbm3"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def versions(device: torch.device) -> str:
    """Return the versions of the software and of the card's driver."""
    found = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} multiprocessors"
        found += [f"CUDA {torch.version.cuda}", f"sm_{properties.major}{properties.minor}", memory]
    return ", ".join(found)
