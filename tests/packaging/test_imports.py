"""The files of the package import each other without circles."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("callers", "checkpoints", "cli", "engine", "kernels", "mm", "models", "pipelines", "processors", "server")


def import_graph(root: Path, rooms: tuple[str, ...]) -> dict[str, set[str]]:
    """Return module -> modules of ours that it imports, in functions and under `TYPE_CHECKING`, too."""
    paths = {module_name(path, root): path for room in rooms for path in (root / room).rglob("*.py")}
    return {module: imported_modules(path, root, set(paths)) - {module} for module, path in paths.items()}


def module_name(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(path: Path, root: Path, modules: set[str]) -> set[str]:
    """Return the modules that relative imports name; a package itself only for names of its `__init__`."""
    folder, imported = path.relative_to(root).parent.parts, set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*folder[: len(folder) - node.level + 1], *filter(None, (node.module or "").split("."))]
            for alias in node.names:
                submodule = ".".join([*base, alias.name])
                imported.add(submodule if submodule in modules else ".".join(base))
    return imported


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one circle, the first again at its end, or [] if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))  # its list goes from each module to one that imports it
    return []


def test_no_circles() -> None:
    graph = import_graph(ROOT, ROOMS)
    assert len(graph) > 500
    assert "processors.text.chat" in graph["processors.text.tokenizer_names"]  # imported in a function
    assert "engine.engine" in graph["pipelines.speech.decode"]  # imported for types only
    assert not circle(graph), " imports ".join(circle(graph))


@pytest.mark.parametrize(
    "second",
    [
        "from .first import A",
        "from . import first",
        "from ..room import first",
        "def late():\n    from .first import A",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .first import A",
    ],
)
def test_a_circle_is_found(tmp_path: Path, second: str) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "__init__.py").write_text("")
    (tmp_path / "room" / "first.py").write_text("from . import second")
    (tmp_path / "room" / "second.py").write_text(second)
    modules = circle(import_graph(tmp_path, ("room",)))
    assert sorted(modules[1:]) == ["room.first", "room.second"]
    assert modules[0] == modules[-1]
    (tmp_path / "room" / "second.py").write_text("import json")
    assert circle(import_graph(tmp_path, ("room",))) == []
