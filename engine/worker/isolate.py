"""Finds the items that make a batched call fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def isolate_failures(items: Sequence[Item], attempt: Callable[[Sequence[Item]], Sequence[Result]]) -> list[Result | Exception]:
    """Return the result of `attempt` for each item in order, or the error that it raises for that item alone.

    A failing call is halved until the failing items are alone. For k failing items of n, it makes at most
    `1 + 2 k ceil(log2 n)` calls.
    """
    if not items:
        return []
    try:
        results = list(attempt(items))
        if len(results) != len(items):
            raise RuntimeError(f"{len(results)} results for {len(items)} items")
        return list(results)
    except Exception as error:
        if len(items) == 1:
            return [error]
    middle = len(items) // 2
    return isolate_failures(items[:middle], attempt) + isolate_failures(items[middle:], attempt)
