"""Writes the picture of the rooms in docs/design.md from the imports of the code: `python docs/make_design.py`.

A test compares the file with what this writes, so the picture cannot be out of date.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "design.md"
BEGIN, END = "<!-- rooms: written by docs/make_design.py -->\n", "<!-- end of rooms -->\n"
FACE, CORE = ("llm", "async_llm", "session"), ("core", "core_client", "core_process")
ROOMS = {
    "cli": "cli<br>commands",
    "pipelines": "pipelines<br>transcribe, ocr, embed, score",
    "face": "engine<br>LLM, AsyncLLM, LiveSession",
    "setup": "engine/setup<br>loading, memory plan, doctor",
    "frontend": "engine/frontend<br>prompts and media in, text out, engine loop",
    "core": "engine/core*<br>EngineCore and its clients",
    "scheduler": "engine/scheduler<br>who computes how many tokens",
    "worker": "engine/worker<br>batch, forward, sampling",
    "kv_cache": "engine/kv_cache<br>blocks and their hashes",
    "messages": "engine<br>types, config, sampling params, codec",
    "models": "models<br>what a model computes",
    "processors": "processors<br>what a model takes as input",
    "mm": "mm<br>media, geometry, positions, registry",
    "kernels": "kernels<br>C++, Triton and torch",
}
"""Room -> its label, from the top of the house to the bottom."""


def room_of(parts: tuple[str, ...]) -> str | None:
    """The room of a module such as ("engine", "worker", "batch"); None for what is no room."""
    if parts[0] != "engine":
        return parts[0] if parts[0] in ROOMS else None
    if len(parts) > 1 and parts[1] in ROOMS and not (ROOT / "engine" / f"{parts[1]}.py").exists():
        return parts[1]
    name = parts[1] if len(parts) > 1 else ""
    return "face" if name in FACE else "core" if name in CORE else "messages"


def imported(path: Path) -> Iterator[tuple[str, ...]]:
    """Modules of ours that a file imports, wherever in the file."""
    here = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = (*here[: len(here) - node.level + 1], *(node.module or "").split("."))
            base = tuple(filter(None, base))
            yield from ((*base, alias.name) for alias in node.names)


def arrows() -> dict[str, set[str]]:
    """Room -> the rooms that it imports."""
    found: dict[str, set[str]] = {room: set() for room in ROOMS}
    for path in (
        path
        for folder in ("cli", "pipelines", "engine", "models", "processors", "mm", "kernels")
        for path in (ROOT / folder).rglob("*.py")
    ):
        parts = path.relative_to(ROOT).with_suffix("").parts
        room = room_of(parts)
        for target in filter(None, map(room_of, imported(path))):
            if room is not None and target != room:
                found[room].add(target)
    return found


def reachable(room: str, graph: dict[str, set[str]], seen: set[str]) -> set[str]:
    """Every room that one can get to from here; `seen` grows."""
    for other in graph[room] - seen:
        seen.add(other)
        reachable(other, graph, seen)
    return seen


def direct(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same rooms without the arrows that follow from others."""
    return {
        room: {one for one in targets if not any(one in reachable(other, graph, set()) for other in targets - {one})}
        for room, targets in graph.items()
    }


def picture() -> str:
    lines = ["```mermaid", "flowchart TD"]
    lines += [f'    {room}["{label}"]' for room, label in ROOMS.items()]
    graph = direct(arrows())
    lines += [f"    {room} --> {other}" for room in ROOMS for other in ROOMS if other in graph[room]]
    return "\n".join([*lines, "```", ""])


def write() -> str:
    """docs/design.md with the picture as the code is now."""
    text = PAGE.read_text("utf-8")
    return text[: text.index(BEGIN) + len(BEGIN)] + picture() + text[text.index(END) :]


if __name__ == "__main__":
    PAGE.write_text(write(), "utf-8")
