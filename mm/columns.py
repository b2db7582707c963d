"""Columns of tables as lists: pandas, polars and pyarrow, string arrays of numpy, and other collections."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, KeysView, Sequence, Set, ValuesView
from typing import Any

import numpy as np

from ..callers.errors import InputError, typed

_NO_COLUMNS = (str, bytes, bytearray, memoryview, list, tuple, array, range)


def column_values(value: object, param: str) -> list[Any] | None:
    """Return the entries of a column of a table, of a string array or of another collection as a list.

    None for anything else: one input, a list or tuple, and arrays of numbers, which are pixels or samples.

    Raises:
        InputError: a whole table, whose columns are not one input each.
    """
    if isinstance(value, _NO_COLUMNS):
        return None
    if isinstance(value, np.ndarray):
        return list(value.tolist()) if value.dtype.kind in "UTO" and value.ndim == 1 else None
    if _is_table(value):
        raise InputError(f"<<param>> is a table ({typed(value)}); give one of its columns", code="invalid_value", param=param)
    for method in ("to_pylist", "to_list"):  # pyarrow's; pandas' and polars'
        if callable(convert := getattr(value, method, None)):
            return list(convert())
    if isinstance(value, Sequence | Set | KeysView | ValuesView | deque) and isinstance(value, Collection):
        return list(value)
    return None


def _is_table(value: object) -> bool:
    """Return whether a value is a DataFrame of pandas or polars, or a table or batch of pyarrow."""
    return any(hasattr(value, name) for name in ("columns", "column_names")) and hasattr(value, "shape")
