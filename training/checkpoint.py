"""Parts of a Hub checkpoint that both exports write, and their arguments."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer


def write_files(target: Path, files: Mapping[str, object], tokenizer: Tokenizer) -> None:
    """Write JSON files, by name, and tokenizer.json."""
    for name, content in files.items():
        write_json(target / name, content)
    tokenizer.save(str(target / "tokenizer.json"))


def write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def export_arguments(doc: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser with the trainer's checkpoint and the folder that is written."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--source", type=Path, default=Path(f"out/{name}-training/last.safetensors"))
    parser.add_argument("--target", type=Path, default=Path(f"assets/{name}"))
    return parser
