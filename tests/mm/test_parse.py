"""Parsing of `multi_modal_data` into sources: items, uuids, limits, precomputed embeddings."""

from __future__ import annotations

import io
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from sensorium.callers.errors import InputError, MediaError
from sensorium.mm.embeddings import ROWS, EmbeddingSpec
from sensorium.mm.parse import MultiModalDataParser, plain_data, trusted_source
from sensorium.mm.types import EmbeddingItem, Media

GRID = EmbeddingSpec(8, "image_embeds", "image_grid_thw", 2)
PARSER = MultiModalDataParser(("image", "video", "audio"), {"audio": 1}, {"audio": EmbeddingSpec(8, "audio_embeds")})
ROWS_PARSER = MultiModalDataParser(("image",), embeddings={"image": EmbeddingSpec(8, "image_embeds")})
GRID_PARSER = MultiModalDataParser(("image",), embeddings={"image": GRID})
FRAME = np.zeros((4, 6, 3), np.uint8)
CLIP = np.zeros((5, 4, 6, 3), np.uint8)


def count(modality: str, value: object) -> int:
    return len(PARSER.parse({modality: value})[modality])


@pytest.mark.parametrize(
    ("modality", "value", "items"),
    [
        ("image", FRAME, 1),
        ("image", torch.zeros(3, 4, 6, dtype=torch.uint8), 1),
        ("image", [FRAME], 1),
        ("image", (FRAME, b"png"), 2),
        ("image", np.zeros((2, 4, 6, 3), np.uint8), 2),
        ("image", [], 0),
        ("image", "picture.png", 1),
        ("video", CLIP, 1),
        ("video", [FRAME, FRAME], 1),
        ("video", [Image.new("RGB", (4, 4))] * 3, 1),
        ("video", [CLIP, CLIP], 2),
        ("video", (CLIP, None), 1),
        ("audio", [np.float32(0.5), np.float32(0.25)], 1),
        ("video", np.zeros((2, 5, 4, 6, 3), np.uint8), 2),
        ("video", (CLIP, {"fps": 5.0}), 1),
        ("video", [(CLIP, {"fps": 5.0}), b"mp4"], 2),
        ("video", [b"mp4"], 1),
        ("audio", np.zeros(100, np.float32), 1),
        ("audio", [0.0, 0.5], 1),
        ("audio", (np.zeros(100), 8000), 1),
        ("audio", (np.zeros((2, 100)), np.int64(8000)), 1),
        ("audio", (8000, np.zeros(100)), 1),
        ("audio", [b"wav"], 1),
    ],
)
def test_what_counts_as_one_item(modality, value, items):
    assert count(modality, value) == items


def test_order_options_and_uuids_stay_with_their_items():
    given = [Media("a.png", uuid="x", max_pixels=5000), "b.png", Media("c.png", detail="low")]
    sources = PARSER.parse({"image": given}, {"image": [None, "y", None]})["image"]
    assert [(s.index, s.data, s.uuid, dict(s.options)) for s in sources] == [
        (0, "a.png", "x", {"max_pixels": 5000}),
        (1, "b.png", "y", {}),
        (2, "c.png", None, {"detail": "low"}),
    ]


def test_the_number_of_uuids_must_equal_the_number_of_items():
    for uuids in ({"image": []}, {"image": ["a", "b"]}):
        with pytest.raises(InputError, match="must have the same length as"):
            PARSER.parse({"image": FRAME}, uuids)
    with pytest.raises(InputError, match="must have the same length as"):
        PARSER.parse({"image": [FRAME, FRAME]}, {"image": "one"})
    with pytest.raises(InputError, match="list of strings or None"):
        PARSER.parse({"image": FRAME}, {"image": [3]})
    with pytest.raises(InputError, match="unknown modality 'images'; this model takes image"):
        PARSER.parse({}, {"images": ["a"]})


def test_an_item_without_data_needs_a_uuid():
    for data in ({"image": None}, {"image": [None, None]}, {}):
        names = [source.uuid for source in PARSER.parse(data, {"image": ["a", "b"]})["image"]]
        assert names == ["a", "b"]
    with pytest.raises(InputError, match="image 1: it is missing"):
        PARSER.parse({"image": [FRAME, None]})
    with pytest.raises(InputError, match="image 1: it is missing"):
        PARSER.parse({"image": [None, None]}, {"image": ["a", None]})


def test_limits_are_the_smaller_of_the_callers_and_the_models():
    with pytest.raises(InputError, match=r"At most 1 image\(s\) may be provided in one prompt, not 2"):
        PARSER.parse({"image": [FRAME] * 2}, limits={"image": 1})
    with pytest.raises(InputError, match=r"At most 0 image\(s\) may be provided"):
        PARSER.parse({"image": FRAME}, limits={"image": 0})
    with pytest.raises(InputError, match=r"At most 1 audio\(s\) may be provided"):
        PARSER.parse({"audio": [b"a", b"b"]}, limits={"audio": 9})
    rows = torch.ones(3, 8)
    assert len(ROWS_PARSER.parse({"image": rows}, limits={"image": 0})["image"]) == 1  # rows need no encoder


def rows_of(parser: MultiModalDataParser, value: object) -> list[list[int]]:
    sources = parser.parse({"image": value})["image"]
    assert all(isinstance(source.data, EmbeddingItem) for source in sources)
    return [list(source.data.tensors[ROWS].shape) for source in sources]


def test_forms_of_precomputed_embeddings():
    assert rows_of(ROWS_PARSER, torch.ones(3, 8)) == [[3, 8]]
    assert rows_of(ROWS_PARSER, torch.ones(2, 3, 8, dtype=torch.bfloat16)) == [[3, 8]] * 2
    assert rows_of(ROWS_PARSER, [torch.ones(3, 8), torch.ones(5, 8)]) == [[3, 8], [5, 8]]
    assert rows_of(ROWS_PARSER, {"image_embeds": [torch.ones(3, 8)]}) == [[3, 8]]
    assert rows_of(ROWS_PARSER, [Media(torch.ones(3, 8), uuid="x")]) == [[3, 8]]
    flat = {"image_embeds": torch.ones(10, 8), "image_grid_thw": [[1, 4, 4], [1, 4, 6]]}
    assert rows_of(GRID_PARSER, flat) == [[4, 8], [6, 8]]
    (source,) = GRID_PARSER.parse({"image": {"image_embeds": np.ones((4, 8)), "image_grid_thw": (1, 4, 4)}})["image"]
    assert source.data.tensors["grid"].tolist() == [1, 4, 4]
    sound = {"audio_embeds": torch.ones(4, 8)}
    assert PARSER.parse({"audio": sound})["audio"][0].data.tensors[ROWS].shape == (4, 8)


def test_uint8_tensors_are_pixels():
    (source,) = ROWS_PARSER.parse({"image": torch.zeros(3, 16, 8, dtype=torch.uint8)})["image"]
    assert not isinstance(source.data, EmbeddingItem)
    (source,) = ROWS_PARSER.parse({"image": torch.zeros(16, 8, 3)})["image"]  # an image of the wrong dtype, refused later
    assert not isinstance(source.data, EmbeddingItem)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.ones(3, 7), r"image 0: embeddings must have the shape \[n, 8\]"),
        (torch.ones(8), "image 0: embeddings must have 2 or 3 axes"),
        (torch.ones(1, 2, 3, 8), "image 0: embeddings must have 2 or 3 axes"),
        (torch.ones(0, 8), "image 0: embeddings must have the shape"),
        (torch.full((3, 8), torch.nan), "image 0: embeddings hold NaN"),
        (torch.full((3, 8), torch.inf), "image 0: embeddings hold NaN or infinite"),
        (torch.eye(8).to_sparse(), "image 0: embeddings must be a dense tensor"),
        (np.ones((3, 8), np.longdouble), "image 0: embeddings must be floating point"),
        (torch.ones(2, 3, 8, device="meta"), "image 0: embeddings must be a dense tensor"),
        ([torch.ones(3, 8), FRAME], "image 1: embeddings must be floating point"),
        ([torch.ones(3, 8), "x.png"], "image 1: embeddings must be a dense tensor"),
        ({"image_embeds": torch.ones(3, 8, dtype=torch.int32)}, "image 0: embeddings must be floating point"),
        ({"image_embeds": torch.ones(3, 8), "grid": 1}, "image 0: embeddings need exactly the keys image_embeds"),
        ({"image_embeds": "x"}, "image 0: image_embeds must be a tensor"),
        ([Media(torch.ones(2, 3, 8))], "image 0: it holds rows of 2 items"),
    ],
)
def test_embeddings_that_do_not_fit_are_refused(value, reason):
    with pytest.raises(InputError, match=reason):
        ROWS_PARSER.parse({"image": value})


def test_embeddings_may_have_any_strides_and_byte_order():
    rows = np.arange(32, dtype=np.float32).reshape(4, 8)
    fixed = np.frombuffer(rows.tobytes(), np.float32).reshape(4, 8)  # not writable
    for form in (rows[::-1].copy()[::-1], rows.astype(">f4"), np.asfortranarray(rows), fixed):
        for value in ([form], {"image_embeds": form, "image_grid_thw": np.array([[4, 4, 1]])[:, ::-1]}):
            parser = GRID_PARSER if isinstance(value, dict) else ROWS_PARSER
            (source,) = parser.parse({"image": value})["image"]
            assert torch.equal(source.data.tensors[ROWS], torch.from_numpy(rows))


def test_two_uuids_of_one_item_must_be_equal():
    said = r"image 1: its uuid is 'u1', and multi_modal_uuids\[\"image\"\] says 'u2'; give one of them"
    with pytest.raises(MediaError, match=said):
        PARSER.parse({"image": [FRAME, Media(FRAME, "u1")]}, {"image": ["a", "u2"]})
    for names in (["u1"], [None]):
        (source,) = PARSER.parse({"image": Media(FRAME, "u1")}, {"image": names})["image"]
        assert source.uuid == "u1"


@pytest.mark.parametrize(("uuid", "said"), [("", "''"), (5, "an int"), (b"x", "a bytes")])
def test_a_uuid_must_be_a_string(uuid, said):
    with pytest.raises(InputError, match=f"image 1: its uuid must be a non-empty string, not {said}$"):
        PARSER.parse({"image": [FRAME, Media(FRAME, uuid=uuid)]})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.ones(4, 8), "need their grids"),
        ({"image_embeds": torch.ones(4, 8)}, "exactly the keys image_embeds and image_grid_thw"),
        ({"image_embeds": torch.ones(5, 8), "image_grid_thw": [[1, 4, 4]]}, "its grids need 4 rows"),
        ({"image_embeds": [torch.ones(5, 8)], "image_grid_thw": [[1, 4, 4]]}, "it has 5 rows but its grid"),
        ({"image_embeds": [torch.ones(4, 8)], "image_grid_thw": [[1, 4, 4]] * 2}, "1 items but image_grid_thw holds 2 grids"),
        ({"image_embeds": torch.ones(4, 8), "image_grid_thw": [[1, 4, 5]]}, "not divisible by the merge size 2"),
        ({"image_embeds": torch.ones(4, 8), "image_grid_thw": [[0, 4, 4]]}, "of positive integers per item"),
        ({"image_embeds": torch.ones(4, 8).to_sparse(), "image_grid_thw": [[1, 4, 4]]}, "embeddings must be a dense tensor"),
        (
            {"image_embeds": torch.ones(4, 8), "image_grid_thw": torch.ones(1, 3, device="meta")},
            "of positive integers per item",
        ),
        ({"image_embeds": torch.ones(4, 8), "image_grid_thw": "x"}, "of positive integers per item"),
    ],
)
def test_embeddings_that_contradict_their_grids_are_refused(value, reason):
    with pytest.raises(InputError, match=reason):
        GRID_PARSER.parse({"image": value})


def test_vision_chunks_keep_their_order_and_kinds():
    parser = MultiModalDataParser(("vision_chunk",))
    stream = [
        FRAME,
        {"type": "video", "video": CLIP, "uuid": "v"},
        Media(b"png", max_pixels=9),
        {"type": "image", "image": FRAME},
    ]
    sources = parser.parse({"vision_chunk": stream})["vision_chunk"]
    assert [(s.modality, s.index, s.kind, s.uuid) for s in sources] == [
        ("vision_chunk", 0, "image", None),
        ("vision_chunk", 1, "video", "v"),
        ("vision_chunk", 2, "image", None),
        ("vision_chunk", 3, "image", None),
    ]
    assert sources[2].options == {"max_pixels": 9}
    with pytest.raises(InputError, match=r"vision_chunk 1: .*did you mean video"):
        parser.parse({"vision_chunk": [FRAME, {"type": "vidoe", "video": CLIP}]})


def test_trusted_source(tmp_path):
    path = tmp_path / "a b.png"
    for text in (str(path), path.as_uri(), path.as_uri().replace("file:", "FILE:")):
        assert trusted_source(text) == path
    for kept in ("data:image/png;base64,AAAA", "DATA:,", "https://a.example/b.png", "file://server/a.png", FRAME, b"a", path):
        assert trusted_source(kept) is kept


def test_a_name_that_cannot_be_compared_is_refused():
    for uuid in (np.zeros(2), 10**5000):
        with pytest.raises(MediaError, match="image 0: its uuid must be a non-empty string"):
            PARSER.parse({"image": [Media(FRAME, uuid=uuid)]}, {"image": ["u1"]})


def test_items_of_datasets():
    samples = np.zeros(8, np.float32)
    decoder = SimpleNamespace(get_all_samples=lambda: SimpleNamespace(data=torch.zeros(2, 8), sample_rate=8000))
    for value in (
        {"array": samples, "sampling_rate": 8000},
        {"raw": samples, "sampling_rate": 8000},
        {"path": "a", "array": samples.tolist(), "sampling_rate": 8000},
    ):
        found, rate = plain_data(value)
        assert (found.tolist(), rate) == (samples.tolist(), 8000)
    assert plain_data(decoder)[1] == 8000
    assert plain_data({"bytes": b"x", "path": "a.png"}) == b"x"
    assert plain_data({"bytes": None, "path": "a.png"}) == "a.png"
    for value in ({}, {"path": "a.png"}, {"array": samples}, {"bytes": b"x", "image_embeds": 1}, "a.png", None):
        assert plain_data(value) is value
    parser = MultiModalDataParser(("audio",))
    (source,) = parser.parse({"audio": {"array": samples, "sampling_rate": 8000}})["audio"]
    assert source.data[1] == 8000
    with pytest.raises(MediaError, match="audio 0: its array is not a regular array of numbers"):
        parser.parse({"audio": {"array": [[1.0], [1.0, 2.0]], "sampling_rate": 8000}})
    broken = SimpleNamespace(get_all_samples=lambda: torch.zeros(2) + torch.zeros(3))
    with pytest.raises(MediaError, match=r"audio 0: its decoder failed \(The size of tensor"):
        parser.parse({"audio": broken})


def test_an_iterator_gives_several_items_and_an_open_file_is_one(tmp_path):
    assert count("image", (name for name in ("a", "b"))) == 2
    assert count("image", io.BytesIO(b"x")) == 1
    with tempfile.TemporaryFile() as file:
        assert count("image", file) == 1


def test_items_over_the_limit_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    read, source = [], MultiModalDataParser._source
    monkeypatch.setattr(MultiModalDataParser, "_source", lambda self, *item: read.append(item) or source(self, *item))
    with pytest.raises(InputError, match=r"At most 3 image\(s\) may be provided in one prompt, not 1000"):
        PARSER.parse({"image": [b"png"] * 1000}, limits={"image": 3})
    assert len(read) == 4
