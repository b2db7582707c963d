"""One or several items per modality, counted before anything is decoded."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from sensorium.mm.errors import InputError, MediaError
from sensorium.mm.parse import parse_media
from sensorium.mm.types import ImageItem, VideoItem

PICTURE = np.zeros((8, 8, 3), np.uint8)
CLIP = np.zeros((4, 8, 8, 3), np.uint8)
BOTH = ("image", "video")


def parse(data, limits=None, modalities=BOTH, sampling=None):
    return parse_media(data, limits or {}, modalities, sampling or {})


def test_a_single_item_and_a_list_of_one_are_the_same():
    one, listed = parse({"image": PICTURE, "video": CLIP}), parse({"image": [PICTURE], "video": [CLIP]})
    assert {k: [i.hash for i in v] for k, v in one.items()} == {k: [i.hash for i in v] for k, v in listed.items()}
    assert isinstance(one["image"][0], ImageItem)
    assert isinstance(one["video"][0], VideoItem)
    assert parse({}) == {}
    assert parse({"image": []}) == {"image": []}


def test_what_makes_one_clip_and_what_makes_several():
    frame = Image.new("RGB", (8, 8))
    meta = {"fps": 2.0}
    for one in (CLIP, list(CLIP), [frame] * 3, (CLIP, meta), (list(CLIP), meta), ([frame] * 2, meta)):
        assert len(parse({"video": one})["video"]) == 1
    for two in ([CLIP, CLIP], np.stack([CLIP, CLIP]), [(CLIP, meta), CLIP], [[frame] * 2, list(CLIP)]):
        assert len(parse({"video": two})["video"]) == 2


def test_order_is_kept():
    pictures = [np.full((4, 4, 3), i, np.uint8) for i in range(5)]
    assert [int(item.pixels[0, 0, 0]) for item in parse({"image": pictures})["image"]] == list(range(5))


@pytest.mark.parametrize(("limit", "count"), [(0, 1), (1, 2)])
def test_limits_come_before_decoding(limit, count):
    with pytest.raises(InputError, match=rf"At most {limit} image\(s\) may be provided in one prompt"):
        parse({"image": [b"broken"] * count}, {"image": limit})
    with pytest.raises(InputError, match=r"At most 0 video\(s\)"):
        parse({"image": PICTURE, "video": CLIP}, {"video": 0})


def test_unknown_modalities_list_the_nearest():
    with pytest.raises(InputError, match=r"unknown modality 'images'; this model takes image$"):
        parse({"images": PICTURE})
    with pytest.raises(InputError, match="takes image, video"):
        parse({"smell": 1})
    with pytest.raises(InputError, match="text only"):
        parse({"image": PICTURE}, modalities=())


def test_a_wrong_item_is_named():
    with pytest.raises(MediaError, match="image 1: a dict is not a known form"):
        parse({"image": [PICTURE, {}]})
    with pytest.raises(MediaError, match="video 1: it is not in a video format"):
        parse({"video": [CLIP, b"nonsense"]})
