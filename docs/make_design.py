"""Write the diagram of the components in docs/design.md from the imports of the code: `python docs/make_design.py`.

tests/packaging/test_docs.py fails when the diagram is out of date.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "design.md"
BEGIN, END = "<!-- components: written by docs/make_design.py -->\n", "<!-- end of components -->\n"
COMPONENTS = {
    "cli": "cli<br>commands",
    "server": "server<br>HTTP endpoints of OpenAI's and Anthropic's APIs",
    "pipelines": "pipelines<br>transcribe, ocr, embed, score",
    "api": "engine<br>LLM, AsyncLLM, LiveSession",
    "engine": "engine/engine<br>Engine: a loaded model and its loop",
    "core_server": "engine/core/server, rank_server<br>programs of the engine's processes",
    "setup": "engine/setup<br>loading, memory plan, doctor",
    "frontend": "engine/frontend<br>prompts and media in, text out, engine loop",
    "core": "engine/core<br>EngineCore, its clients, messages as bytes",
    "executor": "engine/executor<br>steps, in this process",
    "scheduler": "engine/scheduler<br>which requests compute how many tokens",
    "drafts": "engine/drafts<br>tokens that an answer may hold next",
    "worker": "engine/worker<br>batch, forward, sampling",
    "connectors": "engine/connectors<br>tensors by content: memory, disk, peers, Redis",
    "kv_cache": "engine/kv_cache<br>blocks and their hashes",
    "messages": "engine/*.py<br>plain data: types, config, parameters",
    "models": "models<br>what a model computes",
    "processors": "processors<br>what a model takes as input",
    "checkpoints": "checkpoints<br>weights, configs and tokenizers as files hold them",
    "mm": "mm<br>media, geometry, positions, registry",
    "kernels": "kernels<br>C++, Triton and torch",
    "callers": "callers<br>errors, copies of arguments, reprs",
}
"""Component -> its label, from callers to what they call."""
ENGINE_FILES = {
    "engine": "engine",
    "llm": "api",
    "async_llm": "api",
    "session": "api",
    "executor": "executor",
}
"""Component of a module in engine/ itself; the others are plain data, the component "messages"."""


def component_of(module: tuple[str, ...]) -> str | None:
    """Return the component of a module such as ("engine", "worker", "batch"), or None if it is in no component."""
    if module[0] == "engine":
        name = module[1] if len(module) > 1 else ""
        if module[1:3] in (("core", "server"), ("core", "rank_server")):
            return "core_server"
        return name if name and (ROOT / "engine" / name).is_dir() else ENGINE_FILES.get(name, "messages")
    return module[0] if module[0] in COMPONENTS else None


def imported(path: Path) -> Iterator[tuple[str, ...]]:
    """Yield the relative imports of a file, wherever in the file they are."""
    here = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = tuple(filter(None, (*here[: len(here) - node.level + 1], *(node.module or "").split("."))))
            yield from ((*base, alias.name) for alias in node.names)


def arrows() -> dict[str, set[str]]:
    """Return component -> the components that it imports."""
    found: dict[str, set[str]] = {component: set() for component in COMPONENTS}
    for folder in ("cli", "server", "pipelines", "engine", "models", "processors", "checkpoints", "mm", "kernels", "callers"):
        for path in (ROOT / folder).rglob("*.py"):
            component = component_of(path.relative_to(ROOT).with_suffix("").parts)
            assert component is not None
            found[component].update(target for target in map(component_of, imported(path)) if target not in (None, component))
    return found


def reachable(component: str, graph: dict[str, set[str]]) -> set[str]:
    """Return the components that a component imports, directly or through others."""
    return graph[component].union(*(reachable(other, graph) for other in graph[component]))


def direct(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph without the arrows that follow from others.

    Raises:
        CycleError: components import each other; the error lists them.
    """
    TopologicalSorter(graph).prepare()
    return {
        component: targets.difference(*(reachable(other, graph) for other in targets)) for component, targets in graph.items()
    }


def diagram() -> str:
    lines = ["```mermaid", "flowchart TD"]
    lines += [f'    {component}["{label}"]' for component, label in COMPONENTS.items()]
    graph = direct(arrows())
    lines += [f"    {component} --> {other}" for component in COMPONENTS for other in COMPONENTS if other in graph[component]]
    return "\n".join([*lines, "```", ""])


def write() -> str:
    """Return the text of docs/design.md with a diagram of the code as it is now."""
    text = PAGE.read_text("utf-8")
    return text[: text.index(BEGIN) + len(BEGIN)] + diagram() + text[text.index(END) :]


if __name__ == "__main__":
    PAGE.write_text(write(), "utf-8")
