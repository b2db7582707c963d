"""Launch configurations of Triton kernels: shipped defaults, the user's file for a card, trials. Knows no kernel."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .table import TABLE

_trials: dict[str, dict[str, int]] = {}


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


def launch(op: str, shape: str = "") -> dict[str, int]:
    """Block sizes, num_warps and num_stages of `op` for a class of shapes, to be splatted into the launch."""
    return _trials.get(op) or _configured(op, shape)


@functools.cache
def _configured(op: str, shape: str) -> dict[str, int]:
    rows = TABLE[op].get(shape) or TABLE[op][""]
    return {**rows["any"], **rows.get(_row(card().arch), {})}


def _row(arch: str) -> str:
    """A card without rows of its own is served by the one before it; one with less shared memory than its class by "any"."""
    if not arch.startswith("sm_"):
        return arch
    number = int(arch[3:])
    return "any" if number in (86, 89, 120) else "sm_90" if number >= 90 else "sm_80"


@contextlib.contextmanager
def trying(op: str, config: Mapping[str, int]) -> Iterator[None]:
    """While it is open `op` launches with the shipped defaults changed by `config`, whatever its shape: tests and tuning."""
    _trials[op] = {**TABLE[op][""]["any"], **config}
    try:
        yield
    finally:
        del _trials[op]
