"""Writes docs/models.md from the registry: `python docs/make_models.py`. A test holds the file to what this writes."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

from sensorium.engine.config import resolve
from sensorium.mm.registry import ARCHITECTURES, NOTES

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Models

Written by `docs/make_models.py` from `mm/registry.py`; do not edit. *Lines*: logical lines of the family's two files, without
comments and docstrings. *Proven by*: one suite holds every family to transformers (`tests/models/test_families.py`), by its row
in `tests/families/`: processor tensors, token counts, positions, logits, greedy tokens however the work is cut, weights in
every layout, memory; what else proves it is named. Any other architecture that transformers knows runs through its own
class, see `sensorium doctor --model DIR`.

| architecture | takes | prefill | what is special | limits | lines | proven by |
|---|---|---|---|---|---|---|
"""


def files_of(family: str) -> list[Path]:
    return [ROOT / room / f"{family}.py" for room in ("models", "processors")]


def row_file(family: str) -> Path | None:
    """Where its row in the parity suite is."""
    files = sorted((ROOT / "tests" / "families").glob("*.py"), key=lambda path: path.stem != family)
    return next((path for path in files if path.stem == family or f'"{family}"' in path.read_text("utf-8")), None)


def logical_lines(path: Path) -> int:
    """Without comments, blank lines and docstrings."""
    return sum(1 for _ in _lines(path.read_text("utf-8")))


def _lines(source: str) -> Iterator[list[tokenize.TokenInfo]]:
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
    line: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NEWLINE:
            if [part.type for part in line] != [tokenize.STRING]:  # which is a docstring
                yield line
            line = []
        elif token.type not in quiet:
            line.append(token)


def write() -> str:
    rows = []
    for family in sorted({row.family for row in ARCHITECTURES.values()}):
        names = [name for name, row in ARCHITECTURES.items() if row.family == family]
        infos, note = [resolve(ARCHITECTURES[name].processing) for name in names], NOTES[family]
        modalities = dict.fromkeys(name for info in infos for name in info.modalities)
        suite = row_file(family)
        proofs = [] if suite is None else [f"[suite](../tests/families/{suite.name})"]
        cells = (
            "<br>".join(f"`{name}`" for name in names),
            ", ".join(name.replace("_", " ") for name in modalities),
            infos[0].prefill.replace("_", " "),
            note.features,
            note.limits,
            str(sum(map(logical_lines, files_of(family)))),
            ", ".join((*proofs, *([note.proven] if note.proven else []))),
        )
        rows.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    (ROOT / "docs" / "models.md").write_text(write(), "utf-8")
