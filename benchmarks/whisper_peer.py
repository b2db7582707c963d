"""Shared by word_times.py, word_errors.py and speech.py: their options, and the run of a program in the peer's interpreter."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any


def arguments(doc: str | None) -> argparse.Namespace:
    """Return the options of the command line: model, folder, peer, peer_python and write."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", type=Path, help="folder of the CTranslate2 model")
    parser.add_argument(
        "--peer-python", default=os.environ.get("SENSORIUM_PEER_PYTHON"), help="interpreter with faster-whisper"
    )
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    return parser.parse_args()


def manifest(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of manifest.jsonl in a folder of audio files."""
    return [json.loads(line) for line in (folder / "manifest.jsonl").read_text("utf-8").splitlines()]


def peer(args: argparse.Namespace, program: str, *words: str) -> Any:
    """Return the JSON that a program prints last. It runs in the peer's interpreter on the peer's model and these words."""
    command = [args.peer_python, "-c", program, str(args.peer), *words]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])
