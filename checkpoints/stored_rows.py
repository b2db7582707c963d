"""Rows of a table that stays in its file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..callers.errors import CheckpointError
from .folder import CheckpointFolder
from .weight_files import file_headers, read_file_rows


class StoredRows:
    """Reads rows of a two-dimensional floating-point tensor of a checkpoint when they are asked for.

    Args:
        is_table: says of a stored name whether it is the table's.

    Raises:
        CheckpointError: there is no such table, or it is quantised.
    """

    def __init__(self, folder: Path, is_table: Callable[[str], bool]) -> None:
        for file in CheckpointFolder(folder).weight_files():
            for name, header in file_headers(file).items():
                if is_table(name) and header.ndim == 2 and header.is_floating_point():
                    self._file, self._name, self.shape = file, name, header.shape
                    return
        raise CheckpointError(f"{folder} holds no table of token embeddings in floating point; use another checkpoint")

    def __call__(self, ids: Sequence[int]) -> Tensor:
        """Return `[len(ids), width]` in the stored dtype, on the CPU."""
        distinct, inverse = torch.tensor(ids).unique(return_inverse=True)
        return read_file_rows(self._file, self._name, distinct.tolist())[inverse]
