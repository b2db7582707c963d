"""Compare the pages that scripts write with what the scripts write now: docs/models.md and the diagram in docs/design.md."""

from __future__ import annotations

import importlib.util
import re
from graphlib import CycleError
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
from sensorium.callers.errors import ErrorCode
from sensorium.models.registry import load_family, native_architectures
from sensorium.server.errors import _STATUS

ARCHITECTURES = native_architectures()

DOCS = Path(__file__).parents[2] / "docs"
FAMILIES = sorted({row.family for row in ARCHITECTURES.values()})


def test_the_table_of_codes_has_every_code_and_its_status() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| (\d{3}) \|$", (DOCS / "inputs.md").read_text("utf-8"), re.MULTILINE)
    assert {code: int(status) for code, status in rows} == {code: _STATUS.get(code, 500) for code in get_args(ErrorCode)}


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["models", "design"])
def test_page_is_current(page: str) -> None:
    """If this fails, run `python docs/make_models.py` or `python docs/make_design.py`."""
    assert (DOCS / f"{page}.md").read_text("utf-8") == script(f"make_{page}").write()


def test_every_family_has_a_note_and_a_row() -> None:
    folders = (DOCS.parent / "models" / "families").glob("*/__init__.py")
    assert sorted(path.parent.name for path in folders) == FAMILIES
    missing = [family for family in FAMILIES if script("make_models").row_file(family) is None]
    assert not [family for family in missing if not load_family(family).other_tests], "a row in tests/families, or other tests"
    named = [name for family in missing for name in load_family(family).other_tests.split(", ")]
    assert all((DOCS.parent / name).is_file() for name in named)


def test_components_do_not_import_each_other() -> None:
    make_design = script("make_design")
    graph = make_design.arrows()
    make_design.direct(graph)
    with pytest.raises(CycleError):
        make_design.direct(graph | {"scheduler": graph["scheduler"] | {"core"}})


def test_diagram_has_every_folder_of_engine() -> None:
    folders = {path.parent.name for path in (DOCS.parent / "engine").glob("*/__init__.py")}
    assert folders <= script("make_design").COMPONENTS.keys()
