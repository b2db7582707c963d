"""Measure the shape of the source code: what one request enters, circles of imports, lines, long signatures.

`python -m benchmarks.house` prints a table. It needs the standard library and, for the row of a request, the package itself.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import io
import platform
import sys
import threading
import tokenize
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("callers", "mm", "kernels", "checkpoints", "processors", "models", "engine", "pipelines", "server", "cli")
CORE_ROOMS = ("engine", "callers", "mm", "checkpoints", "processors", "models", "kernels")
MOST_PARAMETERS = 6


def source_files(rooms: tuple[str, ...] = ROOMS) -> list[Path]:
    return [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]


def module_name(path: Path) -> str:
    """Return the name of a file as a module of `sensorium`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("sensorium", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imports(path: Path, modules: set[str]) -> set[str]:
    """Return the modules of the package that a file imports anywhere: deferred and TYPE_CHECKING imports count."""
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, (above, node.module)))
            names |= {full if (full := f"{base}.{alias.name}") in modules else base for alias in node.names}
    return (names & modules) - {module}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other (strongly connected components; Tarjan 1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in index:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], index[other])
        if lowest[module] == index[module]:
            start = stack.index(module)
            group = stack[start:]
            del stack[start:]
            if len(group) > 1:
                groups.append(sorted(group))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return groups


def import_graph() -> dict[str, set[str]]:
    """Return module -> modules of the package that it imports."""
    files = {module_name(path): path for path in source_files()}
    return {module: imports(path, set(files)) for module, path in files.items()}


def code_lines(path: Path) -> int:
    """Return the number of lines that are neither empty, comments nor docstrings."""
    text = path.read_text("utf-8")
    lines: set[int] = set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def long_signatures(path: Path) -> list[str]:
    """Return the functions with more than `MOST_PARAMETERS` parameters, without self and cls."""
    signatures = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if len([argument for argument in arguments if argument.arg not in ("self", "cls")]) > MOST_PARAMETERS:
                signatures.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    return signatures


def _is_ours(file: str) -> bool:
    path = Path(file).resolve()
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ROOMS


def chat_functions() -> set[tuple[str, int, str]]:
    """Return the functions that a warm chat about one image enters (tiny-vl; the second image of an engine)."""
    from PIL import Image
    from sensorium import LLM, SamplingParams

    def ask(llm: LLM, shade: int) -> None:
        content = [{"type": "image", "image": Image.new("RGB", (64, 64), (shade, 0, 0))}, {"type": "text", "text": "Read it."}]
        llm.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=4), use_tqdm=False)

    started: set[tuple[str, int, str]] = set()
    recording = False

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if recording and event == "call":
            started.add((frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_code.co_qualname))

    threading.setprofile(profile)  # the threads of the engine start with it; they record only the third chat
    try:
        with LLM("tiny-vl") as llm:
            ask(llm, 1)
            ask(llm, 2)
            recording = True
            sys.setprofile(profile)
            ask(llm, 3)
            sys.setprofile(None)
            recording = False
    finally:
        threading.setprofile(None)
    return {row for row in started if _is_ours(row[0])}


def rows() -> Iterator[tuple[str, int]]:
    """Yield what is measured and its value."""
    files = source_files()
    calls = chat_functions()
    names = {name for _, _, name in calls}
    yield "files entered by a warm image chat", len({file for file, _, _ in calls})
    yield "functions entered by it", len(calls)
    yield "of these, functions that are no comprehension", sum(not name.endswith(">") for name in names)
    yield (
        "classes of these",
        len({name.rpartition(".")[0] for name in names if "." in name and "<" not in name.rpartition(".")[0]}),
    )
    yield "circles of imports", len(circles(import_graph()))
    yield (
        f"lines of {', '.join(CORE_ROOMS)}",
        sum(len(path.read_text("utf-8").splitlines()) for path in source_files(CORE_ROOMS)),
    )
    yield "lines of code of these", sum(map(code_lines, source_files(CORE_ROOMS)))
    yield "type: ignore", sum(path.read_text("utf-8").count("type: ignore") for path in files)
    long = [name for path in files if path.relative_to(ROOT).parts[0] != "kernels" for name in long_signatures(path)]
    yield f"functions outside kernels with more than {MOST_PARAMETERS} parameters", len(long)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--circles", action="store_true", help="print the modules of each circle")
    parser.add_argument("--signatures", action="store_true", help="print the functions with many parameters")
    options = parser.parse_args()
    if options.circles:
        for group in circles(import_graph()):
            print(" ".join(group))
    elif options.signatures:
        print("\n".join(name for path in source_files() for name in long_signatures(path)))
    else:
        version = importlib.metadata.version("sensorium")
        print(f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, sensorium {version}\n")
        print("| | |\n|---|---|")
        for name, value in rows():
            print(f"| {name} | {value:,} |")


if __name__ == "__main__":
    main()
