"""A hash that identifies the content of a checkpoint: copies on other machines have the same one."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_SMALL = 64 << 20  # bytes of a file that is hashed whole: JSON, templates, tokenizers
_SAMPLE = 4096  # bytes hashed of each tensor
_PIECES = 1024  # pieces hashed of a large file of another format
_MAX_HEADER = 100_000_000  # bytes of the header of a safetensors file, its format's own limit


def checkpoint_digest(path: str | Path) -> str:
    """Return a hash of a checkpoint, a folder with its sub-folders or a file: names, sizes and content.

    Files above 64 MB are not read whole, which takes minutes. The first 4 KiB of each tensor of safetensors files are hashed,
    and 1,024 pieces of other files: weights that were trained differ there.

    Raises:
        OSError: a file cannot be read.
    """
    root, sha256 = Path(path), hashlib.sha256()
    for file in [root] if root.is_file() else sorted(_visible(root)):
        size = file.stat().st_size
        sha256.update(f"{file.relative_to(root) if file != root else file.name} {size}\n".encode())
        with open(file, "rb") as opened:
            if size <= _SMALL:
                sha256.update(hashlib.file_digest(opened, "sha256").digest())
                continue
            for start in _tensor_starts(opened) or range(0, size, max(1, size // _PIECES)):
                opened.seek(start)
                sha256.update(opened.read(_SAMPLE))
    return sha256.hexdigest()


def _visible(root: Path) -> Iterator[Path]:
    """Return the files of a folder and its sub-folders, without hidden ones."""
    return (
        file for file in root.rglob("*") if file.is_file() and not any(part[0] == "." for part in file.relative_to(root).parts)
    )


def _tensor_starts(file: BinaryIO) -> list[int]:
    """Return where the header and each tensor of a safetensors file begin; empty for another file."""
    try:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MAX_HEADER:
            return []
        header = json.loads(file.read(length))
        return [0, *sorted(8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__")]
    except (ValueError, struct.error, AttributeError, KeyError, TypeError, RecursionError):
        return []
