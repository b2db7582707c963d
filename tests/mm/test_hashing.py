"""Identities: what must differ, what must not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sensorium.mm.hashing import digest
from sensorium.mm.media.image import load_image
from sensorium.mm.media.video import load_video

ONE = np.float32(1)
ARRAYS = [ONE, np.ones(1, np.float32), np.ones(1, np.int32), np.ones((1, 1), np.float32), np.zeros((0, 2)), np.zeros((2, 0))]
NESTS = [{"ab": "c"}, {"a": "bc"}, {"a": {"b": 1}}, {"a.b": 1}, [], {}, ["x"], [["x"]], ["x", "y"], [1, [2]], [[1], 2], [1, 2]]
LEAVES = [None, "", b"", 0, 0.0, False, "x", b"x", "xy", 1, True, 1.0, "1", np.frombuffer(ONE.tobytes(), np.int32)]
DIFFERENT = [*ARRAYS, *NESTS, *LEAVES]


def test_different_values_have_different_identities():
    for left, right in itertools.combinations(DIFFERENT, 2):
        assert digest("d", left) != digest("d", right), (left, right)
    assert digest("d", "x") != digest("e", "x")
    assert digest("d", "a", "b") != digest("d", ["a", "b"]) != digest("d", "ab")
    assert len(digest("d")) == 64


def test_equal_values_have_equal_identities():
    grid = np.arange(24, dtype=np.int16).reshape(4, 6)
    assert digest("d", {"a": 1, "b": {"c": 2, "d": 3}}) == digest("d", {"b": {"d": 3, "c": 2}, "a": 1})
    assert digest("d", grid[:, ::2]) == digest("d", grid[:, ::2].copy()) == digest("d", torch.from_numpy(grid)[:, ::2])
    assert digest("d", grid.T) != digest("d", grid.reshape(6, 4))
    assert digest("d", grid.astype(">i2")) == digest("d", grid)
    assert digest("d", (1, 2)) == digest("d", [1, 2])
    assert digest("d", bytearray(b"x"), memoryview(b"y")) == digest("d", b"x", b"y")
    assert digest("d", torch.ones(2, dtype=torch.bfloat16)) != digest("d", torch.ones(2, dtype=torch.float16))


def test_other_types_have_none():
    with pytest.raises(TypeError, match="a set has no identity"):
        digest("d", {1})


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


@given(values, values)
def test_only_equal_values_share_an_identity(left, right):
    assert (digest("d", left) == digest("d", right)) == (repr(_sorted(left)) == repr(_sorted(right)))


def _sorted(value: object) -> object:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(v) for v in value] if isinstance(value, list) else value


def test_pictures_and_clips():
    colour = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8))
    modes = [
        colour,
        colour.convert("L"),
        colour.convert("1"),
        colour.convert("CMYK"),
        colour.convert("RGBA"),
        colour.transpose(5),
    ]
    hashes = [load_image(image, 0).hash for image in modes]
    assert len(set(hashes)) == len(modes)
    black = Image.new("L", (4, 4))
    assert load_image(black, 0).hash != load_image(black.convert("1"), 0).hash  # equal pixels, another mode
    array = np.array(colour)
    assert load_image(array, 0).hash == load_image(torch.from_numpy(array), 3).hash == hashes[0]
    frames = np.stack([array, array])
    assert load_video(frames, 0, {}).hash != load_video(frames[:1], 0, {}).hash
    assert load_video(frames, 0, {}).hash == load_video(list(frames), 0, {}).hash
    sampled = [load_video((frames.repeat(4, 0), {"fps": 4.0}), 0, {"num_frames": n}).hash for n in (2, 4)]
    assert sampled[0] != sampled[1]


def test_palettes():
    index = Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4), "L")
    hashes = set()
    for palette in (range(256 * 3), range(256 * 3, 0, -1)):
        coded = index.copy()
        coded.putpalette([v % 256 for v in palette])
        hashes.add(load_image(coded, 0).hash)
    assert len(hashes) == 2
