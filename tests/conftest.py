"""Setup of all tests: offline, seeded, with tests/helpers importable and small checkpoints made once per session."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# several test processes run at once, so waiting threads must not occupy the cores
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# rates that are measured beside other tests could choose other kernels from run to run
os.environ.setdefault("SENSORIUM_CPU", "newest")
sys.path.insert(0, str(Path(__file__).parent / "helpers"))
if os.environ.get("SENSORIUM_CPU") == "avx2":
    from older_cpu import hide_avx512_from_torch

    hide_avx512_from_torch()

import pytest
import torch
from family import load_rows, save
from hub_fixtures import hub  # noqa: F401
from hypothesis import HealthCheck, settings
from oracle import build_checkpoint, ensure_torchvision
from sampled import chosen_part, left_out
from scheduling import keep_scheduling, pytest_sessionfinish  # noqa: F401

SHARED = Path(__file__).parents[2] / "shared" / "data"

ensure_torchvision()
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases of the other parts; skip tests marked `shared` if the folder beside the checkout is missing."""
    if config.option.markexpr == "not full":
        others = left_out(items, chosen_part())
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    row_by_row(items)
    if SHARED.is_dir():
        return
    for item in items:
        if "shared" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="../shared/data is missing"))


def row_by_row(items: list[pytest.Item]) -> None:
    """Sort the tests of each file that read models of a family by their row, so that few models are held at a time."""
    rows: dict[tuple[Path, str], int] = {}

    def place(numbered: tuple[int, pytest.Item]) -> int:
        number, item = numbered
        row = getattr(item, "callspec", None) and item.callspec.params.get("row")
        if row is None or "loaded" not in getattr(item, "fixturenames", ()):
            return number
        return rows.setdefault((item.path, row.name), number)

    items[:] = [item for _, item in sorted(enumerate(items), key=place)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real media, for tests marked `shared`."""
    return SHARED


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small random Qwen2.5-VL."""
    return build_checkpoint(tmp_path_factory.mktemp("models") / "qwen2_5_vl")


@pytest.fixture(scope="session")
def checkpoint2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small random Qwen2-VL."""
    return build_checkpoint(tmp_path_factory.mktemp("models") / "qwen2_vl", "qwen2_vl")


@pytest.fixture(scope="session")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small random multilingual Whisper."""
    return save(load_rows()["whisper"], tmp_path_factory.mktemp("models") / "whisper")
