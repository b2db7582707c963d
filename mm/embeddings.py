"""Ready-made encoder rows that a caller gives instead of media, checked before anything uses them. Knows no family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .errors import MediaError, typed
from .types import EmbeddingItem

ROWS = "encoder_rows"  # the one tensor of an item that needs no encoder, `[rows, width]`


@dataclass(frozen=True)
class EmbeddingSpec:
    """What rows of one modality look like.

    Args:
        width: size of one row.
        name: the tensor's name in the form `{name: [rows, width] or [items, rows, width] or a list of [rows, width]}`.
        grid: name of the int tensor `[items, 3]` of (t, h, w) in patches that must lie beside it; None: rows have no grid.
        merge: patches merged to one row along h and along w.
        merge_t: likewise along t.
    """

    width: int
    name: str
    grid: str | None = None
    merge: int = 1
    merge_t: int = 1


def read_rows(modality: str, value: object, spec: EmbeddingSpec) -> list[EmbeddingItem] | None:
    """The items of a value that holds rows, None when it holds media.

    Rows are a mapping of named tensors, or, except for sound, a floating tensor of 2 or 3 axes or a list of 2-axis
    ones (uint8 tensors are pixels). The items' tensors are "rows" `[rows, width]` and, where there is a grid, "grid" `[3]`.

    Raises:
        MediaError: rows of another width, type or layout, not finite, or as many as the grid does not say.
    """
    if isinstance(value, Mapping) and spec.name in value:
        return _from_mapping(modality, value, spec)
    if modality == "audio" or not _looks_like_rows(value):
        return None
    if spec.grid is not None:
        form = f'{{"{spec.name}": rows, "{spec.grid}": [[t, h, w]]}}'
        raise MediaError(modality, 0, f"rows of this model need their grids: {form} (pixels are uint8)")
    rows = _split(modality, value, spec)
    return [EmbeddingItem(modality, {ROWS: checked(modality, i, one, spec.width)}) for i, one in enumerate(rows)]


def checked(modality: str, index: int, rows: object, width: int) -> Tensor:
    """`[n, width]`, floating, dense and finite; a copy, since the caller may go on using the original."""
    tensor = _dense(modality, index, rows)
    if tensor.ndim != 2 or tensor.shape[1] != width or not tensor.shape[0]:
        raise MediaError(modality, index, f"rows have the shape [n, {width}] for this model, not {list(tensor.shape)}")
    if not bool(torch.isfinite(tensor).all()):
        raise MediaError(modality, index, "rows hold NaN or infinite values")
    return tensor.detach().clone()


def _dense(modality: str, index: int, rows: object) -> Tensor:
    """Floating and dense, of any shape; arrays may have any strides and byte order."""
    if isinstance(rows, np.ndarray) and rows.dtype.name in ("float16", "float32", "float64"):
        return torch.from_numpy(np.require(rows, rows.dtype.newbyteorder("="), ("C", "W")))
    if not isinstance(rows, Tensor | np.ndarray):
        raise MediaError(modality, index, f"rows are a dense tensor, not {type(rows).__name__}")
    if isinstance(rows, np.ndarray) or not rows.is_floating_point():
        raise MediaError(modality, index, f"rows are floating point, not {str(rows.dtype).removeprefix('torch.')}")
    if rows.layout != torch.strided or rows.is_meta:
        raise MediaError(modality, index, f"rows are a dense tensor, not {rows.layout} on {rows.device}")
    return rows


def _looks_like_rows(value: object) -> bool:
    """Floating tensors; three axes that end or begin with channels are a picture of the wrong type, and said so elsewhere."""
    if isinstance(value, list | tuple):
        return any(isinstance(entry, Tensor | np.ndarray) and _looks_like_rows(entry) for entry in value)
    if not isinstance(value, Tensor | np.ndarray):
        return False
    if not (value.is_floating_point() if isinstance(value, Tensor) else value.dtype.kind == "f"):
        return False
    return not (value.ndim == 3 and (value.shape[-1] in (1, 3, 4) or value.shape[0] in (1, 3, 4)) and value.shape[-1] < 64)


def _split(modality: str, value: object, spec: EmbeddingSpec) -> Sequence[object]:
    """One value per item."""
    if isinstance(value, list | tuple):
        return value
    value = _dense(modality, 0, value)
    if value.ndim not in (2, 3):
        raise MediaError(modality, 0, f"rows have 2 or 3 axes, the last of {spec.width}, not {value.ndim}; pixels are uint8")
    return [value] if value.ndim == 2 else list(value)


def _from_mapping(modality: str, value: Mapping[object, object], spec: EmbeddingSpec) -> list[EmbeddingItem]:
    known = [name for name in (spec.name, spec.grid) if name is not None]
    if set(value) != set(known):
        raise MediaError(modality, 0, f"rows come with exactly {' and '.join(known)}, not {', '.join(map(str, value))}")
    rows = value[spec.name]
    if not isinstance(rows, Tensor | np.ndarray | list | tuple):
        raise MediaError(modality, 0, f"{spec.name} is a tensor, not {typed(rows)}")
    if spec.grid is None:
        several = _split(modality, rows, spec)
        return [EmbeddingItem(modality, {ROWS: checked(modality, i, one, spec.width)}) for i, one in enumerate(several)]
    grids = _grids(modality, value[spec.grid], spec)
    counts = [t // spec.merge_t * h * w // spec.merge**2 for t, h, w in grids]
    flat = rows if isinstance(rows, list | tuple) else _flat(modality, rows, counts, spec)
    if len(flat) != len(grids):
        raise MediaError(modality, 0, f"{spec.name} holds {len(flat)} items but {spec.grid} names {len(grids)}")
    items = [checked(modality, i, one, spec.width) for i, one in enumerate(flat)]
    for index, (one, count) in enumerate(zip(items, counts, strict=True)):
        if len(one) != count:
            raise MediaError(modality, index, f"{len(one)} rows were given but its grid {grids[index]} makes {count}")
    pairs = zip(items, grids, strict=True)
    return [EmbeddingItem(modality, {ROWS: one, "grid": torch.tensor(grid)}) for one, grid in pairs]


def _flat(modality: str, rows: Tensor | np.ndarray, counts: list[int], spec: EmbeddingSpec) -> list[object]:
    """Rows of all items laid end to end, cut as the grids say."""
    tensor = _dense(modality, 0, rows)
    if tensor.ndim == 3:
        return list(tensor)
    if tensor.ndim != 2 or len(tensor) != sum(counts):
        made = f"its grids make {sum(counts)} rows of {spec.width}"
        raise MediaError(modality, 0, f"{spec.name} has the shape {list(tensor.shape)} but {made}")
    return list(tensor.split(counts))


def _grids(modality: str, value: object, spec: EmbeddingSpec) -> list[tuple[int, int, int]]:
    try:
        grid = torch.as_tensor(value.tolist() if isinstance(value, Tensor | np.ndarray) else value)
    except (TypeError, ValueError, RuntimeError):
        grid = torch.zeros(0)
    if grid.ndim == 1 and grid.numel() == 3:
        grid = grid[None]
    if grid.ndim != 2 or grid.shape[-1] != 3 or grid.is_floating_point() or not bool((grid > 0).all()):
        raise MediaError(modality, 0, f"{spec.grid} is a list of [t, h, w], whole numbers above 0, one per item")
    grids = [(int(t), int(h), int(w)) for t, h, w in grid.tolist()]
    for index, (t, h, w) in enumerate(grids):
        if t % spec.merge_t:
            raise MediaError(
                modality, index, f"the {t} frames of its grid are no multiple of the {spec.merge_t} that make a row"
            )
        if h % spec.merge or w % spec.merge:
            raise MediaError(modality, index, f"its grid {h}x{w} is not divisible by the merge size {spec.merge}")
    return grids
