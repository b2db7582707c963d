"""The hash of a checkpoint: equal for copies, different after training, without reading all of large files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sensorium.checkpoints import identity
from sensorium.checkpoints.identity import checkpoint_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    (made / "encoder").mkdir(parents=True)
    (made / "config.json").write_text("{}")
    save(made)
    (made / "encoder" / "weights.bin").write_bytes(bytes(10_000))
    return made


def save(folder: Path, **changed: torch.Tensor) -> None:
    save_file({"a": torch.zeros(3000), "b": torch.zeros(3000)} | changed, folder / "model.safetensors")


@pytest.mark.parametrize("small", [identity._SMALL, 100])
def test_every_change_of_a_checkpoint_changes_its_hash(
    folder: Path, tmp_path: Path, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_SMALL", small)
    hashes = [checkpoint_digest(folder)]
    assert checkpoint_digest(shutil.copytree(folder, tmp_path / "copy")) == hashes[0]
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").touch()
    assert checkpoint_digest(folder) == hashes[0]
    save(folder, b=torch.full((3000,), 0.1))  # one tensor was trained
    hashes.append(checkpoint_digest(folder))
    (folder / "encoder" / "weights.bin").write_bytes(b"1" * 10_000)
    hashes.append(checkpoint_digest(folder))
    (folder / "config.json").write_text("[]")
    hashes.append(checkpoint_digest(folder))
    (folder / "config.json").rename(folder / "other.json")
    hashes.append(checkpoint_digest(folder))
    assert len(set(hashes)) == 5


def test_a_file_is_a_checkpoint(folder: Path) -> None:
    assert checkpoint_digest(folder / "model.safetensors") != checkpoint_digest(folder / "encoder" / "weights.bin")
    assert checkpoint_digest(str(folder / "config.json")) == checkpoint_digest(folder / "config.json")


@pytest.mark.parametrize("data", [b"", b"1234567", b"\xff" * 8, b"\2" + bytes(7) + b"[]", b"\2" + bytes(7) + b"{}"])
def test_a_large_file_that_is_no_safetensors_file(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_SMALL", 0)
    (tmp_path / "model").write_bytes(data)
    assert len(checkpoint_digest(tmp_path / "model")) == 64
