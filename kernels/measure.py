"""Measure what bodies.py chooses by, and what a few rows cost: the fastest of several calls, bodies and rows in turns.

Everything runs on one thread of its own and is measured in its CPU time, so that other programs disturb little. Weights are
parts of one buffer that is larger than most caches and read in turns, so a single row is measured at the rate of memory. Their
values and their order do not matter.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import native
from .backends import onednn_packs
from .bodies import OPS, body, machine
from .kept import Record, kept_record
from .linear import groups, panels
from .linear.dense import DenseWeight, multiply_dense, multiply_onednn, pack_onednn
from .linear.int8 import quantize_rows
from .varlen.native import varlen_attention

Product = Callable[[Tensor], object]
WEIGHTS = ("float32", "bfloat16", "int8", "int4", "w4a8")
"""Types of weights whose rows are measured; w4a8: int4 with rows that are quantised to int8."""
COST_ROWS = (1, 2, 4, 8, 16)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
_RATE_ROWS = (16, 1, 96)
_SIDE = 1024  # inputs and outputs
_BUFFER = 64 << 20  # bytes
_PACKED = 6  # weights that are packed for oneDNN, which takes a while
_CALLS = 8  # at most
_SECONDS = 0.004  # of a body and a number of rows, if it was measured twice
_LONG = 0.02  # seconds of a first call after which there is no second one
_SLOW = 2.0  # a body that takes so many times as long as another one with the first number of rows is not measured further
_GROUP = 128  # inputs of a group
_HEADS, _DIM, _KEYS = 4, 64, 256


def candidates(supported: Sequence[str]) -> dict[str, list[str]]:
    """Return op -> bodies that a CPU with these instruction sets can choose from, at most three of C++, the usual one first.

    torch's attention is not among them, because a row's bits may depend on the other segments of the batch.
    """
    newest_first = [name for name in reversed(supported) if name != "base"]
    cpu, found = torch.device("cpu"), dict[str, list[str]]()
    for op in OPS:
        dtype = _DTYPES.get(op.removeprefix("linear_"))
        if dtype is not None:
            names = [panels.layouts_of(name)[dtype].kernel for name in newest_first]
        elif op == "linear_int4":
            names = [groups.kernel_of(name) for name in newest_first]
        else:
            wide = [name for name in newest_first if native.LEVELS[name] >= native.LEVELS["avx512"]]
            names = list({native.LEVELS[name]: name for name in wide}.values()) or newest_first[:1]
        names = list(dict.fromkeys(names))[:3]
        if dtype is not None and names:
            names += ["onednn"] if dtype != torch.int8 and onednn_packs(cpu, dtype) else []
            names += ["torch"]
        found[op] = names
    return found


def measure_rates(bodies: Mapping[str, Sequence[str]]) -> Record:
    """Return op -> body -> number of rows (of attention: keys) -> GFLOP/s of one thread."""
    return _on_one_thread(partial(_measure_rates, bodies))


def _measure_rates(bodies: Mapping[str, Sequence[str]]) -> Record:
    buffer, rates = _buffer(), dict[str, Any]()
    for op, names in bodies.items():
        if op == "attention_bfloat16":
            q = torch.randn(_KEYS, _HEADS, _DIM).bfloat16()
            works = {str(_KEYS): 4 * _KEYS**2 * _HEADS * _DIM}
            rates[op] = _compare({name: partial(_attend, name) for name in names}, {_KEYS: q}, works)
            continue
        weights = op.removeprefix("linear_")
        inputs = {rows: torch.randn(rows, _SIDE).to(_row_dtype(weights)) for rows in _RATE_ROWS}
        products = {name: _product(weights, name, buffer) for name in names}
        rates[op] = _compare(products, inputs, {str(rows): 2 * rows * _SIDE**2 for rows in _RATE_ROWS})
    return rates


def row_costs(weights: str) -> tuple[float, ...]:
    """Return the cost of a product of 1 to 16 rows relative to one row, with weights of a type of WEIGHTS on this CPU.

    They are those of one thread, measured once per machine and kept. Several threads share the bandwidth of the memory, so that
    further rows cost less.
    """
    names = [body(_op(kind)) for kind in WEIGHTS]

    def is_valid(record: Record) -> bool:
        return list(record) == list(WEIGHTS) and all(
            len(seconds) == len(COST_ROWS) and min(seconds) > 0 and max(seconds) < 1 for seconds in record.values()
        )

    record = kept_record("rows", machine() | {"bodies": names}, lambda: measure_costs(names), is_valid)
    return spread_costs(record[weights])


def spread_costs(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the cost of 1 to 16 rows from the seconds of COST_ROWS: straight lines in between; more rows never cost less."""
    rising = list(itertools.accumulate(seconds, max))
    costs = [1.0]
    for (few, low), (many, high) in itertools.pairwise(zip(COST_ROWS, rising, strict=True)):
        costs += [(low + (high - low) * (rows - few) / (many - few)) / rising[0] for rows in range(few + 1, many + 1)]
    return tuple(costs)


def measure_costs(names: Sequence[str]) -> Record:
    """Return the seconds of COST_ROWS for each of WEIGHTS, which are multiplied in the bodies of these names."""
    return _on_one_thread(partial(_measure_costs, names))


def _measure_costs(names: Sequence[str]) -> Record:
    buffer, costs = _buffer(), Record()
    for weights, name in zip(WEIGHTS, names, strict=True):
        multiply = _product(weights, name, buffer)
        inputs = {rows: torch.randn(rows, _SIDE).to(_row_dtype(weights)) for rows in COST_ROWS}
        costs[weights] = list(_fastest({rows: partial(multiply, x) for rows, x in inputs.items()}).values())
    return costs


def _on_one_thread(measure: Callable[[], Record]) -> Record:
    """Run `measure` on a new thread, where torch and the C++ kernels use no other one. Other threads keep their number."""
    before = torch.get_num_threads()

    def run() -> Record:
        torch.set_num_threads(1)
        try:
            return measure()
        finally:
            torch.set_num_threads(before)

    with ThreadPoolExecutor(1, "sensorium-measure") as thread:
        return thread.submit(run).result()


def _op(weights: str) -> str:
    return "linear_int4" if weights == "w4a8" else f"linear_{weights}"


def _row_dtype(weights: str) -> torch.dtype:
    return torch.float32 if weights == "float32" else torch.bfloat16


def _buffer() -> Tensor:
    """Return bytes that are small positive numbers in every type of weight."""
    buffer = panels.allocate((_BUFFER,), torch.uint8)
    return buffer.fill_(0x3C)


def _product(weights: str, name: str, buffer: Tensor) -> Product:
    """Return a function that multiplies rows with the next of several weights, in the body of this name."""
    if _op(weights) == "linear_int4":
        kernel = groups.kernel_of(name)
        coded = [groups.GroupPanelWeight([part], weights == "w4a8") for part in _group_panels(buffer, kernel)]
        return _in_turns(partial(groups.multiply_groups, kernel=kernel), coded)
    dtype = _DTYPES[weights]
    parts = buffer.view(dtype).split(_SIDE * _SIDE)
    if name == "torch" and dtype == torch.int8:
        return _in_turns(_multiply_int8, [part.view(_SIDE, _SIDE).t() for part in parts])
    if name == "torch":
        return _in_turns(multiply_dense, [DenseWeight(part.view(_SIDE, _SIDE), None) for part in parts])
    if name == "onednn":
        return _in_turns(multiply_onednn, [pack_onednn(part.view(_SIDE, _SIDE), None) for part in parts[:_PACKED]])
    layout, zeros = panels.layouts_of(name)[dtype], torch.zeros(_SIDE)
    scale = torch.ones(_SIDE) if dtype == torch.int8 else None
    shift = torch.zeros(_SIDE, dtype=torch.int32) if layout.shifted else None
    shape = _SIDE // layout.width, _SIDE // layout.inputs, layout.width * layout.inputs
    many = [panels.Panels(layout, part.view(shape), zeros, _SIDE, scale, shift) for part in parts]
    return _in_turns(panels.multiply_panels, many)


def _group_panels(buffer: Tensor, kernel: str) -> list[groups.GroupPanels]:
    width, steps = groups.width_of(kernel), _SIDE // groups.STEP
    scale, bias = torch.ones(_SIDE // width, _SIDE // _GROUP, width, dtype=torch.bfloat16), torch.zeros(_SIDE)
    shape = _SIDE // width, steps, width, groups.STEP // 2
    rest: dict[str, Any] = dict.fromkeys(("fine_scale", "low", "fine_low", "zero", "table", "factor", "order"))
    rest |= {"span": 1, "offset": 8}
    return [
        groups.GroupPanels(
            groups.INT4, codes.view(shape), scale, bias=bias, outputs=_SIDE, inputs=_SIDE, group_steps=_GROUP // groups.STEP,
            **rest,
        )
        for codes in buffer.split(_SIDE * _SIDE // 2)
    ]  # fmt: skip


def _in_turns(multiply: Callable[[Tensor, Any], object], weights: Sequence[Any]) -> Product:
    turns = itertools.cycle(weights)
    return lambda x: multiply(x, next(turns))


def _multiply_int8(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply as torch does in `int8_linear_reference`."""
    codes, scale = quantize_rows(x)
    return torch._int_mm(codes, weight).float().mul_(scale).to(x.dtype)


def _attend(name: str, q: Tensor) -> Tensor:
    library = native.library()
    assert library is not None, "bodies of C++ need the library"
    before = native.set_level(library, native.LEVELS[name])
    try:
        return varlen_attention(q, q, q, [len(q)], _DIM**-0.5)
    finally:
        native.set_level(library, before)


def _compare(products: Mapping[str, Product], inputs: Mapping[int, Tensor], work: Mapping[str, int]) -> Record:
    """Return body -> number of rows -> GFLOP/s. Bodies that are slow with the first number of rows have no others."""
    rates: dict[str, dict[str, float]] = {name: {} for name in products}
    left = dict(products)
    for rows, x in inputs.items():
        seconds = _fastest({name: partial(multiply, x) for name, multiply in left.items()})
        for name, each in seconds.items():
            rates[name][str(rows)] = work[str(rows)] / each / 1e9
        usual = next(iter(products))
        left = {name: left[name] for name in seconds if name == usual or seconds[name] < _SLOW * min(seconds.values())}
    return rates


def _fastest(calls: Mapping[Any, Callable[[], object]]) -> dict[Any, float]:
    """Return the CPU seconds of the fastest of several calls of each, made in turns."""
    seconds, spent = dict.fromkeys(calls, float("inf")), dict.fromkeys(calls, 0.0)
    for number in range(_CALLS):
        for name, call in calls.items():
            if spent[name] < (_SECONDS if number > 1 else _LONG):
                start = time.thread_time()
                call()
                took = time.thread_time() - start
                seconds[name], spent[name] = min(seconds[name], took), spent[name] + took
    return seconds
