"""benchmarks/published on folders made here: nothing differs, what differs is named, and what is missing is said."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from safetensors import safe_open  # noqa: E402
from sensorium.engine.types import Logprob  # noqa: E402

from benchmarks.published import abridged, checks  # noqa: E402
from benchmarks.published.__main__ import check_folder, main  # noqa: E402


@pytest.fixture
def published(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the folder of a small Qwen2.5-VL with the index of its weights in place of these."""
    monkeypatch.setattr(checks, "TEXTS", 40)
    folder = tmp_path / "root" / "qwen2_5_vl" / "small"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    with safe_open(checkpoint / "model.safetensors", "pt") as stored:
        index = dict.fromkeys(stored.keys(), "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_nothing_differs_in_a_small_folder(published: Path) -> None:
    row, different = check_folder(published, published.parents[1])
    assert row[:2] == ["qwen2_5_vl/small", "Qwen2_5_VLForConditionalGeneration"]
    assert row[2:5] == ["40 equal", "13 equal", "7 equal"]
    assert row[5].endswith("with shapes equal")
    assert "of the index" in row[5]
    assert "weights" in row[6]
    assert row[7] == ""
    assert different == 0


def test_differences_are_named(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = published / "model.safetensors.index.json"
    index = json.loads(path.read_text())["weight_map"]
    index.pop("lm_head.weight", None)
    dropped, _ = index.popitem()
    path.write_text(json.dumps({"weight_map": index}))
    row, different = check_folder(published, published.parents[1])
    assert row[5] == "refused"
    assert f"names, plan: the checkpoint lacks {dropped}" in row[7]
    assert row[2:5] == ["40 equal", "13 equal", "7 equal"]
    assert different > 0
    assert main([str(published.parents[1])]) == 1
    assert f"1 rows, {different} differences" in capsys.readouterr().out


def test_missing_files_are_said(published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in published.glob("tokenizer*"):
        file.unlink()
    row, _ = check_folder(published, published.parents[1])
    assert row[2:5] == ["-", "-", "-"]
    assert "the folder has no tokenizer" in row[7]
    assert main([str(tmp_path / "nothing")]) == 0
    assert "is not there; nothing was checked" in capsys.readouterr().out


def test_an_abridged_model_equals_transformers(published: Path) -> None:
    rows = abridged.check_folder(published, published.parents[1])
    assert [row[3].split(",")[0] for row, _ in rows] == ["image", "video"]
    assert [(row[2], row[6], different) for row, different in rows] == [("float32", "8 of 8 equal", 0)] * 2


def test_an_abridged_model_without_a_processor_answers_a_text(published: Path) -> None:
    for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"):
        (published / name).unlink(missing_ok=True)
    ((row, different),) = abridged.check_folder(published, published.parents[1])
    assert row[3].startswith("text, ")
    assert (row[2], row[4], row[6], different) == ("float32", "0", "8 of 8 equal", 0)


def test_differing_rows_and_tokens_are_reported() -> None:
    steps = [torch.tensor([0.0, 1.0]).log_softmax(-1)] * abridged.TOKENS
    ours = [{1: Logprob(float(steps[0][1]))}] * abridged.TOKENS
    want = abridged.Answer((1, 2), torch.randn(4, 8), [1] * abridged.TOKENS, steps)
    same = abridged.Answer((1, 2), want.rows, [1] * abridged.TOKENS, ours)
    assert abridged.compare(want, same, torch.float32) == (["2 ids", "4", "0.0e+00 std", "8 of 8 equal", "0.0e+00"], True)
    for name, value in {"prompt": (1, 3), "rows": want.rows + 1, "tokens": [0] * abridged.TOKENS}.items():
        assert not abridged.compare(want, replace(same, **{name: value}), torch.float32)[1]
