"""docs/models.md equals what the registry says now."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from sensorium.mm.registry import ARCHITECTURES, NOTES

ROOT = Path(__file__).parents[2]
FAMILIES = sorted({row.family for row in ARCHITECTURES.values()})


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_models", ROOT / "docs" / "make_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_current() -> None:
    """If this fails, run `python docs/make_models.py`."""
    assert (ROOT / "docs" / "models.md").read_text("utf-8") == script().write()


def test_every_family_has_a_note_and_a_row() -> None:
    assert sorted(NOTES) == FAMILIES
    missing = [family for family in FAMILIES if script().row_file(family) is None]
    assert not missing, "families without a row in the parity suite"
