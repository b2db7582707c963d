"""Writes docs/models.md from the registry: `python docs/make_models.py`. A test holds the file to what this writes."""

from __future__ import annotations

from pathlib import Path

from sensorium.engine.model_files import resolve
from sensorium.mm.registry import ARCHITECTURES, NOTES

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Models

Written by `docs/make_models.py` from `mm/registry.py`; do not edit. *Proven by*: one suite compares every family with
transformers (`tests/models/families/test_parity.py`), by its row in `tests/families/`: processor tensors, token counts,
positions, logits, greedy tokens however the work is cut, weights in every layout, memory; other proofs are named. Any other
architecture that transformers knows runs through its own class, see `sensorium doctor --model DIR`.

| architecture | takes | prompt attention | what is special | limits | proven by |
|---|---|---|---|---|---|
"""


def row_file(family: str) -> Path | None:
    """Where its row in the parity suite is."""
    files = sorted((ROOT / "tests" / "families").glob("*.py"), key=lambda path: path.stem != family)
    return next((path for path in files if path.stem == family or f'"{family}"' in path.read_text("utf-8")), None)


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
            infos[0].prompt_attention.replace("_", " "),
            note.features,
            note.limits,
            ", ".join((*proofs, *([note.proven] if note.proven else []))),
        )
        rows.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    (ROOT / "docs" / "models.md").write_text(write(), "utf-8")
