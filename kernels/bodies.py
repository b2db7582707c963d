"""Choose the body of each product on this CPU by its measured rate: an instruction set of the C++ kernels, oneDNN or torch.

The newest instruction set of a CPU is not always its fastest. Some Intel CPUs multiply pairs of bfloat16 at half the rate of
float32, so that weights which are widened in registers take half the time. Rates are measured once per machine and kept
(kept.py, measure.py), so that all processes which share the user's cache folder choose alike.

A choice holds for every weight of a type and for any number of rows: a row's bits do not depend on the batch. Two machines may
choose differently.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from . import native
from .kept import Record, kept_record, record_path

OPS = ("linear_float32", "linear_bfloat16", "linear_int8", "linear_int4", "attention_bfloat16")
"""Ops with several bodies: products by the type of the weight, and attention in bfloat16."""
Rates = Mapping[str, Mapping[str, float]]
"""Body, the usual one first -> number of rows -> GFLOP/s. A body that is much slower has fewer numbers of rows."""
_MARGIN = 1.1  # how many times as fast as the usual body another one has to be
_CPU_FACTS = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "CPU implementer", "CPU part")
_lock = threading.RLock()


@dataclass(frozen=True)
class Choice:
    """The body of an op. `rates`: those that it was chosen by; empty if SENSORIUM_CPU names it."""

    body: str
    rates: Rates

    @property
    def reason(self) -> str:
        """Return why this body was chosen, for people."""
        if not self.rates:
            return "set by SENSORIUM_CPU"
        rows = list(self.rates[self.body])
        sides = [f"{body} {'/'.join(f'{rate:.0f}' for rate in rates.values())}" for body, rates in self.rates.items()]
        return f"{', '.join(sides)} GFLOP/s with {'/'.join(rows)} rows"


def body(op: str) -> str:
    """Return the body of an op of OPS on this CPU; "" without C++ products."""
    products = native.products()
    if products is None:
        return ""
    choice = choices(products).get(op)
    return products if choice is None else choice.body


def bodies_in_use() -> tuple[str, ...]:
    """Return `op=body` of every op of OPS, as SENSORIUM_CPU takes it; empty without C++ products."""
    return tuple(f"{op}={body(op)}" for op in OPS) if native.products() is not None else ()


def uses_tiles() -> bool:
    """Return whether a product runs with AMX tiles."""
    return any(body(op) == "amx" for op in OPS if op.startswith("linear"))


def may_measure() -> bool:
    """Return whether rates are measured: there are C++ products, and SENSORIUM_CPU names no instruction set for every op."""
    products, setting = native.products(), os.environ.get("SENSORIUM_CPU", "")
    return products is not None and (not setting or "=" in setting) and _is_newest(products)


def _is_newest(products: str) -> bool:
    library = native.library()
    return library is not None and native.supported(library)[-1] == products


def choices(products: str) -> Mapping[str, Choice]:
    """Return the choices of a CPU whose newest instruction set is `products`; empty for others, or if nothing is measured."""
    with _lock:
        return _choices(products, os.environ.get("SENSORIUM_CPU", ""))


@functools.cache
def _choices(products: str, setting: str) -> Mapping[str, Choice]:
    library = native.library()
    if (setting and "=" not in setting) or library is None or not _is_newest(products):
        return {}
    bodies = _measure().candidates(native.supported(library))
    chosen: dict[str, Choice] = {}
    for op, wanted in requested().items():
        if wanted in bodies[op]:
            chosen[op] = Choice(wanted, {})
        elif wanted != products or len(bodies[op]) > 1:  # an op without a choice has the body `products`
            text = f"SENSORIUM_CPU={op}={wanted} is ignored: this CPU has {', '.join(bodies[op])}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
    several = {op: names for op, names in bodies.items() if len(names) > 1 and op not in chosen}
    if several:
        rates = measured_rates({op: names for op, names in bodies.items() if len(names) > 1})
        chosen |= {op: Choice(choose(rates[op]), rates[op]) for op in several}
    if "attention_bfloat16" in chosen:
        native.set_level(library, native.LEVELS[chosen["attention_bfloat16"].body])
    return chosen


def _measure() -> Any:
    """Import measure.py when it is needed: it times products, whose modules import this one."""
    return import_module(".measure", __package__)


def choose(rates: Rates) -> str:
    """Return the body with the highest rate, as the geometric mean over the numbers of rows.

    It is the usual body unless another one is clearly faster: a rate differs from one measurement to the next.
    """
    most = max(map(len, rates.values()))
    means = {name: math.prod(by_rows.values()) ** (1 / most) for name, by_rows in rates.items() if len(by_rows) == most}
    usual, best = next(iter(means)), max(means, key=lambda name: means[name])
    return best if means[best] > _MARGIN * means[usual] else usual


def measured_rates(bodies: Mapping[str, list[str]]) -> Mapping[str, Rates]:
    """Return the kept rates of each op's bodies. They are measured if none are kept, which takes less than 300 ms."""

    def is_valid(record: Record) -> bool:
        return (
            record.keys() == bodies.keys()
            and all(list(record[op]) == names for op, names in bodies.items())
            and all(
                all(0 < rate < math.inf for rate in by_rows.values()) and by_rows
                for op in record
                for by_rows in record[op].values()
            )
        )

    return kept_record("rates", machine() | {"bodies": bodies}, lambda: _measure().measure_rates(bodies), is_valid)


def rates_path() -> Path | None:
    """Return the file of the kept rates, or None if nothing is measured here."""
    library = native.library()
    if library is None or not any(choice.rates for choice in choices(native.products() or "").values()):
        return None
    several = {op: names for op, names in _measure().candidates(native.supported(library)).items() if len(names) > 1}
    return record_path("rates", machine() | {"bodies": several})


@functools.cache
def machine() -> dict[str, Any]:
    """Return what rates depend on: the CPU with its microcode, the C++ kernels and torch."""
    facts = dict(_processor()) or {"machine": platform.machine(), "processor": platform.processor()}
    library = native.library()
    built = None if library is None else Path(str(library._name)).stat()
    kernels = None if built is None else [native.ABI, built.st_size, built.st_mtime_ns]
    return {"cpu": facts, "kernels": kernels, "torch": torch.__version__}


def _processor() -> Iterator[tuple[str, str]]:
    """Yield the facts of the first processor in /proc/cpuinfo."""
    cpus = Path("/proc/cpuinfo")
    for line in cpus.read_text("utf-8").split("\n\n")[0].splitlines() if cpus.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() in _CPU_FACTS:
            yield name.strip(), value.strip()


def requested() -> Mapping[str, str]:
    """Return op -> body that SENSORIUM_CPU names, as in `linear_bfloat16=avx512,linear_float32=torch`.

    Raises:
        ValueError: the variable has another form, or names an op or a body that does not exist.
    """
    text, table = os.environ.get("SENSORIUM_CPU", ""), dict[str, str]()
    if native.restriction() is not None or "=" not in text:
        return table
    for part in text.split(","):
        op, _, name = map(str.strip, part.partition("="))
        if op not in OPS or name not in (*native.LEVELS, "onednn", "torch"):
            allowed = f"an op is one of {', '.join(OPS)}, and a body one of {', '.join(native.LEVELS)}, onednn and torch"
            raise ValueError(f"SENSORIUM_CPU has {part[:60]!r}, which is not op=body; {allowed}")
        table[op] = name
    return table
