"""The files of a checkpoint: which there are, the JSON ones, GGUF headers, and the names of the weight files."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from ..callers.errors import CheckpointError, short_repr
from .files import read_file, read_json
from .gguf.reader import Gguf, find_gguf
from .torch_file import SAVED_SUFFIX

WEIGHTS_END = ".safetensors"
INDEX_END = ".safetensors.index.json"
SAVED_WEIGHTS = f"*{SAVED_SUFFIX}"
"""Pattern of a file of `torch.save` with weights; `torch_file` reads it without unpickling."""
_STEMS = ("model", "consolidated", "ema")  # file names in the Hub's layout, and in those of two publishers


class CheckpointFolder:
    """A checkpoint in a folder, or in a GGUF file. JSON files and GGUF headers are read at most once.

    Args:
        path: the folder or the GGUF file.
        names: names of the checkpoint's files, of which the folder may hold only some yet; None: those in the folder.
    """

    def __init__(self, path: str | os.PathLike[str], names: Collection[str] | None = None) -> None:
        self.path, self._names = Path(path), names
        self._contents: dict[str, dict[str, Any]] = {}

    def has(self, name: str) -> bool:
        return (self.path / name).exists() if self._names is None else name in self._names

    def json(self, name: str) -> dict[str, Any]:
        """Return a JSON object; empty if the file is missing. CheckpointError if it is unreadable or not a regular file."""
        if name not in self._contents:
            self._contents[name] = read_json(self.path / name)
        return self._contents[name]

    @cached_property
    def gguf(self) -> Gguf | None:
        """The headers of the GGUF model, see `open_model`; None for another checkpoint."""
        if find_gguf(self.path) is None:
            return None
        from .gguf.tensors import open_model

        return open_model(self.path)

    @property
    def has_safetensors(self) -> bool:
        return self._stem is not None

    @cached_property
    def saved(self) -> Path | None:
        """The file of `torch.save` with all weights; None if there are safetensors, or not exactly one such file."""
        names = [file.name for file in self.path.glob(SAVED_WEIGHTS)] if self._names is None else self._names
        saved = [name for name in names if fnmatchcase(name, SAVED_WEIGHTS) and "/" not in name]
        return self.path / saved[0] if len(saved) == 1 and not self.has_safetensors else None

    @property
    def _stem(self) -> str | None:
        return next((stem for stem in _STEMS if self.has(stem + WEIGHTS_END) or self.has(stem + INDEX_END)), None)

    @cached_property
    def shards(self) -> Mapping[str, str] | None:
        """The name of each tensor's shard, from the index; None if the weights are one file, or are not there."""
        if self._stem is None or self.has(self._stem + WEIGHTS_END):
            return None
        index = self.path / (self._stem + INDEX_END)
        content = read_file(index)
        try:
            shards = dict(json.loads(content or b"")["weight_map"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise CheckpointError(f"{index} is not an index of shards; download it again") from None
        outside = [name for name in shards.values() if name in ("", "..") or "\0" in str(name) or Path(str(name)).name != name]
        if outside:
            raise CheckpointError(f"{index} names {short_repr(outside[0])}; shards must be plain file names in the same folder")
        return shards

    def weight_files(self) -> list[Path]:
        """Return the paths of the files with weights, of any format; errors as `safetensors`."""
        if self.gguf is not None:
            return self.gguf.files
        return self.safetensors() if self.saved is None else [self.saved]

    def safetensors(self) -> list[Path]:
        """Return the paths of the weights. CheckpointError if there are none, or the index is not valid."""
        if self._stem is None:
            reason = f"{self.path} holds neither model.safetensors nor an index of its shards"
            raise CheckpointError(f"{reason}; only safetensors are read")
        names = [self._stem + WEIGHTS_END] if self.shards is None else sorted(set(self.shards.values()))
        return [self.path / name for name in names]
