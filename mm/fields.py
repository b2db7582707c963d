"""Fields: how a named tensor of an item is split from a batch and merged into one (as in vLLM's MultiModalFieldElem)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .buffers import BUFFERS
from .errors import InputError, typed

Value = Tensor | int | float | str
Sizes = int | Tensor | Sequence[int] | Sequence[slice]


@dataclass(frozen=True)
class BatchedField:
    """One entry per item. Entries of equal shape are stacked on a new first axis; others, and plain numbers, stay a list."""

    keep_on_cpu: bool = False


@dataclass(frozen=True)
class FlatField:
    """Items of any length along `dim` (may be negative), concatenated."""

    dim: int = 0
    keep_on_cpu: bool = False


@dataclass(frozen=True)
class SharedField:
    """One value for all items of a batch. Items with different values are never merged."""

    keep_on_cpu: bool = False


Field = BatchedField | FlatField | SharedField


@dataclass(frozen=True, eq=False)
class FieldElem:
    """One named value of one item, and its field. Elements compare by identity."""

    data: Value
    field: Field


def split(data: Value | Sequence[Value], field: Field, sizes: Sizes) -> list[FieldElem]:
    """Split a merged value into items, as views.

    For a flat field, `sizes` are the lengths of the items along its `dim`, or their slices; they must cover the data without
    gaps. For other fields it is the number of items.

    Raises:
        InputError: sizes have two axes, or sizes or slices do not add up to the data.
    """
    if isinstance(field, FlatField):
        if isinstance(sizes, int) or not isinstance(data, Tensor):
            raise InputError("a flat field is split as a tensor, by the size of each item")
        dim = _axis(data, field.dim)
        return [FieldElem(one, field) for one in _cut(data, _lengths(sizes, data.shape[dim]), dim)]
    if not isinstance(sizes, int):
        raise InputError(f"{typed(field)} is split by the number of items, only a flat field by sizes")
    if isinstance(field, SharedField):
        return [FieldElem(data, field)] * sizes  # type: ignore[arg-type]
    values: Sequence[Any] = data if isinstance(data, list | tuple) else []
    if isinstance(data, Tensor) and data.ndim:
        values = data.unbind(0)
    if len(values) != sizes:
        raise InputError(f"a batch of {len(values)} cannot be split into {sizes} items")
    return [FieldElem(value, field) for value in values]


def split_batch(batch: Mapping[str, object], layout: Mapping[str, tuple[Field, Sizes]]) -> list[dict[str, FieldElem]]:
    """Split the batch that `merge` made. `layout` has the field and the sizes (as for `split`) of each tensor name.

    Padding is cut off by the true shapes in `"<name>.sizes"`.

    Raises:
        InputError: as `split`, or tensors hold different numbers of items.
    """
    columns = {name: split(batch[name], field, sizes) for name, (field, sizes) in layout.items()}  # type: ignore[arg-type]
    counts = {name: len(column) for name, column in columns.items()}
    if len(set(counts.values())) > 1:
        raise InputError(f"tensors of one modality hold different numbers of items: {counts}")
    for name in columns:
        shapes = batch.get(f"{name}.sizes")
        if isinstance(shapes, Tensor):
            columns[name] = [_trimmed(elem, shape) for elem, shape in zip(columns[name], shapes.tolist(), strict=True)]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def merge_elems(elems: Sequence[FieldElem]) -> object:
    """Merge elements into one tensor, list or object. A single flat element is returned as it is; no elements give `[]`.

    Raises:
        InputError: fields or shared values differ, or flat elements are not tensors of one dtype and rank.
    """
    if not elems:
        return []
    if any(elem.field != elems[0].field for elem in elems):
        raise InputError(f"different fields cannot merge: {sorted({type(elem.field).__name__ for elem in elems})}")
    field, values = elems[0].field, [elem.data for elem in elems]
    if isinstance(field, FlatField):
        return _merge_flat(values, field.dim)
    return merge_shared(values) if isinstance(field, SharedField) else _merge_batched(values)


def merge_shared(values: Sequence[Value]) -> Value:
    """Return the value that all items share; InputError if there is none or they differ."""
    if not values:
        raise InputError("a shared field needs at least one item to merge")
    if not all(values_equal(values[0], value) for value in values[1:]):
        raise InputError("items with different values of a shared field cannot merge")
    return values[0]


def merge(items: Sequence[Mapping[str, FieldElem]], device: torch.device | str | None = None) -> dict[str, object]:
    """Merge items into a batch for the encoder: name -> tensor, list or object.

    Flat elements whose other axes differ are padded with zeros on the right. Their true shapes are then in `"<name>.sizes"`,
    int64 `[items, axes]`, on the CPU. With `device`, tensors are moved there unless their field keeps them on the CPU.
    Nothing is pinned.

    Raises:
        InputError: as `merge_elems`, or items have different tensor names.
    """
    if not items:
        return {}
    if any(item.keys() != items[0].keys() for item in items):
        raise InputError("items with different tensor names cannot merge")
    merged: dict[str, object] = {}
    for name in items[0]:
        elems = [item[name] for item in items]
        value, target = merge_elems(elems), None if elems[0].field.keep_on_cpu else device
        merged[name] = [_placed(v, target) for v in value] if isinstance(value, list) else _placed(value, target)
        if _is_ragged(elems):
            merged[f"{name}.sizes"] = torch.tensor([list(e.data.shape) for e in elems if isinstance(e.data, Tensor)])
    return merged


def group_mergeable(items: Sequence[Mapping[str, FieldElem]], kinds: Sequence[str] | None = None) -> list[list[int]]:
    """Return groups of indices of items that can be merged, in order of first appearance; indices rise within a group.

    Items can be merged if their modality (`kinds`, optional), tensor names, fields, shared values and dtypes are equal.
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


def values_equal(left: Value, right: Value) -> bool:
    """Return whether type, dtype, shape and value are equal."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left is right or (left.dtype == right.dtype and torch.equal(left, right))
    return type(left) is type(right) and bool(left == right)


def _compatible(left: Mapping[str, FieldElem], right: Mapping[str, FieldElem]) -> bool:
    return left.keys() == right.keys() and all(_mergeable(left[name], right[name]) for name in left)


def _mergeable(left: FieldElem, right: FieldElem) -> bool:
    if left.field != right.field:
        return False
    if isinstance(left.field, SharedField):
        return values_equal(left.data, right.data)
    return _kind(left.data, left.field) == _kind(right.data, right.field)


def _kind(value: Value, field: Field) -> tuple[object, ...]:
    """Return what has to be equal for values to be in one tensor."""
    if not isinstance(value, Tensor):
        return ()
    return (value.dtype, value.ndim) if isinstance(field, FlatField) else (value.dtype,)


def _axis(data: Tensor, dim: int) -> int:
    if not -data.ndim <= dim < data.ndim:
        raise InputError(f"a flat field on axis {dim} needs more axes than the {data.ndim} of its tensor")
    return dim % data.ndim


def _lengths(sizes: Tensor | Sequence[int] | Sequence[slice], length: int) -> list[int]:
    if isinstance(sizes, Tensor):
        if sizes.ndim != 1:
            raise InputError(f"the sizes of a flat field have one axis, not {sizes.ndim}")
        sizes = sizes.tolist()
    counts, position = [], 0
    for size in sizes:
        start, stop, step = size.indices(length) if isinstance(size, slice) else (position, position + size, 1)
        if not (start == position <= stop and step == 1) or stop != int(stop):
            raise InputError(f"the items of a flat field lie end to end; {size} does not continue at {position}")
        counts.append(int(stop - start))
        position = stop
    if position != length:
        raise InputError(f"the sizes of a flat field add up to {position}, its data has {length}")
    return counts


def _cut(data: Tensor, counts: list[int], dim: int) -> Sequence[Tensor]:
    return torch.split(data, counts, dim) if counts else ()


def _trimmed(elem: FieldElem, shape: Sequence[int]) -> FieldElem:
    assert isinstance(elem.data, Tensor)
    return FieldElem(elem.data[tuple(slice(0, size) for size in shape)], elem.field)


def _merge_batched(values: Sequence[Value]) -> object:
    tensors = [value for value in values if isinstance(value, Tensor)]
    first = tensors[0] if tensors else None
    if first is None or len(tensors) < len(values) or any(t.shape != first.shape or t.dtype != first.dtype for t in tensors):
        return list(values)
    return first.unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


def _merge_flat(values: Sequence[Value], dim: int) -> Tensor:
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) < len(values) or len({(t.dtype, t.ndim) for t in tensors}) > 1:
        raise InputError("flat elements merge as tensors of one dtype and number of axes only")
    dim = _axis(tensors[0], dim)
    if len(tensors) == 1:
        return tensors[0]
    shape = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
    if all(t.shape[axis] == shape[axis] for t in tensors for axis in range(len(shape)) if axis != dim):
        shape[dim] = sum(t.shape[dim] for t in tensors)
        return torch.cat(tensors, dim, out=BUFFERS.take(shape, tensors[0].dtype) if tensors[0].is_cpu else None)
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


def _placed(value: object, device: torch.device | str | None) -> object:
    return value if device is None or not isinstance(value, Tensor) else value.to(device)
