"""Hooks of mkdocs.yml. They add files outside docs/ as pages, and an API reference that is made from docstrings."""

from __future__ import annotations

import enum
import inspect
import os
import re
from pathlib import Path
from typing import Any

import sensorium
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "benchmarks/README.md": "performance.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""File outside docs/, by its path in the repository -> its page. README.md is the start page."""
_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_SECTIONS = re.compile(r"^(Args|Raises|Attributes|Returns|Yields):\s*$", re.MULTILINE)
_NAME = re.compile(r"^    (\*{0,2}[a-z_][\w.]*(?:, \*{0,2}[a-z_]\w*)*|[A-Z]\w+(?:, [A-Z]\w+)*): ", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=with_links((ROOT / path).read_text("utf-8"), path)))
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    path = f"docs/{page.file.src_uri}"
    return with_links(markdown, path) if (ROOT / path).is_file() else markdown


def with_links(text: str, path: str) -> str:
    """Rewrite the links of a page to pages of the site. A link to any other file of the repository becomes the file's path."""

    def link(match: re.Match[str]) -> str:
        shown, target, anchor = match[1], match[2], match[3] or ""
        if ":" in target:
            return match[0]
        file = os.path.normpath(os.path.join(os.path.dirname(path), target))
        page = PAGES.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") and file.endswith(".md") else None)
        return f"[{shown}]({page}{anchor})" if page else shown if shown.strip("`") == file else f"{shown} (`{file}`)"

    return _LINK.sub(link, text)


def api_page() -> str:
    """Return the public names with their signatures and docstrings."""
    names = sorted((name for name in sensorium.__all__ if name != "__version__"), key=str.lower)
    parts = ["# API reference", "All names are imported from `sensorium`."]
    for name in names:
        parts.append(f"## {name}")
        if inspect.ismodule(module := getattr(sensorium, name)):
            parts.append(_markdown(inspect.getdoc(module) or ""))
            for function, member in inspect.getmembers(module, inspect.isfunction):
                if member.__module__ == module.__name__ and not function.startswith("_"):
                    parts += [f"### {name}.{function}", *_described(function, member)]
            continue
        parts += _described(name, getattr(sensorium, name))
        if inspect.isclass(value := getattr(sensorium, name)):
            for method, member in inspect.getmembers(value, inspect.isroutine):
                if (
                    not method.startswith("_")
                    and (getattr(member, "__module__", None) or "").startswith("sensorium")
                    and inspect.getdoc(member)
                ):
                    parts += [f"### {name}.{method}", *_described(method, member)]
    return "\n\n".join(parts) + "\n"


def _described(name: str, value: Any) -> list[str]:
    shown = ""
    if not (inspect.isclass(value) and issubclass(value, enum.Enum | dict)):
        signature = inspect.signature(value)
        parameters = [_unquoted(str(one)) for one in signature.parameters.values() if one.name != "self"]
        lines = "".join(f"    {one},\n" for one in parameters)
        returned = "" if inspect.isclass(value) else _unquoted(str(signature.replace(parameters=())).removeprefix("()"))
        shown = f"```python\n{name}({lines and chr(10)}{lines}){returned}\n```"
    return [part for part in (shown, _markdown(inspect.getdoc(value) or "")) if part]


def _unquoted(text: str) -> str:
    """Remove the quotes around the annotation of a parameter or a return value."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)


def _markdown(doc: str) -> str:
    """Convert a docstring to Markdown: each section becomes a title and a list."""
    head, *sections = _SECTIONS.split(doc)
    parts = [_escaped(head)]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        lines = _NAME.sub(lambda match: f"- `{match[1]}`: ", body.strip("\n"))
        parts.append(f"**{title}**\n\n{_escaped(lines)}")
    return "\n\n".join(part.strip() for part in parts)


def _escaped(text: str) -> str:
    """Escape `<` and `[` outside code."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if index % 2 else re.sub(r"([<\[])", r"\\\1", piece) for index, piece in enumerate(pieces))
