"""Launch configurations of Triton kernels: shipped defaults, the user's own file for a card, trials. Knows no kernel.

The file is `sensorium/kernels/<card>.json` in the user's cache folder, written by hand or by `keep`, never by itself:

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

from .table import TABLE

Config = dict[str, int]
_trials: dict[str, Config] = {}
_asked: dict[tuple[str, str], None] | None = None


@dataclass(frozen=True)
class Card:
    """What a launcher asks about the GPU: its row in the table (`"sm_90"`) and how many multiprocessors it has."""

    arch: str
    processors: int


@functools.cache
def card() -> Card:
    """The GPU that Triton compiles for. Its interpreter counts as a small sm_80."""
    import triton

    if triton.knobs.runtime.interpret:
        return Card("sm_80", 4)
    active = triton.runtime.driver.active
    target = active.get_current_target()
    arch = f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch).split(":")[0]
    return Card(arch, active.utils.get_device_properties(active.get_current_device())["multiprocessor_count"])


def launch(op: str, shape: str = "") -> Config:
    """Block sizes, num_warps and num_stages of `op` for a class of shapes, to be splatted into the launch."""
    if _asked is not None:
        _asked[op, shape] = None
    return _trials.get(op) or _configured(op, shape)


def asked(run: Callable[[], object]) -> list[tuple[str, str]]:
    """The ops and classes whose configurations `run` asks for."""
    global _asked
    _asked = {}
    try:
        run()
        return list(_asked)
    finally:
        _asked = None


@functools.cache
def _configured(op: str, shape: str) -> Config:
    rows = TABLE[op].get(shape) or TABLE[op][""]
    return {**rows["any"], **rows.get(_row(card().arch), {}), **own().get(op, {}).get(shape, {})}


def _row(arch: str) -> str:
    """A card without rows of its own is served by the one before it; one with less shared memory than its class by "any"."""
    if not arch.startswith("sm_"):
        return arch
    number = int(arch[3:])
    return "sm_80" if number in (80, 87) else "sm_90" if 90 <= number < 120 else "any"


@contextlib.contextmanager
def trying(op: str, config: Mapping[str, int]) -> Iterator[None]:
    """While it is open `op` launches with the shipped defaults changed by `config`, whatever its shape: tests and tuning."""
    _trials[op] = {**TABLE[op][""]["any"], **config}
    try:
        yield
    finally:
        del _trials[op]


def own_file(name: str) -> Path:
    """Where the configurations for the card of this name lie: below XDG_CACHE_HOME, else ~/.cache."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "sensorium" / "kernels" / (re.sub(r"[^\w.-]+", "-", name) + ".json")


@functools.cache
def own() -> dict[str, dict[str, Config]]:
    """Op -> shape class -> what the user's file for the card at hand changes. ValueError for a file that cannot be meant."""
    import torch

    return read(own_file(torch.cuda.get_device_name())) if torch.cuda.is_available() else {}


def read(path: Path) -> dict[str, dict[str, Config]]:
    """A file of configurations, checked; nothing where there is none. ValueError names what is wrong in it."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))["launches"]
        for op, shapes in found.items():
            for shape, config in shapes.items():
                _check(op, shape, config)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no file of launch configurations ({error!r}); mend or delete it") from error
    return found  # type: ignore[no-any-return]


def _check(op: str, shape: str, config: Any) -> None:
    if op not in TABLE:
        raise ValueError(f"unknown op {op!r}; known are {', '.join(TABLE)}")
    known = (TABLE[op].get(shape) or TABLE[op][""])["any"]
    for name, value in config.items():
        if name not in known:
            raise ValueError(f"{op} has no {name!r}; it has {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65536:
            raise ValueError(f"{name} of {op} is {value!r}, no number of things")
        if name == "num_warps" and value not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"num_warps of {op} is {value}, no power of two up to 32")


def best(
    op: str, run: Callable[[], object], candidates: Iterable[Config], measure: Callable[[Callable[[], object]], float]
) -> Config:
    """The candidate with which `run`, a launch of `op`, takes least; one that the card refuses is passed over.

    `measure`: milliseconds of a call, as `triton.testing.do_bench`.
    """
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    taken: list[tuple[float, Config]] = []
    for config in candidates:
        with trying(op, config), contextlib.suppress(CompilationError, OutOfResources, PTXASError):
            taken.append((measure(run), config))
    return min(taken, key=lambda one: one[0])[1]


def keep(name: str, op: str, shape: str, config: Config) -> Path:
    """Put a configuration into the user's file for the card of this name; it counts from the next start on."""
    _check(op, shape, config)
    path = own_file(name)
    launches = read(path)
    launches.setdefault(op, {})[shape] = config
    path.parent.mkdir(parents=True, exist_ok=True)
    spare = path.with_suffix(f".{os.getpid()}")
    spare.write_text(json.dumps({"card": name, "launches": launches}, indent=1, sort_keys=True) + "\n", "utf-8")
    spare.replace(path)
    return path
