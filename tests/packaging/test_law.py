"""What import-linter cannot say: no room uses the front door, no oracle at run time, no pickle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import sensorium

ROOT = Path(__file__).parents[2]
ROOMS = ("cli", "engine", "kernels", "mm", "models", "pipelines", "processors")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
NEVER = {"transformers", "torchvision", "librosa", "matplotlib", "pickle", "sensorium"}
"""Tests' packages, code from disk, and our own name: parts import each other relatively."""
MAY = {("models/borrowed.py", "transformers"), ("processors/fallback.py", "transformers")}
"""The home of models that we do not have."""


def imports(path: Path) -> Iterator[str]:
    """Absolute names as written, wherever in the file; relative ones as paths below the root, `.` for the root itself."""
    here = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = [*here[: len(here) - node.level + 1], *(node.module or "").split(".")]
            yield ".".join(["", *filter(None, base)]) or "."
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports(path: Path) -> None:
    for name in imports(path):
        assert name != ".", f"{path} goes through the front door"
        package = name.split(".")[0]
        assert package not in NEVER or (path.relative_to(ROOT).as_posix(), package) in MAY, f"{path} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_torch_load(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load"), f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_size(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or node.lineno) - node.lineno < 60, f"{path}: {node.name}"


def test_public_names_are_documented() -> None:
    for name in sensorium.__all__:
        assert name == "__version__" or getattr(sensorium, name).__doc__
