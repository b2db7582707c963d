"""Headers of GGUF files: each count, size and offset is compared with the file before anything is allocated for it."""

from __future__ import annotations

import errno
import mmap
import os
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from sensorium.callers.errors import CheckpointError, ConfigError, SensoriumError
from sensorium.checkpoints.files import map_regular
from sensorium.checkpoints.gguf.reader import find_encoder, find_gguf, read_gguf
from sensorium.checkpoints.gguf.tensors import mapped_loader

Q = gguf.GGMLQuantizationType


def make(path: Path, shards: int = 0, **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=shards)
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_array("tokenizer.ggml.tokens", ["a", "ä", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 2.0])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    for name, value in metadata.items():
        writer.add_uint32(name.replace("__", "."), value)
    for i in range(3):
        writer.add_tensor(f"blk.{i}.weight", np.full((4, 64), i, dtype=np.float32))
    writer.add_tensor("q", gguf.quantize(np.ones((2, 64), dtype=np.float32), Q.Q8_0), raw_dtype=Q.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors(tmp_path: Path) -> None:
    model = read_gguf(make(tmp_path / "a.gguf"))
    assert model.architecture == "llama"
    assert model.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-6  # as it was written, not the float32 next to it
    assert model.metadata["tokenizer.ggml.tokens"] == ["a", "ä", ""]
    assert model.metadata["tokenizer.ggml.scores"].tolist() == [0.5, -1.0, 2.0]
    assert model.metadata["tokenizer.ggml.add_bos_token"] is True
    assert {
        name: (one.kind, one.shape, one.nbytes) for name, one in model.tensors.items() if name in ("blk.2.weight", "q")
    } == {
        "blk.2.weight": ("F32", (4, 64), 1024),
        "q": ("Q8_0", (2, 64), 136),
    }
    tensor = model.tensors["blk.2.weight"]
    assert np.fromfile(tensor.path, np.float32, 256, offset=tensor.offset).tolist() == [2.0] * 256


def test_shards_are_one_model(tmp_path: Path) -> None:
    make(tmp_path / "a.gguf", shards=2)
    first = find_gguf(tmp_path)
    assert first is not None
    assert first.name == "a-00001-of-00002.gguf"
    model = read_gguf(first)
    assert sorted(model.tensors) == ["blk.0.weight", "blk.1.weight", "blk.2.weight", "q"]
    assert [file.name for file in model.files] == ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]
    with pytest.raises(CheckpointError, match=r"give the file that ends in -00001-of-00002\.gguf"):
        read_gguf(model.files[1])
    model.files[1].unlink()
    with pytest.raises(CheckpointError, match=r"a-00002-of-00002\.gguf is missing"):
        read_gguf(first)


def test_a_folder_names_its_only_model(tmp_path: Path) -> None:
    assert find_gguf(tmp_path) is None
    encoder = make(tmp_path / "mmproj-a.gguf")
    assert find_gguf(tmp_path) is None
    model = make(tmp_path / "a.gguf")
    assert find_gguf(tmp_path) == find_gguf(model) == model
    assert find_encoder(model) == encoder
    with pytest.raises(ConfigError, match="holds an encoder only"):
        find_gguf(encoder)
    make(tmp_path / "b.gguf")
    with pytest.raises(ConfigError, match=r"holds 2 GGUF models \(a\.gguf, b\.gguf\); give the path of one"):
        find_gguf(tmp_path)
    make(tmp_path / "b-mmproj.gguf")
    with pytest.raises(ConfigError, match="holds 2 encoders"):
        find_encoder(model)
    (tmp_path / "model.safetensors").touch()
    assert find_gguf(tmp_path) is None


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    whole = make(tmp_path / "a.gguf").read_bytes()
    last = read_gguf(tmp_path / "a.gguf").tensors["q"]
    end = last.offset + last.nbytes
    for size in (*range(0, end, 37), end - 1):
        (tmp_path / "b.gguf").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="is not a readable GGUF file"):
            read_gguf(tmp_path / "b.gguf")


def test_a_mapped_file_that_was_cut_is_named(tmp_path: Path) -> None:
    path = make(tmp_path / "a.gguf")
    load, tensors = mapped_loader(), read_gguf(path).tensors
    load(tensors["q"])
    os.truncate(path, 100)
    with pytest.raises(CheckpointError, match=r"a\.gguf was changed: it has 100 bytes, a tensor ends at"):
        load(tensors["q"])


def test_a_file_that_cannot_be_mapped_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "a.gguf")
    tensor = read_gguf(path).tensors["q"]
    before = mapped_loader()(tensor)
    before.zero_()  # only in memory
    assert mapped_loader()(tensor).any()
    with pytest.raises(CheckpointError, match=r"a\.gguf is empty, or was cut off while it was read"):
        map_regular(path, path.stat().st_size + 1)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"a\.gguf is empty, or was cut off"):
        mapped_loader()(tensor)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"a\.gguf cannot be mapped \(No such file"):
        mapped_loader()(tensor)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    path = make(tmp_path / "b.gguf")
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(CheckpointError, match=r"b\.gguf cannot be mapped \(Cannot allocate memory"):
        read_gguf(path)


HUGE = (1 << 40, (1 << 63) - 1, (1 << 64) - 1)


@pytest.mark.parametrize("number", HUGE)
def test_false_counts_are_refused(number: int, tmp_path: Path) -> None:
    """Replace each count of 64 bits: tensors, metadata, lengths of texts and arrays, dimensions and offsets."""
    whole = make(tmp_path / "a.gguf").read_bytes()
    start = len(whole) - read_gguf(tmp_path / "a.gguf").tensors["blk.0.weight"].offset
    refused = 0
    for place in range(8, len(whole) - start - 8):
        (tmp_path / "b.gguf").write_bytes(whole[:place] + struct.pack("<Q", number) + whole[place + 8 :])
        try:
            read_gguf(tmp_path / "b.gguf")
        except CheckpointError:
            refused += 1
    assert refused > 200


def test_mutations_raise_typed_errors_only(tmp_path: Path) -> None:
    whole, rng = make(tmp_path / "a.gguf").read_bytes(), random.Random(0)
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(900)] = rng.randrange(256)
        (tmp_path / "b.gguf").write_bytes(bytes(data))
        try:
            model = read_gguf(tmp_path / "b.gguf")
        except SensoriumError:
            continue
        assert all(tensor.offset + tensor.nbytes <= len(data) for tensor in model.tensors.values())


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    for data in (b"", b"GGUF", b"PK\3\4" + bytes(100), b"GGUF" + struct.pack("<I", 1) + bytes(40), b"GGUF\0\0\0\3" + bytes(40)):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="is not a readable GGUF file"):
            read_gguf(path)
    with pytest.raises(CheckpointError, match="is missing"):
        read_gguf(tmp_path / "c.gguf")
    with pytest.raises(CheckpointError, match="alignment"):
        read_gguf(make(tmp_path / "d.gguf", general__alignment=48))
