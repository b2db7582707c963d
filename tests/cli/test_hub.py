"""Commands with a model's name: `pull`, `list`, `doctor` and `ocr`. A server on localhost stands for the Hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_hub import FakeHub
from hub_fixtures import NAME
from sensorium.cli.main import main

MEDIA = Path(__file__).parents[2] / "assets" / "media"


def test_pull_and_list(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'cache'} holds no models; `sensorium pull ORG/NAME` downloads one\n"
    assert main(["pull", NAME]) == 0
    folder = capsys.readouterr().out.strip()
    assert folder.endswith(f"models--org--tiny-vl/snapshots/{hub.commit}")
    hub.branches |= {"main": "b" * 40, "old": hub.commit}
    assert main(["pull", NAME]) == 0
    assert main(["pull", NAME, "--revision", "old"]) == 0
    assert main(["pull", NAME, "--revision", "none"]) == 2
    out, err = capsys.readouterr()
    assert out.split()[1] == folder
    assert "has no revision 'none'" in err
    assert main(["list"]) == 0
    title, *rows = capsys.readouterr().out.splitlines()
    assert title.split() == ["name", "revision", "commit", "size", "kind", "state"]
    kind = "Qwen2_5_VLForConditionalGeneration"
    assert [row.split() for row in rows] == [
        [NAME, "main", "b" * 12, "0.01", "GB", kind, "complete"],
        [NAME, "old", "a" * 12, "0.01", "GB", kind, "complete"],
    ]


def test_list_says_what_is_missing(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", NAME, "--device", "cpu"]) == 0
    assert f"revision                 {hub.commit}" in capsys.readouterr().out
    assert "model.safetensors" not in hub.fetched()
    other = tmp_path / "cache" / "models--org--other" / "snapshots" / ("c" * 40)
    other.mkdir(parents=True)
    assert main(["list", "--json"]) == 0
    unknown, incomplete = map(json.loads, capsys.readouterr().out.splitlines())
    assert incomplete["missing"] == ["model.safetensors"]
    assert (unknown["name"], unknown["revision"], unknown["kind"], unknown["complete"]) == (
        "org/other",
        "c" * 40,
        "unknown",
        False,
    )
    assert main(["list"]) == 0
    assert "incomplete: lacks model.safetensors" in capsys.readouterr().out


def test_command_with_a_name(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["ocr", str(MEDIA / "line1.png"), "--device", "cpu", "--model", NAME]
    assert main([*words, "--offline"]) == 2
    assert "and offline is set" in capsys.readouterr().err
    assert main([*words, "--revision", "v9"]) == 2
    assert main(words) == 0
    asked = len(hub.requests)
    assert main([*words, "--offline"]) == 0
    assert len(hub.requests) == asked


def test_pull_without_the_hub_says_what_can_be_done(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["pull", NAME]) == 2
    line = capsys.readouterr().err
    assert "unset it, or copy the folder of org/tiny-vl from another machine, and give its path as --model" in line
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert main(["pull", NAME]) == 0
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["pull", NAME]) == 2
    line = capsys.readouterr().err
    assert f"HF_HUB_OFFLINE is set; other commands use the cached commit {hub.commit} of org/tiny-vl. To update it" in line


def test_what_is_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "./folder"]) == 2
    assert "give ORG/NAME" in capsys.readouterr().err
