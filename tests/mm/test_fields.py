"""Merging the tensors of items by their fields."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sensorium.callers.errors import InputError
from sensorium.mm.fields import (
    BatchedField,
    FieldElem,
    FlatField,
    SharedField,
    group_mergeable,
    merge,
    merge_elems,
    values_equal,
)


def flat(*tensors: torch.Tensor, dim: int = 0) -> list[FieldElem]:
    return [FieldElem(t, FlatField(dim)) for t in tensors]


def cut_back(batch: dict[str, object], items: list[dict[str, FieldElem]]) -> list[dict[str, FieldElem]]:
    """Return the items again, cut out of their merged batch."""
    again: list[dict[str, FieldElem]] = [{} for _ in items]
    for name, elem in items[0].items():
        values, field = batch[name], elem.field
        if isinstance(field, SharedField):
            values = [values] * len(items)
        elif isinstance(field, FlatField):
            values = values.split([item[name].data.shape[field.dim] for item in items], field.dim)
            shapes = batch.get(f"{name}.sizes", torch.tensor([value.shape for value in values])).tolist()
            values = [value[tuple(map(slice, shape))] for value, shape in zip(values, shapes, strict=True)]
        for item, value in zip(again, values, strict=True):
            item[name] = FieldElem(value, field)
    return again


def test_flat_slices_merge_to_the_original():
    whole = torch.arange(18).view(6, 3)
    parts = flat(whole[:2], whole[2:])
    assert torch.equal(merge_elems(parts), whole)
    assert merge_elems(parts[:1]) is parts[0].data
    assert merge_elems([]) == []


def test_ragged_flat_fields_are_padded_and_their_sizes_recorded():
    ones, twos = torch.ones(2, 3), torch.full((1, 5), 2.0)
    merged = merge([{"x": e} for e in flat(ones, twos)])
    assert merged["x"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [2, 2, 2, 2, 2]]
    assert merged["x.sizes"].tolist() == [[2, 3], [1, 5]]
    other = merge([{"x": e} for e in flat(torch.ones(2, 3), torch.ones(4, 2), dim=1)])["x"]
    assert other.shape == (4, 5)
    assert other.sum() == 2 * 3 + 4 * 2
    assert other[2:, :3].sum() == 0
    assert "x.sizes" not in merge([{"x": e} for e in flat(ones, torch.ones(1, 3))])


def test_batched():
    one = torch.arange(6).view(2, 3)
    alone = merge_elems([FieldElem(one, BatchedField())])
    assert alone.shape == (1, 2, 3)
    assert alone.data_ptr() == one.data_ptr()
    assert merge_elems([FieldElem(one, BatchedField())] * 2).shape == (2, 2, 3)
    ragged = merge_elems([FieldElem(one, BatchedField()), FieldElem(one[:1], BatchedField())])
    assert [t.shape[0] for t in ragged] == [2, 1]
    assert merge_elems([FieldElem(1, BatchedField()), FieldElem(2, BatchedField())]) == [1, 2]


def test_shared():
    value = torch.ones(3)
    assert merge_elems([FieldElem(value, SharedField())] * 3) is value
    with pytest.raises(InputError, match="different values"):
        merge_elems([FieldElem(1, SharedField()), FieldElem(2, SharedField())])


def test_items_that_cannot_merge():
    with pytest.raises(InputError, match="different fields"):
        merge_elems([FieldElem(torch.ones(2), FlatField()), FieldElem(torch.ones(2), BatchedField())])
    with pytest.raises(InputError, match="different tensor names"):
        merge([{"a": FieldElem(1, BatchedField())}, {"b": FieldElem(1, BatchedField())}])
    for odd in (torch.ones(2, 2), torch.ones(2, dtype=torch.float64), 3):
        with pytest.raises(InputError, match="one dtype and number of axes"):
            merge_elems([FieldElem(torch.ones(2), FlatField()), FieldElem(odd, FlatField())])
    for dim in (1, -2):
        with pytest.raises(InputError, match=f"axis {dim} does not fit a tensor of 1 axes"):
            merge_elems(flat(torch.ones(2), torch.ones(2), dim=dim))
    assert merge([]) == {}
    mixed = merge_elems([FieldElem(torch.ones(2), BatchedField()), FieldElem(torch.ones(2, dtype=torch.int8), BatchedField())])
    assert [t.dtype for t in mixed] == [torch.float32, torch.int8]  # nothing changes its type


def test_groups_and_their_order():
    image = {"pixels": FieldElem(torch.ones(2), FlatField()), "mode": FieldElem("a", SharedField())}
    video = {"frames": FieldElem(torch.ones(2), FlatField())}
    odd = image | {"mode": FieldElem("b", SharedField())}
    half = image | {"pixels": FieldElem(torch.ones(2, dtype=torch.float16), FlatField())}
    deep = image | {"pixels": FieldElem(torch.ones(2, 2), FlatField())}
    batched = image | {"pixels": FieldElem(torch.ones(2), BatchedField())}
    assert group_mergeable([image, image, video, image, odd]) == [[0, 1, 3], [2], [4]]
    assert group_mergeable([image, half, deep, batched, image, half]) == [[0, 4], [1, 5], [2], [3]]
    assert group_mergeable([image, image], modalities=["image", "other"]) == [[0], [1]]
    assert group_mergeable([]) == []


def test_keep_on_cpu_and_devices():
    items = [{"x": FieldElem(torch.ones(2), FlatField()), "n": FieldElem(torch.ones(2), BatchedField(keep_on_cpu=True))}]
    items += [{"x": FieldElem(torch.ones(3), FlatField()), "n": FieldElem(torch.ones(3), BatchedField(keep_on_cpu=True))}]
    merged = merge(items, device="meta")
    assert merged["x"].device.type == "meta"
    assert all(t.device.type == "cpu" and not t.is_pinned() for t in merged["n"])
    assert not merge(items)["x"].is_pinned()


def test_equality_includes_type_and_dtype():
    assert values_equal(1, 1)
    assert not values_equal(1, 1.0)
    assert not values_equal(torch.ones(2), torch.ones(2, dtype=torch.int64))
    assert not values_equal(torch.ones(2), torch.ones(1, 2))
    assert not values_equal(torch.ones(1), 1)


@st.composite
def batches(draw):
    """Draw items of one, two or many requests, with every kind of field."""
    count = draw(st.integers(1, 5))
    rank = draw(st.integers(1, 3))
    dim = draw(st.integers(-rank, rank - 1))
    ragged = draw(st.booleans())
    common = [draw(st.integers(0, 3)) for _ in range(rank)]
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.uint8, torch.bfloat16, torch.bool]))
    shapes = [
        [draw(st.integers(0, 4)) if ragged or axis == dim % rank else common[axis] for axis in range(rank)]
        for _ in range(count)
    ]
    stacked = draw(st.booleans())  # equal shapes, or a list of unequal ones
    rows = [torch.randn(3 if stacked else draw(st.integers(0, 3)), 2) for _ in range(count)]
    shared = draw(st.sampled_from([3, "text", 0.5, torch.arange(3)]))
    columns = {
        "flat": [FieldElem(torch.randint(0, 2, s).to(dtype), FlatField(dim)) for s in shapes],
        "rows": [FieldElem(row, BatchedField()) for row in rows],
        "number": [FieldElem(index, BatchedField(keep_on_cpu=True)) for index in range(count)],
        "shared": [FieldElem(shared, SharedField())] * count,
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@given(batches())
def test_a_batch_holds_its_items(items):
    merged = merge(items)
    again = cut_back(merged, items)
    for item, other in zip(items, again, strict=True):
        assert item.keys() == other.keys()
        assert all(item[name].field == other[name].field and values_equal(item[name].data, other[name].data) for name in item)
    shapes = {tuple(item["flat"].data.shape) for item in items}
    assert ("flat.sizes" in merged) == (
        merged["flat"].numel() != sum(i["flat"].data.numel() for i in items) or _unlike(shapes, items)
    )
    twice = merge(again)
    assert twice.keys() == merged.keys()
    for name, value in merged.items():
        many = value if isinstance(value, list) else [value]
        other = twice[name] if isinstance(value, list) else [twice[name]]
        assert all(values_equal(a, b) for a, b in zip(many, other, strict=True))


def _unlike(shapes, items):
    dim = items[0]["flat"].field.dim
    return len({tuple(size for axis, size in enumerate(shape) if axis != dim % len(shape)) for shape in shapes}) > 1


@given(batches(), batches(), st.permutations(range(10)))
def test_items_of_many_requests_are_grouped_and_put_back(left, right, order):
    items = [*left, *right]
    items = [items[i] for i in order if i < len(items)]
    groups = group_mergeable(items)
    assert sorted(index for ids in groups for index in ids) == list(range(len(items)))
    assert all(ids == sorted(ids) for ids in groups)
    assert [ids[0] for ids in groups] == sorted(ids[0] for ids in groups)
    out: dict[int, object] = {}
    for ids in groups:
        numbers = merge([items[i] for i in ids])["number"]
        out.update(zip(ids, numbers, strict=True))
    assert [out[i] for i in range(len(items))] == [item["number"].data for item in items]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 2), st.booleans())
def test_parts_merge_to_the_tensor(sizes, dim, negative):
    shape = [2, 3, 4]
    shape[dim] = sum(sizes)
    data = torch.arange(torch.tensor(shape).prod().item()).view(shape)
    assert torch.equal(merge_elems(flat(*data.split(sizes, dim), dim=dim - 3 if negative else dim)), data)
