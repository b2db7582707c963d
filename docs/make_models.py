"""Write docs/models.md from the registry and the families' own folders: `python docs/make_models.py`.

tests/packaging/test_docs.py fails when the page is out of date.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from sensorium.engine.model_files import resolve
from sensorium.models.registry import Family, load_family, native_architectures

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Models

This page is written by `docs/make_models.py` from `models/registry.py` and the folders in `models/families/`; do not edit it.
One parity suite
(`tests/models/families/test_parity.py`) compares every family with transformers: processor tensors, token counts,
positions, logits, greedy tokens with any batching and chunking, weights in every layout, memory. The last column links
the family's file of the suite in `tests/families/`, and names other tests. [quantisation.md](quantisation.md) lists
the stored formats that all of them load.

An architecture is the name in `architectures` of config.json; a name with a slash also depends on a `model_type`. In long
lists, `...` stands for each of the names after the colon. "Prompt attention" says which tokens of a prompt see each other
beside those before them: those of one item, of all images and videos, or all of them (`mm/rules.py`).

Any other architecture of transformers, with or without an encoder, runs through transformers' class, and so does a
checkpoint whose decoder is not in `models/text/stacks.py`. `sensorium doctor --model DIR` prints which class runs a checkpoint.

Where a row has `load_mtp`, `LLM(..., load_mtp=True)` also loads the layers for multi-token prediction, in the same formats,
and the memory plan counts their weights. `DecoderModel.draft` runs them over a paged cache of their own;
`speculative_config={"method": "mtp"}` lets them draft. Without the option, their tensors are ignored.
"""
GROUPS = {
    "images": "Images and videos",
    "documents": "Documents",
    "all": "Images, videos and audio",
    "audio": "Speech and audio",
    "retrieval": "Retrieval, ranking and classification",
    "text": "Text",
    "speech": "Text to speech",
    "tensors": "Other tensors",
}
SUFFIXES = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification", "ForSequenceClassification", "Model")
_MANY = 12  # architectures of a family from which on they are listed by suffix
COLUMNS = """
| architecture | inputs | prompt attention | features | limits | tests |
|---|---|---|---|---|---|
"""


def row_file(family: str) -> Path | None:
    """Return the file of a family's row in the parity suite."""
    files = sorted((ROOT / "tests" / "families").glob("*.py"), key=lambda path: path.stem != family)
    return next((path for path in files if path.stem == family or f'"{family}"' in path.read_text("utf-8")), None)


def group(note: Family, modalities: Collection[str]) -> str:
    """Return the key of GROUPS of a family."""
    if note.use or not modalities:
        return note.use or "text"
    if "audio" not in modalities:
        return "images"
    return "audio" if len(modalities) == 1 else "all"


def architectures(names: Sequence[str]) -> str:
    """Return the cell of a family's architectures. Many names are listed by the suffixes that they have in common."""
    if len(names) < _MANY:
        return "<br>".join(f"`{name}`" for name in names)
    suffixes: dict[str, list[str]] = {}
    for name in names:
        suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
        suffixes.setdefault(name.removesuffix(suffix), []).append(suffix)
    stems: dict[tuple[str, ...], list[str]] = {}
    for stem, found in suffixes.items():
        stems.setdefault(tuple(found), []).append(stem)
    lines = []
    for common, several in stems.items():
        if len(several) > 3:
            lines.append(f"{', '.join(f'`...{suffix}`' for suffix in common)}: {', '.join(several)}")
        else:
            lines += [f"`{stem}{suffix}`" for stem in several for suffix in common]
    return "<br>".join(lines)


def write() -> str:
    rows: dict[str, list[str]] = {name: [] for name in GROUPS}
    by_name = native_architectures()
    for family in sorted({row.family for row in by_name.values()}):
        names = [name for name, row in by_name.items() if row.family == family]
        infos, note = [resolve(by_name[name].processing) for name in names], load_family(family)
        modalities = dict.fromkeys(name for info in infos for name in info.modalities)
        suite = row_file(family)
        tests = [] if suite is None else [f"[suite](../tests/families/{suite.name})"]
        cells = (
            architectures(names),
            ", ".join(name.replace("_", " ") for name in modalities),
            infos[0].prompt_attention.name.replace("_", " "),
            note.features,
            note.limits,
            ", ".join((*tests, *([note.other_tests] if note.other_tests else []))),
        )
        rows[group(note, modalities)].append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(f"\n## {GROUPS[name]}\n{COLUMNS}{''.join(found)}" for name, found in rows.items())


if __name__ == "__main__":
    (ROOT / "docs" / "models.md").write_text(write(), "utf-8")
