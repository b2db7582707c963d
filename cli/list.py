"""`sensorium list`: list the models in the Hub's cache, without using the network."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine.setup.hub_cache import CachedModel

EXAMPLE = "sensorium list"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object per snapshot, one on each line")


def run(args: argparse.Namespace) -> int:
    from ..engine.setup.hub_cache import cache_folder, cached_models

    rows = [describe(model, revision, commit) for model in cached_models() for revision, commit in model.revisions()]
    if args.json:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
    elif not rows:
        print(f"{cache_folder()} holds no models; `sensorium pull ORG/NAME` downloads one")
    else:
        _print_table([("name", "revision", "commit", "size", "kind", "state"), *map(cells, rows)])
    return 0


def describe(model: CachedModel, revision: str, commit: str) -> dict[str, Any]:
    """Return the facts about a snapshot. `kind`: its architecture, "adapter", "unsupported", or "unknown" without a config."""
    from ..callers.errors import SensoriumError
    from ..engine.model_files import load_model_files
    from ..engine.setup.hub_cache import is_adapter

    folder = model.snapshot(commit)
    try:
        kind = "adapter" if is_adapter(folder) else load_model_files(folder).architecture
    except SensoriumError:
        has_config = any((folder / name).is_file() for name in ("config.json", "params.json"))
        kind = "unsupported" if has_config else "unknown"
    try:
        missing, problem = model.missing(commit), ""
    except SensoriumError as error:
        missing, problem = [], str(error)
    return {
        "name": model.name,
        "revision": revision,
        "commit": commit,
        "bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        "kind": kind,
        "complete": not missing and not problem,
        "missing": missing,
        "problem": problem,
        "folder": str(folder),
    }


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return one row of the table."""
    state = "complete" if row["complete"] else row["problem"] or f"incomplete: lacks {', '.join(row['missing'][:2])}"
    if len(row["missing"]) > 2:
        state += f" and {len(row['missing']) - 2} more"
    revision = row["revision"] if row["revision"] != row["commit"] else "-"
    return row["name"], revision, row["commit"][:12], f"{row['bytes'] / 1e9:.2f} GB", row["kind"], state


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
