"""How one named tensor of an item is split from a batch and merged into one. Knows no modality and no family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from .errors import InputError

T = TypeVar("T")
Value = Tensor | int | float | str


@dataclass(frozen=True)
class BatchedField:
    """One entry per item: equal shapes stack on a new first axis, unequal ones and plain numbers stay a list."""

    keep_on_cpu: bool = False


@dataclass(frozen=True)
class FlatField:
    """Items of their own length along `dim` (may be negative), laid end to end."""

    dim: int = 0
    keep_on_cpu: bool = False


@dataclass(frozen=True)
class SharedField:
    """The same value for every item of a merge; items whose values differ never merge."""

    keep_on_cpu: bool = False


Field = BatchedField | FlatField | SharedField


@dataclass(frozen=True, eq=False)
class FieldElem:
    """One named value of one item, and how it batches. Two elements are equal only if they are the same object."""

    data: Value
    field: Field


def split(data: Value | Sequence[Value], field: Field, sizes: Sequence[int] | Tensor | int) -> list[FieldElem]:
    """The items of a merged value, as views.

    `sizes`: for a flat field the length of each item along its `dim` (one axis; the sum must be the data's),
    otherwise the number of items.

    Raises:
        InputError: sizes of two axes, or sizes that do not add up to the data.
    """
    if isinstance(sizes, int):
        values: list[Any] = [data] * sizes if isinstance(field, SharedField) else list(data)  # type: ignore[arg-type]
        if len(values) != sizes or isinstance(field, FlatField):
            raise InputError(f"{type(field).__name__} data of length {len(values)} cannot be split into {sizes} items")
        return [FieldElem(value, field) for value in values]
    if not isinstance(field, FlatField) or not isinstance(data, Tensor):
        raise InputError("only a tensor with a flat field is split by sizes")
    counts = _checked_sizes(sizes, data.shape[field.dim])
    return [FieldElem(one, field) for one in torch.split(data, counts, field.dim)]


def rows_to_items(columns: Mapping[str, Sequence[FieldElem]]) -> list[dict[str, FieldElem]]:
    """Columns (name -> one element per item) to items; InputError when the columns disagree on their number."""
    counts = {name: len(column) for name, column in columns.items()}
    if len(set(counts.values())) > 1:
        raise InputError(f"tensors of one modality hold different numbers of items: {counts}")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def merge_elems(elems: Sequence[FieldElem]) -> object:
    """One tensor, list or object for the batch; a single flat element is returned itself, nothing gives `[]`."""
    if not elems:
        return []
    if any(elem.field != elems[0].field for elem in elems):
        raise InputError(f"different fields cannot merge: {sorted({type(elem.field).__name__ for elem in elems})}")
    field, values = elems[0].field, [elem.data for elem in elems]
    if isinstance(field, FlatField):
        return _merge_flat([value for value in values if isinstance(value, Tensor)], field.dim)
    return merge_shared(values) if isinstance(field, SharedField) else _merge_batched(values)


def merge_shared(values: Sequence[Value]) -> Value:
    """The one value all items share; InputError when there is none or they differ."""
    if not values:
        raise InputError("a shared field needs at least one item to merge")
    if not all(same(values[0], value) for value in values[1:]):
        raise InputError("items with different values of a shared field cannot merge")
    return values[0]


def merge(items: Sequence[Mapping[str, FieldElem]], device: torch.device | str | None = None) -> dict[str, object]:
    """A batch of items for the encoder: name -> tensor, list or object. Never pins.

    Flat elements whose other axes differ are filled with zeros on the right; their true shapes then lie beside
    them as `"<name>.sizes"`, int64 `[items, axes]`. With `device`, tensors go there unless their field keeps
    them on the CPU.
    """
    if not items:
        return {}
    if any(item.keys() != items[0].keys() for item in items):
        raise InputError("items with different tensor names cannot merge")
    merged: dict[str, object] = {}
    for name in items[0]:
        elems = [item[name] for item in items]
        merged[name] = _placed(merge_elems(elems), elems[0].field, device)
        if _is_ragged(elems):
            merged[f"{name}.sizes"] = torch.tensor([list(e.data.shape) for e in elems if isinstance(e.data, Tensor)])
    return merged


def group(items: Sequence[Mapping[str, FieldElem]], kinds: Sequence[str] | None = None) -> list[list[int]]:
    """Indices of the items that may merge, groups in order of first appearance, indices rising within each.

    Items merge when their modality (`kinds`, optional), tensor names, fields and shared values are equal;
    `restore` puts per-item results back into the order of `items`.
    """
    groups: list[list[int]] = []
    for index, item in enumerate(items):
        for known in groups:
            if (kinds is None or kinds[index] == kinds[known[0]]) and _compatible(item, items[known[0]]):
                known.append(index)
                break
        else:
            groups.append([index])
    return groups


def restore(groups: Sequence[Sequence[int]], results: Sequence[Sequence[T]]) -> list[T]:
    """Per-item results of each group, in the order of the items that `group` was given."""
    by_index = {i: r for ids, rs in zip(groups, results, strict=True) for i, r in zip(ids, rs, strict=True)}
    return [by_index[index] for index in range(len(by_index))]


def same(left: Value, right: Value) -> bool:
    """Equal in type, dtype, shape and value."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left is right or (left.dtype == right.dtype and torch.equal(left, right))
    return type(left) is type(right) and bool(left == right)


def _compatible(left: Mapping[str, FieldElem], right: Mapping[str, FieldElem]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].field == right[name].field
        and (not isinstance(left[name].field, SharedField) or same(left[name].data, right[name].data))
        for name in left
    )


def _checked_sizes(sizes: Sequence[int] | Tensor, length: int) -> list[int]:
    counts = torch.as_tensor(sizes)
    if counts.ndim != 1:
        raise InputError(f"the sizes of a flat field have one axis, not {counts.ndim}")
    if int(counts.sum()) != length:
        raise InputError(f"the sizes of a flat field add up to {int(counts.sum())}, its data has {length}")
    return [int(count) for count in counts]


def _merge_batched(values: Sequence[Value]) -> object:
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) < len(values) or any(t.shape != tensors[0].shape for t in tensors):
        return list(values)
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


def _merge_flat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    dim %= tensors[0].ndim
    shape = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
    if all(t.shape[axis] == shape[axis] for t in tensors for axis in range(len(shape)) if axis != dim):
        return torch.cat(list(tensors), dim)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    out = tensors[0].new_zeros(shape)
    start = 0
    for t in tensors:
        corner = [slice(0, size) for size in t.shape]
        corner[dim] = slice(start, start + t.shape[dim])
        out[tuple(corner)] = t
        start += t.shape[dim]
    return out


def _is_ragged(elems: Sequence[FieldElem]) -> bool:
    field = elems[0].field
    if not isinstance(field, FlatField):
        return False
    shapes = [list(e.data.shape) for e in elems if isinstance(e.data, Tensor)]
    others = [[size for axis, size in enumerate(shape) if axis != field.dim % len(shape)] for shape in shapes]
    return any(other != others[0] for other in others)


def _placed(value: object, field: Field, device: torch.device | str | None) -> object:
    if device is None or field.keep_on_cpu:
        return value
    if isinstance(value, list):
        return [v.to(device) if isinstance(v, Tensor) else v for v in value]
    return value.to(device) if isinstance(value, Tensor) else value
