"""Launch configurations: the shipped table, the user's file, and the choice of a trial."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from sensorium.kernels.gpu import launch_config
from sensorium.kernels.gpu.launch_table import TABLE


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return launch_config.user_config_path("NVIDIA H100 80GB/HBM3")


def test_the_table_is_whole() -> None:
    """Every op has the default class; rows of architectures are known; values are valid for a launch."""
    for op, shapes in TABLE.items():
        assert "" in shapes, op
        for shape, rows in shapes.items():
            assert {"num_warps", "num_stages"} <= rows["any"].keys(), (op, shape)
            assert rows.keys() <= {"any", "sm_80", "sm_90", "gfx942"}
            for row in rows.values():
                launch_config._check(op, shape, row)


@pytest.mark.parametrize(
    ("arch", "row"),
    [("sm_80", "sm_80"), ("sm_89", "any"), ("sm_90", "sm_90"), ("sm_100", "sm_90"), ("sm_75", "any"), ("gfx942", "gfx942")],
)
def test_which_row_serves_a_card(arch: str, row: str) -> None:
    assert launch_config._table_row(arch) == row


def test_the_users_file_changes_the_shipped_row(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch_config.save_config("NVIDIA H100 80GB/HBM3", "norm", "4096", {"num_warps": 2}) == path
    assert launch_config.save_config("NVIDIA H100 80GB/HBM3", "norm", "64", {"ROWS": 2}) == path
    assert json.loads(path.read_text())["card"] == "NVIDIA H100 80GB/HBM3"
    assert [file.name for file in path.parent.iterdir()] == ["NVIDIA-H100-80GB-HBM3.json"]
    monkeypatch.setattr(launch_config, "user_configs", lambda: launch_config.read_configs(path))
    monkeypatch.setattr(launch_config, "gpu_info", lambda: launch_config.GpuInfo("sm_90", 132))
    fresh = launch_config._default_config.__wrapped__
    assert fresh("norm", "4096") == {"ROWS": 1, "num_warps": 2, "num_stages": 1}
    assert fresh("norm", "64")["ROWS"] == 2
    assert fresh("norm", "32")["ROWS"] == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "fix or delete it"),
        ("[]", "is not a file of launch configurations"),
        ('{"launches": {"nrm": {"": {}}}}', "unknown op 'nrm'"),
        ('{"launches": {"norm": {"": {"BLOCKS": 1}}}}', "norm has no 'BLOCKS'"),
        ('{"launches": {"norm": {"": {"ROWS": "8"}}}}', "is '8'"),
        ('{"launches": {"norm": {"": {"num_warps": 3}}}}', "must be a power of two"),
        ('{"launches": {"norm": {"": 4}}}', "fix or delete it"),
    ],
)
def test_a_broken_file_is_refused(path: Path, text: str, message: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        launch_config.read_configs(path)
    assert str(path) in str(caught.value)
    with pytest.raises(ValueError, match="fix or delete it"):
        launch_config.save_config("NVIDIA H100 80GB/HBM3", "norm", "", {"ROWS": 1})
    assert path.read_text() == text, "what the user wrote stays"


def test_no_file_changes_nothing(path: Path) -> None:
    assert launch_config.read_configs(path) == {}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_trial_takes_the_fastest_that_runs() -> None:
    from triton.runtime.errors import OutOfResources

    def measure(run: object) -> float:
        rows = launch_config.get_config("norm", "4096")["ROWS"]
        if rows == 1:
            raise OutOfResources(1, 0, "shared memory")
        return float(rows)

    assert launch_config.fastest_config(
        "norm", lambda: None, [{"ROWS": 4}, {"ROWS": 1}, {"ROWS": 2}, {"ROWS": 8}], measure
    ) == {"ROWS": 2}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_search_goes_downhill() -> None:
    from sensorium.kernels.gpu.autotune import descend

    def measure(run: object) -> float:
        config = launch_config.get_config("norm")
        return abs(config["ROWS"] - 2) + abs(config["num_warps"] - 16) + abs(config["num_stages"] - 3)

    start = {"ROWS": 8, "num_warps": 2, "num_stages": 1}
    assert descend("norm", start, lambda: None, measure) == {"ROWS": 2, "num_warps": 16, "num_stages": 3}


def test_what_a_run_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_config, "_default_config", lambda op, shape: {})
    asked = launch_config.requested_configs(lambda: [launch_config.get_config(op) for op in ("norm", "activation", "norm")])
    assert asked == [("norm", ""), ("activation", "")]
