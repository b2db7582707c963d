"""Splitting and merging by field."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sensorium.mm.errors import InputError
from sensorium.mm.fields import (
    BatchedField,
    FieldElem,
    FlatField,
    SharedField,
    group,
    merge,
    merge_elems,
    merge_shared,
    restore,
    rows_to_items,
    same,
    split,
)


def flat(*tensors: torch.Tensor, dim: int = 0) -> list[FieldElem]:
    return [FieldElem(t, FlatField(dim)) for t in tensors]


def test_flat_slices_merge_to_the_original():
    whole = torch.arange(18).view(6, 3)
    parts = split(whole, FlatField(), [2, 4])
    assert [tuple(p.data.shape) for p in parts] == [(2, 3), (4, 3)]
    assert torch.equal(merge_elems(parts), whole)
    assert merge_elems(parts[:1]) is parts[0].data
    assert merge_elems([]) == []


def test_flat_with_unequal_other_axes_is_zero_filled_and_says_so():
    ones, twos = torch.ones(2, 3), torch.full((1, 5), 2.0)
    merged = merge([{"x": e} for e in flat(ones, twos)])
    assert merged["x"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [2, 2, 2, 2, 2]]
    assert merged["x.sizes"].tolist() == [[2, 3], [1, 5]]
    other = merge([{"x": e} for e in flat(torch.ones(2, 3), torch.ones(4, 2), dim=1)])["x"]
    assert other.shape == (4, 5)
    assert other.sum() == 2 * 3 + 4 * 2
    assert other[2:, :3].sum() == 0
    assert "x.sizes" not in merge([{"x": e} for e in flat(ones, torch.ones(1, 3))])


def test_split_sizes():
    data = torch.arange(18).view(9, 2)
    assert [len(e.data) for e in split(data, FlatField(), [3, 4, 2])] == [3, 4, 2]
    assert [len(e.data) for e in split(data[:5], FlatField(), torch.tensor([3, 0, 2]))] == [3, 0, 2]
    assert [e.data.shape[1] for e in split(data, FlatField(-1), [1, 1])] == [1, 1]
    with pytest.raises(InputError, match="add up to 8, its data has 9"):
        split(data, FlatField(), [3, 3, 2])
    with pytest.raises(InputError, match="one axis, not 2"):
        split(data, FlatField(), torch.ones(3, 3))
    with pytest.raises(InputError, match="cannot be split into 3"):
        split(data, BatchedField(), 3)
    with pytest.raises(InputError, match="cannot be split"):
        split(data, FlatField(), 9)
    with pytest.raises(InputError, match="only a tensor with a flat field"):
        split(data, BatchedField(), [4, 5])


def test_batched():
    one = torch.arange(6).view(2, 3)
    alone = merge_elems([FieldElem(one, BatchedField())])
    assert alone.shape == (1, 2, 3)
    assert alone.data_ptr() == one.data_ptr()
    assert merge_elems([FieldElem(one, BatchedField())] * 2).shape == (2, 2, 3)
    ragged = merge_elems([FieldElem(one, BatchedField()), FieldElem(one[:1], BatchedField())])
    assert [t.shape[0] for t in ragged] == [2, 1]
    assert merge_elems([FieldElem(1, BatchedField()), FieldElem(2, BatchedField())]) == [1, 2]
    assert [e.data.tolist() for e in split(one, BatchedField(), 2)] == [[0, 1, 2], [3, 4, 5]]


def test_shared():
    value = torch.ones(3)
    elems = split(value, SharedField(), 3)
    assert all(e.data is value for e in elems)
    assert merge_elems(elems) is value
    with pytest.raises(InputError, match="at least one item"):
        merge_shared([])
    with pytest.raises(InputError, match="different values"):
        merge_elems([FieldElem(1, SharedField()), FieldElem(2, SharedField())])


def test_what_cannot_merge():
    with pytest.raises(InputError, match="different fields"):
        merge_elems([FieldElem(torch.ones(2), FlatField()), FieldElem(torch.ones(2), BatchedField())])
    with pytest.raises(InputError, match="different tensor names"):
        merge([{"a": FieldElem(1, BatchedField())}, {"b": FieldElem(1, BatchedField())}])
    with pytest.raises(InputError, match="different numbers of items"):
        rows_to_items({"a": [FieldElem(1, BatchedField())] * 2, "b": [FieldElem(1, BatchedField())] * 3})
    assert merge([]) == {}


def test_items_from_columns():
    columns = {"a": split(torch.arange(4), FlatField(), [1, 3]), "b": split(7, SharedField(), 2)}
    items = rows_to_items(columns)
    assert [list(item) for item in items] == [["a", "b"], ["a", "b"]]
    assert torch.equal(merge(items)["a"], torch.arange(4))


def test_groups_and_their_order():
    image = {"pixels": FieldElem(torch.ones(2), FlatField()), "mode": FieldElem("a", SharedField())}
    video = {"frames": FieldElem(torch.ones(2), FlatField())}
    odd = image | {"mode": FieldElem("b", SharedField())}
    items = [image, image, video, image, odd]
    groups = group(items)
    assert groups == [[0, 1, 3], [2], [4]]
    assert restore(groups, [[f"out{i}" for i in ids] for ids in groups]) == [f"out{i}" for i in range(5)]
    assert group([image, image], kinds=["image", "other"]) == [[0], [1]]
    assert group([]) == []
    assert restore([], []) == []


def test_keep_on_cpu_and_devices():
    items = [{"x": FieldElem(torch.ones(2), FlatField()), "n": FieldElem(torch.ones(2), BatchedField(keep_on_cpu=True))}]
    items += [{"x": FieldElem(torch.ones(3), FlatField()), "n": FieldElem(torch.ones(3), BatchedField(keep_on_cpu=True))}]
    merged = merge(items, device="meta")
    assert merged["x"].device.type == "meta"
    assert all(t.device.type == "cpu" and not t.is_pinned() for t in merged["n"])
    assert not merge(items)["x"].is_pinned()


def test_same_minds_type_and_dtype():
    assert same(1, 1)
    assert not same(1, 1.0)
    assert not same(torch.ones(2), torch.ones(2, dtype=torch.int64))
    assert not same(torch.ones(2), torch.ones(1, 2))
    assert not same(torch.ones(1), 1)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 2), st.booleans())
def test_split_then_merge_is_the_identity(sizes, dim, negative):
    shape = [2, 3, 4]
    shape[dim] = sum(sizes)
    data = torch.arange(torch.tensor(shape).prod().item()).view(shape)
    field = FlatField(dim - 3 if negative else dim)
    elems = split(data, field, sizes)
    assert [e.data.shape[dim] for e in elems] == sizes
    assert torch.equal(merge_elems(elems), data)
