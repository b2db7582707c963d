"""Encoder rows on disk: the same bits after a restart, and nothing from damaged files or other models."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest
import torch
from rows_on_disk import WIDTH, counts, files, filled, key_of, make, rows_of
from safetensors.torch import load_file, save_file
from sensorium.engine.connectors.packing import checksum
from sensorium.engine.worker import encoder_store


def test_without_a_folder_it_is_a_dict():
    store = make(None)
    rows = rows_of(0)
    store.put("a", rows)
    assert store.rows.get("a") is rows
    assert "a" in store.rows
    store.drop(["a", "unknown"])
    assert store.rows.get("a") is None
    assert store.load(key_of(0), 5) is None
    store.flush()
    store.close()
    assert store.stats == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_have_the_same_bits_after_a_restart(tmp_path, dtype):
    first = make(tmp_path / "new" / "folder", dtype=dtype)
    rows = rows_of(1, 7, dtype)
    rows[0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-30])
    first.put(key_of(1), rows)
    first.drop([key_of(1)])
    first.close()
    second = make(tmp_path / "new" / "folder", dtype=dtype)
    found = second.load(key_of(1), 7)
    assert found is second.rows.get(key_of(1))
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), rows.view(torch.uint8))
    assert second.load(key_of(2), 7) is None
    assert (counts(second).hits, counts(second).misses, counts(second).damaged) == (1, 1, 0)


def test_only_the_rows_of_a_view_are_written(tmp_path):
    store = make(tmp_path)
    packed = rows_of(3, 1000)
    store.put(key_of(3), packed[10:15])
    store.close()
    assert files(tmp_path)[0].stat().st_size < 1000
    assert torch.equal(make(tmp_path).load(key_of(3), 5), packed[10:15])


def test_files_are_private(tmp_path):
    path = filled(tmp_path / "cache")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    assert path.name == f"{key_of(0)}.safetensors"
    assert not list(tmp_path.rglob("*.tmp"))


def test_pending_rows_are_found(tmp_path, monkeypatch):
    store = make(tmp_path)
    monkeypatch.setattr(store.tensors._writer, "submit", lambda *job: None)
    rows = rows_of(0)
    store.put(key_of(0), rows)
    store.drop([key_of(0)])
    assert store.load(key_of(0), 5) is rows
    assert not files(tmp_path)


def test_a_piece_of_an_item_has_its_own_file(tmp_path):
    store = make(tmp_path)
    for part in range(2):
        store.put(f"{key_of(0)}.{part}", rows_of(part))
    store.close()
    assert torch.equal(make(tmp_path).load(f"{key_of(0)}.1", 5), rows_of(1))


@pytest.mark.parametrize("name", ["models/vision/vit.py", "kernels/_native.so", "processors/a.py", "mm/a.py"])
def test_changed_code_does_not_load_old_rows(tmp_path, monkeypatch, name):
    for room in ("first", "second"):
        for file in (name, "models/__init__.py", "engine/setup/loader.py"):
            (tmp_path / room / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / room / file).write_text("")
    monkeypatch.setattr(encoder_store, "_ROOT", tmp_path / "first")
    filled(tmp_path / "rows")
    (tmp_path / "second/engine/setup/loader.py").write_text("makes no rows")
    monkeypatch.setattr(encoder_store, "_ROOT", tmp_path / "second")
    assert make(tmp_path / "rows").load(key_of(0), 5) is not None
    encoder_store.code_digest.cache_clear()  # as in the next process
    (tmp_path / "second" / name).write_text("mended")
    assert make(tmp_path / "rows").load(key_of(0), 5) is None


def test_other_backends_do_not_share_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("SENSORIUM_KERNELS", "activation=torch,linear=torch")
    filled(tmp_path)
    assert make(tmp_path).load(key_of(0), 5) is not None
    monkeypatch.setenv("SENSORIUM_KERNELS", "activation=torch,linear=torch,varlen_attention=reference")
    assert make(tmp_path).load(key_of(0), 5) is None


@pytest.mark.parametrize("other", [{"fingerprint": "another model"}, {"dtype": torch.float32}])
def test_models_and_dtypes_do_not_share_rows(tmp_path, other):
    filled(tmp_path)
    store = make(tmp_path, **other)
    assert store.load(key_of(0), 5) is None
    assert counts(store).damaged == 0
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize(
    "key", ["", "a", "../../etc/passwd", "../" * 10 + "x", "A" * 64, "g" * 64, "0" * 63, "0" * 64 + "\n", "0" * 64 + "./"]
)
def test_a_key_that_is_not_a_hash_touches_no_file(tmp_path, key):
    store = make(tmp_path / "cache")
    store.put(key, rows_of(0))
    assert store.load(key, 5) is None
    store.close()
    assert not list(tmp_path.rglob("*"))
    assert store.rows.get(key) is not None


def test_rows_of_another_width_or_dtype_are_not_written(tmp_path):
    store = make(tmp_path)
    store.put(key_of(0), torch.zeros(5, WIDTH + 1, dtype=torch.bfloat16))
    store.put(key_of(1), torch.zeros(5, WIDTH))
    store.put(key_of(2), rows_of(2), write=False)
    store.close()
    assert not files(tmp_path)
    assert len(store.rows) == 3


def is_refused(folder: Path, caplog) -> bool:
    """Check that a damaged file is not loaded but deleted and logged, and that it can be written again."""
    path = files(folder)[0]
    with caplog.at_level(logging.WARNING):
        store = make(folder)
        assert store.load(key_of(0), 5) is None
    assert not path.exists()
    assert counts(store).damaged == 1
    assert path.stem in caplog.text
    caplog.clear()
    store.put(key_of(0), rows_of(0))
    store.flush()
    return torch.equal(make(folder).load(key_of(0), 5), rows_of(0))


def test_a_pipe_in_place_of_rows_is_deleted_without_waiting(tmp_path, caplog):
    store = make(tmp_path)
    store.put(key_of(0), rows_of(0))
    store.flush()
    (path,) = files(tmp_path)
    path.unlink()
    os.mkfifo(path)
    assert is_refused(tmp_path, caplog)


def test_every_flipped_bit_is_detected_or_harmless(tmp_path, caplog):
    path = filled(tmp_path)
    whole = path.read_bytes()
    for position in range(0, len(whole)):
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        found = make(tmp_path).load(key_of(0), 5)
        assert found is None or torch.equal(found, rows_of(0))
        if position >= len(whole) - rows_of(0).nbytes:
            assert found is None
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 128]))
    assert is_refused(tmp_path, caplog)


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 20, 200, -1])
def test_a_truncated_file_is_refused(tmp_path, caplog, kept):
    path = filled(tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    assert is_refused(tmp_path, caplog)


def test_a_file_that_is_too_long_is_not_read(tmp_path, caplog):
    path = filled(tmp_path)
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert is_refused(tmp_path, caplog)


def test_shape_dtype_key_and_metadata_are_checked(tmp_path, caplog):
    path = filled(tmp_path, 2)
    good = {p: p.read_bytes() for p in files(tmp_path)}
    others = [p for p in files(tmp_path) if p.name != f"{key_of(0)}.safetensors"]
    path = path.parent / f"{key_of(0)}.safetensors"
    rows = load_file(path)["rows"]
    key, other = f"{path.parent.name}/{key_of(0)}", f"{path.parent.name}/{key_of(1)}"
    for tensors, metadata in (
        ({"rows": rows.float()}, {"key": key, "sha256": checksum({"rows": rows.float()})}),
        ({"rows": rows.reshape(-1)}, {"key": key, "sha256": checksum({"rows": rows.reshape(-1)})}),
        ({"rows": rows[:4].clone()}, {"key": key, "sha256": checksum({"rows": rows[:4]})}),
        ({"others": rows}, {"key": key, "sha256": checksum({"others": rows})}),
        ({"rows": rows}, {"key": other, "sha256": checksum({"rows": rows})}),
        ({"rows": rows}, {"key": key}),
        ({"rows": rows}, None),
    ):
        others[0].unlink(missing_ok=True)
        save_file(tensors, path, metadata)
        assert is_refused(tmp_path, caplog)
    path.write_bytes(good[others[0]])  # another item's file under this name
    assert is_refused(tmp_path, caplog)


def test_a_file_with_another_number_of_rows_is_not_loaded(tmp_path):
    filled(tmp_path)
    assert make(tmp_path).load(key_of(0), 6) is None
