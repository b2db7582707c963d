"""Runs tasks with adapters: every request that a task makes uses the adapter that the caller chose for it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from types import coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from ..callers.errors import InputError
from ..engine.frontend.adapters import AdapterChoice, as_adapters
from ..engine.frontend.request_handle import RequestHandle
from .run import Group, Task

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from .option_types import AdapterKeywords

P = TypeVar("P")


def take_adapters(options: Any) -> AdapterKeywords:
    """Remove the arguments of `with_adapters` from the keyword arguments of a call, and return them."""
    return {name: options.pop(name) for name in ("adapter", "lora_request") if name in options}  # type: ignore[return-value]


def with_adapters(
    engine: Engine,
    tasks: Sequence[Task[P]],
    adapter: AdapterChoice | Sequence[AdapterChoice] = None,
    lora_request: AdapterChoice | Sequence[AdapterChoice] = None,
) -> list[Task[P]]:
    """Return the tasks with an adapter each, or none.

    Args:
        adapter, lora_request: two spellings of one argument: a choice for all tasks, or one per task.

    Raises:
        InputError: both are given, their number does not fit, a name is unknown, or a choice has another type.
    """
    if adapter is None and lora_request is None:
        return [*tasks]
    choices = as_adapters(adapter, lora_request, len(tasks))
    engine.adapters.check(choices)
    pairs = zip(tasks, choices, strict=True)
    return [task if choice is None else partial(_run, engine, task, choice) for task, choice in pairs]


def one_adapter(engine: Engine, adapter: object = None, lora_request: object = None) -> AdapterChoice:
    """Return the adapter of a call that takes one for all its requests. Raise InputError as `with_adapters` does."""
    for name, choice in (("adapter", adapter), ("lora_request", lora_request)):
        if isinstance(choice, list | tuple):
            raise InputError("this call takes one <<param>> for all its requests", code="invalid_value", param=name)
    choices: Sequence[AdapterChoice] = as_adapters(adapter, lora_request, 1)
    engine.adapters.check(choices)
    return choices[0]


@coroutine
def _run(engine: Engine, task: Task[P], choice: AdapterChoice) -> Generator[Any, Any, P]:
    """Run a task, and give the adapter to its requests and to those of the tasks that it gathers."""
    running: Any = task()
    value, error = None, None
    try:
        while True:
            try:
                step = running.send(value) if error is None else running.throw(error)
            except StopIteration as stop:
                result: P = stop.value
                return result
            if isinstance(step, RequestHandle):
                step.input = replace(step.input, adapter=engine.adapters.lease(choice))
            elif isinstance(step, Group):
                step.tasks = (partial(_run, engine, gathered, choice) for gathered in step.tasks)
            try:
                value, error = (yield step), None
            except Exception as raised:
                value, error = None, raised
    finally:
        running.close()
        error = None  # its traceback refers to this frame
