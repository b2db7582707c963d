"""docs/models.md is what the registry says now; families are short, and no shared file speaks of one."""

from __future__ import annotations

import ast
import importlib.util
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from sensorium.mm.registry import ARCHITECTURES, NOTES

ROOT = Path(__file__).parents[2]
FAMILIES = sorted({row.family for row in ARCHITECTURES.values()})
ROOMS = ("cli", "engine", "kernels", "mm", "models", "pipelines", "processors")
OWN = {ROOT / room / f"{family}.py" for room in ("models", "processors") for family in FAMILIES}
OWN |= {ROOT / "mm" / "registry.py", ROOT / "models" / "text" / "stacks.py"}  # the two tables: of families, and of decoders
SHARED = sorted({path for room in ROOMS for path in (ROOT / room).rglob("*.py")} - OWN)


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_models", ROOT / "docs" / "make_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_current() -> None:
    """`python docs/make_models.py` writes it anew."""
    assert (ROOT / "docs" / "models.md").read_text("utf-8") == script().write()


def test_every_family_has_a_note_and_a_row() -> None:
    assert sorted(NOTES) == FAMILIES
    missing = [family for family in FAMILIES if script().row_file(family) is None]
    assert not missing, "families without a row in the parity suite"


def test_families_are_short() -> None:
    made = script()
    lines = {family: sum(map(made.logical_lines, made.files_of(family))) for family in FAMILIES}
    assert statistics.median(lines.values()) <= 200, lines
    assert max(lines.values()) <= 400, lines


def spoken(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names and texts of a module with their lines, but for what explains it."""
    explained = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body and isinstance(node.body[0], ast.Expr)
    } | {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in explained:
            yield line, node.value
        elif isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield line, node.name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield line, getattr(node, "module", None) or ""
            yield from ((line, alias.name) for alias in node.names)


NAMES = sorted(
    {*FAMILIES, *(name.split("/")[0] for name in ARCHITECTURES), *(row.model_class for row in ARCHITECTURES.values())}
)
SPEAKS = re.compile(rf"(?<![A-Za-z0-9])({'|'.join(map(re.escape, NAMES))})(?![A-Za-z0-9])", re.IGNORECASE)


@pytest.mark.parametrize("path", SHARED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_shared_files_know_no_family(path: Path) -> None:
    found = [f"{line}: {text}" for line, text in spoken(ast.parse(path.read_text("utf-8"))) if SPEAKS.search(text)]
    assert not found, f"{path.name} speaks of a family: {'; '.join(found[:5])}"
