"""Published model folders, without weights, against transformers: `python -m benchmarks.published [DIR] --write`.

DIR holds `family/name/` folders with config, tokenizer, template and preprocessor files and perhaps the index of the weights.
Tokenizer, chat template, expanded prompts, weight names and memory plan are compared, and every difference is a remark of the
table. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT.parent / "shared" / "data" / "published"
SECTION = "Model folders as published"
HEADER = ["folder", "architecture", "tokenizer", "template", "expansion", "names", "plan", "remarks"]


def folders(root: Path) -> list[Path]:
    """Return the folders under `root` that hold a config.json or the files of an adapter."""
    found = {file.parent for name in ("config.json", "adapter_config.json") for file in root.glob(f"**/{name}")}
    return sorted(found)


def check_folder(folder: Path, root: Path) -> tuple[list[str], int]:
    """Return the row of one folder, and the number of its cells that differ."""
    from .checks import Cell, check_expansion, check_files, check_names, check_plan, check_template, check_tokenizer, run
    from .sides import Sides, complete

    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / folder.name
        remarks = complete(folder, root, target)
        sides, cells = Sides(target), list[Cell]()
        for check in (check_files, check_tokenizer, check_template, check_expansion, check_names, check_plan):
            cells.append(run(check, sides))
        reasons: dict[str, list[str]] = {}
        for name, cell in zip(HEADER[1:], cells, strict=False):
            reasons.setdefault(cell.remark, []).append(name)
        remarks += [f"{', '.join(names)}: {reason}" for reason, names in reasons.items() if reason]
        text = "; ".join(remarks).replace(scratch, "")
    return [folder.relative_to(root).as_posix(), *(cell.text for cell in cells), text], sum(cell.differs for cell in cells)


def main(arguments: list[str] | None = None) -> int:
    return write_table(arguments, __doc__, SECTION, HEADER, lambda folder, root: [check_folder(folder, root)])


def write_table(
    arguments: list[str] | None,
    description: str | None,
    section: str,
    header: list[str],
    check: Callable[[Path, Path], Iterable[tuple[list[str], int]]],
) -> int:
    """Parse the command line and check the folders. Return the exit status: 1 if anything differs.

    Args:
        check: takes a folder and its root; returns table rows for the folder, each with its number of differences.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="the published folders (default: %(default)s)")
    parser.add_argument("--only", default="", help="check only folders whose path contains this")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args(arguments)
    if not args.folder.is_dir():
        print(f"{args.folder} is not there; nothing was checked. Give a folder with the published files of models.")
        return 0
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from oracle import ensure_torchvision

    ensure_torchvision()
    rows, different = [header, ["---"] * len(header)], 0
    for folder in folders(args.folder):
        if args.only not in folder.as_posix():
            continue
        for row, count in check(folder, args.folder):
            rows.append(row)
            different += count
            print("\n  ".join(row), flush=True)
    if args.write:
        from benchmarks.throughput import put

        put(section, "\n".join(f"| {' | '.join(row)} |" for row in rows))
    print(f"{len(rows) - 2} rows, {different} differences")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
