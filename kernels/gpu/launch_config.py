"""Launch configurations of Triton kernels: shipped defaults, the user's file for a GPU, and overrides for tuning.

The file is `sensorium/kernels/<card>.json` in the user's cache folder. It is written by hand or by `sensorium tune` only:

    {"card": "NVIDIA H100 80GB HBM3", "launches": {"norm": {"4096": {"num_warps": 4}}}}
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..kept import cache_folder
from .launch_table import TABLE

Config = dict[str, int]
_overrides: dict[str, Config] = {}
_requested: dict[tuple[str, str], None] | None = None


@dataclass(frozen=True)
class GpuInfo:
    """Properties of the GPU that launchers use: its architecture (`"sm_90"`) and its number of multiprocessors."""

    arch: str
    num_sms: int


@functools.cache
def gpu_info() -> GpuInfo:
    """Return the GPU that Triton compiles for. The interpreter counts as a small sm_80."""
    import triton

    if triton.knobs.runtime.interpret:
        return GpuInfo("sm_80", 4)
    active = triton.runtime.driver.active
    target = active.get_current_target()
    arch = f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch).split(":")[0]
    return GpuInfo(arch, active.utils.get_device_properties(active.get_current_device())["multiprocessor_count"])


def get_config(op: str, shape: str = "") -> Config:
    """Return block sizes, num_warps and num_stages of `op` for a shape class, as keyword arguments of the launch."""
    if _requested is not None:
        _requested[op, shape] = None
    return _overrides.get(op) or _default_config(op, shape)


def requested_configs(run: Callable[[], object]) -> list[tuple[str, str]]:
    """Run `run` and return the ops and shape classes whose configurations it requests."""
    global _requested
    _requested = {}
    try:
        run()
        return list(_requested)
    finally:
        _requested = None


@functools.cache
def _default_config(op: str, shape: str) -> Config:
    rows = TABLE[op].get(shape) or TABLE[op][""]
    return {**rows["any"], **rows.get(_table_row(gpu_info().arch), {}), **user_configs().get(op, {}).get(shape, {})}


def _table_row(arch: str) -> str:
    """Return the table row of an architecture: its own, else that of an older one with no more shared memory, or "any"."""
    if not arch.startswith("sm_"):
        return arch
    number = int(arch[3:])
    return "sm_80" if number in (80, 87) else "sm_90" if 90 <= number < 120 else "any"


@contextlib.contextmanager
def override_config(op: str, config: Mapping[str, int]) -> Iterator[None]:
    """Launch `op` with the shipped defaults updated by `config`, whatever its shape class. For tests and tuning."""
    _overrides[op] = {**TABLE[op][""]["any"], **config}
    try:
        yield
    finally:
        del _overrides[op]


def user_config_path(name: str) -> Path:
    """Return the file of the GPU of this name, below XDG_CACHE_HOME, or ~/.cache."""
    return cache_folder() / (re.sub(r"[^\w.-]+", "-", name) + ".json")


@functools.cache
def user_configs() -> dict[str, dict[str, Config]]:
    """Return op -> shape class -> the user's changes for this GPU; ValueError if their file is invalid."""
    import torch

    return read_configs(user_config_path(torch.cuda.get_device_name())) if torch.cuda.is_available() else {}


def read_configs(path: Path) -> dict[str, dict[str, Config]]:
    """Read and check a file of configurations; empty if there is none. ValueError names what is wrong."""
    if not path.is_file():
        return {}
    try:
        configs: dict[str, dict[str, Config]] = json.loads(path.read_text("utf-8"))["launches"]
        for op, shapes in configs.items():
            for shape, config in shapes.items():
                _check(op, shape, config)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a file of launch configurations ({error!r}); fix or delete it") from error
    return configs


def _check(op: str, shape: str, config: Any) -> None:
    if op not in TABLE:
        raise ValueError(f"unknown op {op!r}; known are {', '.join(TABLE)}")
    default = (TABLE[op].get(shape) or TABLE[op][""])["any"]
    for name, value in config.items():
        if name not in default:
            raise ValueError(f"{op} has no {name!r}; it has {', '.join(default)}")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65536:
            raise ValueError(f"{name} of {op} is {value!r}; it must be an integer from 1 to 65536")
        if name == "num_warps" and value not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"num_warps of {op} is {value}; it must be a power of two up to 32")


def fastest_config(
    op: str, run: Callable[[], object], candidates: Iterable[Config], measure: Callable[[Callable[[], object]], float]
) -> Config:
    """Return the candidate with which `run`, a launch of `op`, is fastest. Candidates that the GPU refuses are skipped.

    `measure` returns milliseconds per call, as `triton.testing.do_bench` does.
    """
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    timed: list[tuple[float, Config]] = []
    for config in candidates:
        with override_config(op, config), contextlib.suppress(CompilationError, OutOfResources, PTXASError):
            timed.append((measure(run), config))
    return min(timed, key=lambda timing: timing[0])[1]


def save_config(name: str, op: str, shape: str, config: Config) -> Path:
    """Write a configuration to the user's file for the GPU of this name. Takes effect at the next start."""
    _check(op, shape, config)
    path = user_config_path(name)
    launches = read_configs(path)
    launches.setdefault(op, {})[shape] = config
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({"card": name, "launches": launches}, indent=1, sort_keys=True) + "\n", "utf-8")
    temporary.replace(path)
    return path
