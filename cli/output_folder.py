"""One output file per input, and a record of the finished ones."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ..callers.errors import ConfigError, ErrorInfo
from .sources import Source

RECORD = ".sensorium-transcribe.json"
"""JSON file in the folder: name of an output file -> hash of its input and its options."""
_SUFFIXES = {"text": "txt", "diarized_json": "json"}
_NOT_OPTIONS = {"files", "output_dir", "resume", "offline", "debug"}
_BLOCK = 1 << 20


class OutputFolder:
    """Writes transcripts into a folder, named after their inputs."""

    def __init__(self, args: argparse.Namespace, sources: Sequence[Source], output_format: str) -> None:
        """Create the folder. Raise ConfigError if that fails, or if two inputs would have the same output file."""
        self._path: Path = args.output_dir
        self._sources = sources
        options = {key: value for key, value in vars(args).items() if key not in _NOT_OPTIONS and not callable(value)}
        self._options = json.dumps(options, sort_keys=True, default=str)
        self._names: dict[int, str] = {}
        owners: dict[str, Source] = {}
        for source in sources:
            name = f"{_stem(source.name)}.{_SUFFIXES.get(output_format, output_format)}"
            other = owners.setdefault(name, source)
            if other is not source:
                reason = f"{other.name} and {source.name} would both be written to {name}; rename one, or run the command twice"
                raise ConfigError(reason)
            self._names[id(source)] = name
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the folder {self._path} cannot be created: {error.strerror}; give another --output-dir"
            ) from None
        self._record = self._read_record()

    def without_finished(self) -> list[Source]:
        """Return the inputs without an output file that was made from the same content and options."""
        return [source for source in self._sources if not self._is_finished(source)]

    def write(self, source: Source, text: str, error: ErrorInfo | None) -> Path:
        """Write an output file, and record it as finished if there is no error. Return its path."""
        name = self._names[id(source)]
        _replace(self._path / name, text + "\n")
        self._record.pop(name, None)
        if error is None:
            self._record[name] = self._hash(source)
        _replace(self._path / RECORD, json.dumps(self._record, indent=1, sort_keys=True) + "\n")
        return self._path / name

    def _is_finished(self, source: Source) -> bool:
        name = self._names[id(source)]
        return name in self._record and (self._path / name).is_file() and self._record[name] == self._hash(source)

    def _hash(self, source: Source) -> str:
        """Return a hash of content and options. The content of a URL is its address."""
        sha256 = hashlib.sha256(self._options.encode("utf-8", "surrogateescape"))
        if isinstance(source.item, bytes):
            sha256.update(source.item)
        elif os.path.isfile(source.item):
            with open(source.item, "rb") as file:
                while block := file.read(_BLOCK):
                    sha256.update(block)
        else:
            sha256.update(source.item.encode("utf-8", "surrogateescape"))
        return sha256.hexdigest()

    def _read_record(self) -> dict[str, str]:
        try:
            record = json.loads((self._path / RECORD).read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}


def _stem(name: str) -> str:
    """Return the name of an output file without its suffix."""
    last = re.split(r"[/\\]", re.split(r"[?#]", name)[0] if "://" in name[:10] else name)[-1]
    return "stdin" if name == "-" else Path(last).stem or "audio"


def _replace(path: Path, text: str) -> None:
    """Write a file atomically."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, "utf-8")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; give another --output-dir") from None
