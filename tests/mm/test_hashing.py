"""Digests: values that must have different ones, and values that must have the same."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from collections import UserDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sensorium.callers.errors import MAX_DEPTH, InputError
from sensorium.mm.fields import BatchedField, FieldElem, FlatField, SharedField
from sensorium.mm.hashing import digest
from sensorium.mm.media.image import hash_image
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.media.video import hash_video
from sensorium.mm.types import (
    AudioItem,
    EmbeddingItem,
    FramePlan,
    ImageItem,
    ItemGeometry,
    Media,
    MediaHeader,
    MultiModalFeature,
    PlaceholderRange,
    VideoItem,
    VisionChunk,
)

ONE = np.float32(1)
ARRAYS = [ONE, np.ones(1, np.float32), np.ones(1, np.int32), np.ones((1, 1), np.float32), np.zeros((0, 2)), np.zeros((2, 0))]
NESTS = [{"ab": "c"}, {"a": "bc"}, {"a": {"b": 1}}, {"a.b": 1}, [], {}, ["x"], [["x"]], ["x", "y"], [1, [2]], [[1], 2], [1, 2]]
LEAVES = [None, "", b"", 0, 0.0, False, "x", b"x", "xy", 1, True, 1.0, "1", np.frombuffer(ONE.tobytes(), np.int32)]
DIFFERENT = [*ARRAYS, *NESTS, *LEAVES]


def test_different_values_have_different_digests():
    for left, right in itertools.combinations(DIFFERENT, 2):
        assert digest("d", left) != digest("d", right), (left, right)
    assert digest("d", "x") != digest("e", "x")
    assert digest("d", "a", "b") != digest("d", ["a", "b"]) != digest("d", "ab")
    assert len(digest("d")) == 64


def test_equal_values_have_equal_digests():
    grid = np.arange(24, dtype=np.int16).reshape(4, 6)
    assert digest("d", {"a": 1, "b": {"c": 2, "d": 3}}) == digest("d", {"b": {"d": 3, "c": 2}, "a": 1})
    assert digest("d", grid[:, ::2]) == digest("d", grid[:, ::2].copy()) == digest("d", torch.from_numpy(grid)[:, ::2])
    assert digest("d", grid.T) != digest("d", grid.reshape(6, 4))
    assert digest("d", grid.astype(">i2")) == digest("d", grid)
    assert digest("d", (1, 2)) == digest("d", [1, 2])
    assert digest("d", bytearray(b"x"), memoryview(b"y")) == digest("d", b"x", b"y")
    assert digest("d", torch.ones(2, dtype=torch.bfloat16)) != digest("d", torch.ones(2, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int16, np.float16, np.float64, np.complex64])
def test_arrays_of_any_kind(dtype):
    value = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    want = digest("d", value)
    assert digest("d", torch.from_numpy(value)) == digest("d", np.asfortranarray(value)) == want
    assert digest("d", value.astype(value.dtype.newbyteorder(">"))) == digest("d", value[::-1][::-1]) == want
    assert digest("d", value[0, 0]) == digest("d", torch.tensor(value[0, 0])) == digest("d", np.array(value[0, 0]))
    assert digest("d", value[0, 0]) != digest("d", value[0, :1]) != digest("d", value[:1, :1])


def test_views_and_lazy_tensors():
    half = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    assert digest("d", half.t().contiguous().t()) == digest("d", half) != digest("d", half.t())
    assert digest("d", half.requires_grad_()) == digest("d", half.detach())
    wave = torch.tensor([1 + 2j, 3 - 1j])
    assert digest("d", wave.conj()) == digest("d", wave.conj().resolve_conj()) != digest("d", wave)
    assert digest("d", memoryview(b"abcd")[::2]) == digest("d", b"ac")
    assert digest("d", UserDict({"b": 1, "a": 2})) == digest("d", {"a": 2, "b": 1})
    assert digest("d", {1: "a", "1": "b"}) == digest("d", {"1": "b", 1: "a"}) != digest("d", {1: "b", "1": "a"})
    assert digest("d", 10**5000) != digest("d", -(10**5000))


OTHERS = [
    ({1}, "a set cannot be hashed"),
    (range(10**12), "a range cannot be hashed"),
    (object(), "an object cannot be hashed"),
    (np.array([object()]), "an array of object cannot be hashed"),
    (np.zeros(2, "M8[s]"), "an array of datetime64"),
    (torch.eye(2).to_sparse(), "a tensor of layout torch.sparse_coo"),
    (torch.ones(2, device="meta"), "on meta cannot be hashed"),
]


@pytest.mark.parametrize(("value", "text"), OTHERS, ids=[text for _, text in OTHERS])
def test_other_types_are_refused(value, text):
    with pytest.raises(InputError, match=text):
        digest("d", {"deep": [value]})


def nested(depth: int, kind: type) -> object:
    value: object = "leaf"
    for _ in range(depth):
        value = {"a": value} if kind is dict else [value]
    return value


@pytest.mark.parametrize("kind", [list, dict])
def test_deep_and_endless_nesting_is_refused(kind):
    assert len({digest("d", nested(depth, kind)) for depth in range(MAX_DEPTH + 1)}) == MAX_DEPTH + 1
    with pytest.raises(InputError, match=f"nested more than {MAX_DEPTH} deep"):
        digest("d", nested(MAX_DEPTH + 1, kind))
    with pytest.raises(InputError, match="or contain themselves"):
        digest("d", nested(10_000, kind))
    endless: list[object] = [1]
    endless.append(endless)
    with pytest.raises(InputError, match="contain themselves"):
        digest("d", {"metadata": endless} if kind is dict else endless)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


@given(values, values)
def test_only_equal_values_share_a_digest(left, right):
    assert (digest("d", left) == digest("d", right)) == (repr(_sorted(left)) == repr(_sorted(right)))


def _sorted(value: object) -> object:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(v) for v in value] if isinstance(value, list) else value


def messages() -> list[object]:
    plan = FramePlan((0, 3), (0.0, 0.1), 30, 2.0, ((2, 3),), (4,))
    grid = ItemGeometry(2, 4, 6, 2, 1.5, (0.0, 0.1))
    elems = {
        "flat": FieldElem(torch.arange(6).view(2, 3).t(), FlatField(-1)),
        "rows": FieldElem(torch.ones((), dtype=torch.bfloat16), BatchedField(keep_on_cpu=True)),
        "shared": FieldElem("text", SharedField()),
    }
    mask = PlaceholderRange(3, 5, torch.tensor([False, True, False, True, True]))
    return [
        Media(np.zeros((2, 2, 3), np.uint8), "name", fps=2.0),
        plan,
        MediaHeader("video", 4, 6, plan, exact=False),
        ImageItem(torch.zeros(4, 6, 3, dtype=torch.uint8)),
        VideoItem(torch.zeros(2, 4, 6, 3, dtype=torch.uint8)[:, ::2], plan),
        AudioItem(torch.linspace(-1, 1, 8), 16000),
        VisionChunk(torch.zeros(1, 4, 6, 3, dtype=torch.uint8)),
        EmbeddingItem("image", {"image_embeds": torch.ones(2, 3)}),
        grid,
        mask,
        elems["flat"],
        MultiModalFeature("image", elems, mask, grid, "0" * 64),
    ]


def plain(value: object) -> object:
    """Return a dataclass of the package as nested lists, which `digest` takes."""
    if dataclasses.is_dataclass(value):
        return [type(value).__name__, *(plain(getattr(value, field.name)) for field in dataclasses.fields(value))]
    return {key: plain(entry) for key, entry in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("value", messages(), ids=lambda value: type(value).__name__)
def test_pickled_and_copied_values_keep_their_digest(value):
    for other in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
        assert type(other) is type(value)
        assert digest("d", plain(other)) == digest("d", plain(value))


def test_images_and_videos():
    colour = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8))
    grey = Image.new("L", (4, 4))  # black in every mode
    index = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(8, 6), "L")
    palettes = [index.copy() for _ in range(2)]
    for coded, start in zip(palettes, (0, 1), strict=True):
        coded.putpalette([(value + start) % 256 for value in range(256 * 3)])
    pictures = [
        colour,
        *(colour.convert(mode) for mode in ("L", "1", "CMYK", "RGBA")),
        colour.transpose(Image.Transpose.TRANSPOSE),
    ]
    pictures += [grey, grey.convert("1"), index, *palettes]
    assert len({hash_image(picture, MediaPolicy()) for picture in pictures}) == len(pictures)
    array = np.array(colour)
    assert (
        hash_image(array, MediaPolicy())
        == hash_image(torch.from_numpy(array), MediaPolicy())
        == hash_image(colour, MediaPolicy())
    )
    assert hash_image(array[:, ::2], MediaPolicy()) == hash_image(array[:, ::2].copy(), MediaPolicy())
    frames = np.stack([array, array])
    assert hash_video(frames, MediaPolicy()) == hash_video(list(frames), MediaPolicy()) != hash_video(frames[:1], MediaPolicy())
    assert hash_image(array, MediaPolicy()) != hash_video(array[None], MediaPolicy())
