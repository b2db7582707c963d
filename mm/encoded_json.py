"""Encoder rows in JSON, as /v1/media/encode returns them."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from dataclasses import asdict
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..callers.errors import InputError, short_repr
from .rules import Rule
from .types import EncodedItem, FramePlan, ItemGeometry

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_RULES = ("positions", "visible")  # fields of ItemGeometry


def item_head(item: EncodedItem) -> dict[str, Any]:
    """Return the fields of an item for JSON, with the dtype and the shape of its rows in place of the rows."""
    return {
        "modality": item.modality,
        "hash": item.hash,
        "size": item.size,
        "dtype": str(item.rows.dtype).removeprefix("torch."),
        "shape": [*item.rows.shape],
        "geometries": [asdict(geometry) for geometry in item.geometries],
        "frames": None if item.frames is None else asdict(item.frames),
    }


def row_bytes(item: EncodedItem) -> Tensor:
    """Return the bytes of the rows, uint8 `[rows * width * bytes of a number]`: little-endian, row after row."""
    return item.rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def encoded_item_from_json(value: object) -> EncodedItem:
    """Return the item of an entry of `items` in the response of /v1/media/encode.

    Args:
        value: the fields of `item_head`, and the bytes of the rows in base64 as `rows`.

    Raises:
        InputError: it is no such entry.
    """
    try:
        return _read(value)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:  # a wrong base64 is a ValueError
        reason = f"{short_repr(value)} is no item of /v1/media/encode ({type(error).__name__}: {error})"
        raise InputError(f"{reason}; give an entry of items as it is there", code="invalid_value", param="value") from None


def _read(value: Any) -> EncodedItem:
    dtype, shape, data = _DTYPES[value["dtype"]], tuple(value["shape"]), b64decode(value["rows"], validate=True)
    if len(shape) != 2 or min(shape) < 1 or len(data) != prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no rows of the shape {list(shape)}")
    rows = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    frames = None if value["frames"] is None else FramePlan(**_as_tuples(value["frames"]))
    geometries = tuple(_geometry(geometry) for geometry in value["geometries"])
    return EncodedItem(value["modality"], rows, geometries, value["hash"], tuple(value["size"]), frames)


def _geometry(value: Mapping[str, Any]) -> ItemGeometry:
    rules = {name: None if value[name] is None else Rule(**_as_tuples(value[name])) for name in _RULES}
    return ItemGeometry(**{**_as_tuples(value), **rules})


def _as_tuples(value: Any) -> Any:
    """Return a value of JSON with tuples in the place of lists, as frozen dataclasses hold them."""
    if isinstance(value, list):
        return tuple(map(_as_tuples, value))
    return {name: _as_tuples(entry) for name, entry in value.items()} if isinstance(value, dict) else value
