"""Fields: how the named tensors of items are merged into a batch (as in vLLM's MultiModalFieldElem)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..callers.errors import InputError
from .buffers import BUFFERS

Value = Tensor | int | float | str


@dataclass(frozen=True)
class BatchedField:
    """One entry per item. Tensors of equal shape are stacked on a new first axis; other entries become a list."""

    keep_on_cpu: bool = False


@dataclass(frozen=True)
class FlatField:
    """One tensor per item, concatenated along `dim` (may be negative), where lengths may differ."""

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
    if isinstance(field, BatchedField):
        return _merge_batched(values)
    if not all(values_equal(values[0], value) for value in values[1:]):
        raise InputError("items with different values of a shared field cannot merge")
    return values[0]


def merge(items: Sequence[Mapping[str, FieldElem]], device: torch.device | str | None = None) -> dict[str, object]:
    """Merge items into a batch for the encoder: name -> tensor, list or object.

    Flat elements whose other axes differ are padded with zeros on the right. Their true shapes are then in `"<name>.sizes"`,
    int64 `[items, axes]`, on the CPU. With `device`, tensors are moved there unless their field keeps them on the CPU.
    Tensors are not pinned.

    Raises:
        InputError: as `merge_elems`, or items have different tensor names.
    """
    if not items:
        return {}
    if any(item.keys() != items[0].keys() for item in items):
        raise InputError("items with different tensor names cannot merge")
    merged: dict[str, object] = {}
    for name in items[0]:
        elems, field = [item[name] for item in items], items[0][name].field
        value, target = merge_elems(elems), None if field.keep_on_cpu else device
        merged[name] = [_placed(v, target) for v in value] if isinstance(value, list) else _placed(value, target)
        tensors = [elem.data for elem in elems if isinstance(elem.data, Tensor)]
        if isinstance(field, FlatField) and _is_ragged(tensors, field.dim):
            merged[f"{name}.sizes"] = torch.tensor([list(t.shape) for t in tensors])
    return merged


def group_mergeable(items: Sequence[Mapping[str, FieldElem]], modalities: Sequence[str] | None = None) -> list[list[int]]:
    """Return groups of indices of items that can be merged, in order of first appearance; indices rise within a group.

    Items can be merged if their modalities (if given), tensor names, fields, shared values and dtypes are equal.
    """
    groups: list[list[int]] = []
    for index, item in enumerate(items):
        for group in groups:
            first = items[group[0]]
            same_modality = modalities is None or modalities[index] == modalities[group[0]]
            if same_modality and item.keys() == first.keys() and all(_mergeable(item[name], first[name]) for name in item):
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


def values_equal(left: Value, right: Value) -> bool:
    """Return whether type, dtype, shape and value are equal."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left is right or (left.dtype == right.dtype and torch.equal(left, right))
    return type(left) is type(right) and bool(left == right)


def _mergeable(left: FieldElem, right: FieldElem) -> bool:
    if left.field != right.field:
        return False
    if isinstance(left.field, SharedField):
        return values_equal(left.data, right.data)
    if not (isinstance(left.data, Tensor) and isinstance(right.data, Tensor)):
        return not (isinstance(left.data, Tensor) or isinstance(right.data, Tensor))
    same_rank = left.data.ndim == right.data.ndim or isinstance(left.field, BatchedField)
    return left.data.dtype == right.data.dtype and same_rank


def _merge_batched(values: Sequence[Value]) -> object:
    tensors = [value for value in values if isinstance(value, Tensor)]
    first = tensors[0] if tensors else None
    if first is None or len(tensors) < len(values) or any(t.shape != first.shape or t.dtype != first.dtype for t in tensors):
        return list(values)
    return first.unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


def _merge_flat(values: Sequence[Value], dim: int) -> Tensor:
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) < len(values) or len({(t.dtype, t.ndim) for t in tensors}) > 1:
        raise InputError("flat elements must be tensors of one dtype and number of axes")
    axes = tensors[0].ndim
    if not -axes <= dim < axes:
        raise InputError(f"a flat field on axis {dim} does not fit a tensor of {axes} axes")
    if len(tensors) == 1:
        return tensors[0]
    shape = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
    shape[dim] = sum(t.shape[dim] for t in tensors)
    if not _is_ragged(tensors, dim):
        return torch.cat(tensors, dim, out=BUFFERS.take(shape, tensors[0].dtype) if tensors[0].is_cpu else None)
    out = tensors[0].new_zeros(shape)
    start = 0
    for t in tensors:
        corner = [slice(0, size) for size in t.shape]
        corner[dim] = slice(start, start + t.shape[dim])
        out[tuple(corner)] = t
        start += t.shape[dim]
    return out


def _is_ragged(tensors: Sequence[Tensor], dim: int) -> bool:
    """Return whether tensors differ in size along any axis but `dim`."""
    return len({tuple(size for axis, size in enumerate(t.shape) if axis != dim % t.ndim) for t in tensors}) > 1


def _placed(value: object, device: torch.device | str | None) -> object:
    return value if device is None or not isinstance(value, Tensor) else value.to(device)
