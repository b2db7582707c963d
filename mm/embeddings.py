"""Precomputed embeddings that callers pass in place of media, and their validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..callers.errors import MediaError, short_repr, typed
from .raw_tensors import RawTensors, read_tensor_items
from .types import EmbeddingItem, EncodedItem, ItemGeometry

ROWS = "encoder_rows"  # name of the tensor of a precomputed item, `[rows, width]`
PROMPT_EMBEDS = "prompt_embeds"  # modality of the pieces of `prompt_embeds`
PROMPT_EMBEDS_ROWS = 256  # maximum rows of one of these pieces


@dataclass(frozen=True)
class EmbeddingSpec:
    """Format of precomputed embeddings of one modality.

    Args:
        width: size of one row.
        name: tensor name in `{name: [rows, width] or [items, rows, width] or a list of [rows, width]}`.
        grid: name of the int tensor `[items, 3]` of (t, h, w) in patches that must come with it; None: no grid.
        merge: patches merged to one row along h and along w.
        merge_t: temporal steps merged to one row.
    """

    width: int
    name: str
    grid: str | None = None
    merge: int = 1
    merge_t: int = 1


def read_embeddings(modality: str, value: object, spec: EmbeddingSpec | RawTensors) -> list[EmbeddingItem] | None:
    """Return the items of a value that holds embeddings, or None if it holds media.

    Embeddings are a mapping of named tensors or, except for audio, a floating tensor of 2 or 3 axes or a list of tensors of 2
    axes (uint8 tensors are pixels). Items of a model with RawTensors are mappings of their tensors. The tensors of other items
    are ROWS `[rows, width]` and, if there is a grid, "grid" `[3]`.

    Raises:
        MediaError: rows of another width, dtype or layout, rows that are not finite, or a number of rows that does not fit
            the grid.
    """
    if isinstance(spec, RawTensors):
        return read_tensor_items(modality, value, spec)
    if isinstance(value, Mapping) and spec.name in value:
        keys = [name for name in (spec.name, spec.grid) if name is not None]
        if set(value) != set(keys):
            raise MediaError(
                modality, 0, f"embeddings need exactly the keys {' and '.join(keys)}, not {', '.join(map(str, value))}"
            )
        rows = value[spec.name]
        if not isinstance(rows, Tensor | np.ndarray | list | tuple):
            raise MediaError(modality, 0, f"{spec.name} must be a tensor, not {typed(rows)}")
        if spec.grid is not None:
            return _with_grids(modality, rows, value[spec.grid], spec)
        value = rows
    elif modality == "audio" or not _looks_like_rows(value):
        return None
    elif spec.grid is not None:
        layout = f'{{"{spec.name}": rows, "{spec.grid}": [[t, h, w]]}}'
        raise MediaError(modality, 0, f"embeddings of this model need their grids: {layout} (pixels must be uint8)")
    several = _split(modality, value, spec)
    return [EmbeddingItem(modality, {ROWS: check_rows(modality, i, embeds, spec.width)}) for i, embeds in enumerate(several)]


def read_encoded(modality: str, index: int, item: EncodedItem, width: int) -> EmbeddingItem:
    """Return the embeddings of an item that was encoded before. Raise MediaError if they do not fit the model or each other."""
    if not width:
        raise MediaError(modality, index, "this model takes no encoder rows; give the media itself")
    if item.modality != modality:
        raise MediaError(modality, index, f"it was encoded as {short_repr(item.modality, 40)}")
    rows = check_rows(modality, index, item.rows, width)
    if not all(isinstance(grid, ItemGeometry) for grid in item.geometries):
        raise MediaError(modality, index, "the geometries of an EncodedItem must be the ones that encode_media returned")
    counts = [grid.num_embeds for grid in item.geometries]
    if min(counts, default=0) < 1 or sum(counts) != len(rows):
        raise MediaError(modality, index, f"it has {len(rows)} rows, but its geometries make {sum(counts)}")
    return EmbeddingItem(modality, {ROWS: rows}, replace(item, rows=rows))


def check_rows(modality: str, index: int, rows: object, width: int) -> Tensor:
    """Check rows and return them as a floating, dense and finite copy `[n, width]`; the caller may reuse the original."""
    tensor = _dense(modality, index, rows)
    if tensor.ndim != 2 or tensor.shape[1] != width or not tensor.shape[0]:
        raise MediaError(
            modality, index, f"embeddings must have the shape [n, {width}] for this model, not {list(tensor.shape)}"
        )
    if not bool(torch.isfinite(tensor).all()):
        raise MediaError(modality, index, "embeddings hold NaN or infinite values; give finite ones")
    return tensor.detach().clone()


def _dense(modality: str, index: int, rows: object) -> Tensor:
    """Return rows as a dense floating tensor. Arrays may have any strides and byte order."""
    if isinstance(rows, np.ndarray) and rows.dtype.name in ("float16", "float32", "float64"):
        return torch.from_numpy(np.require(rows, rows.dtype.newbyteorder("="), ("C", "W")))
    if not isinstance(rows, Tensor | np.ndarray):
        raise MediaError(modality, index, f"embeddings must be a dense tensor, not {type(rows).__name__}")
    if isinstance(rows, np.ndarray) or not rows.is_floating_point():
        raise MediaError(modality, index, f"embeddings must be floating point, not {str(rows.dtype).removeprefix('torch.')}")
    if rows.layout != torch.strided or rows.is_meta:
        raise MediaError(modality, index, f"embeddings must be a dense tensor, not {rows.layout} on {rows.device}")
    return rows


def _looks_like_rows(value: object) -> bool:
    """Return whether a value is floating-point rows. A tensor of 3 axes, one of them channels, is an image of a wrong dtype."""
    if isinstance(value, list | tuple):
        return any(isinstance(entry, Tensor | np.ndarray) and _looks_like_rows(entry) for entry in value)
    if not isinstance(value, Tensor | np.ndarray):
        return False
    if not (value.is_floating_point() if isinstance(value, Tensor) else value.dtype.kind == "f"):
        return False
    return not (value.ndim == 3 and (value.shape[-1] in (1, 3, 4) or value.shape[0] in (1, 3, 4)) and value.shape[-1] < 64)


def _split(modality: str, value: object, spec: EmbeddingSpec) -> Sequence[object]:
    """Split a value into one value per item."""
    if isinstance(value, list | tuple):
        return value
    value = _dense(modality, 0, value)
    if value.ndim not in (2, 3):
        axes = f"2 or 3 axes, the last of size {spec.width}, not {value.ndim}"
        raise MediaError(modality, 0, f"embeddings must have {axes}; pixels must be uint8")
    return [value] if value.ndim == 2 else list(value)


def _with_grids(
    modality: str, rows: Tensor | np.ndarray | Sequence[object], grid: object, spec: EmbeddingSpec
) -> list[EmbeddingItem]:
    """Return the items of rows with grids, after checking that the numbers of rows agree."""
    grids = _grids(modality, grid, spec)
    counts = [t // spec.merge_t * h * w // spec.merge**2 for t, h, w in grids]
    flat = _flat(modality, rows, counts, spec) if isinstance(rows, Tensor | np.ndarray) else rows
    if len(flat) != len(grids):
        raise MediaError(modality, 0, f"{spec.name} holds {len(flat)} items but {spec.grid} holds {len(grids)} grids")
    items = [check_rows(modality, i, embeds, spec.width) for i, embeds in enumerate(flat)]
    for index, (embeds, count) in enumerate(zip(items, counts, strict=True)):
        if len(embeds) != count:
            raise MediaError(modality, index, f"it has {len(embeds)} rows but its grid {grids[index]} needs {count}")
    pairs = zip(items, grids, strict=True)
    return [EmbeddingItem(modality, {ROWS: embeds, "grid": torch.tensor(grid)}) for embeds, grid in pairs]


def _flat(modality: str, rows: Tensor | np.ndarray, counts: list[int], spec: EmbeddingSpec) -> list[object]:
    """Split the concatenated rows of all items by their grids."""
    tensor = _dense(modality, 0, rows)
    if tensor.ndim == 3:
        return list(tensor)
    if tensor.ndim != 2 or len(tensor) != sum(counts):
        needed = f"its grids need {sum(counts)} rows of {spec.width}"
        raise MediaError(modality, 0, f"{spec.name} has the shape {list(tensor.shape)} but {needed}")
    return list(tensor.split(counts))


def _grids(modality: str, value: object, spec: EmbeddingSpec) -> list[tuple[int, int, int]]:
    try:
        grid = torch.as_tensor(value.tolist() if isinstance(value, Tensor | np.ndarray) else value)
    except (TypeError, ValueError, RuntimeError):
        grid = torch.zeros(0)
    if grid.ndim == 1 and grid.numel() == 3:
        grid = grid[None]
    if grid.ndim != 2 or grid.shape[-1] != 3 or grid.is_floating_point() or not bool((grid > 0).all()):
        raise MediaError(modality, 0, f"{spec.grid} must be a list with one [t, h, w] of positive integers per item")
    grids = [(int(t), int(h), int(w)) for t, h, w in grid.tolist()]
    for index, (t, h, w) in enumerate(grids):
        if t % spec.merge_t:
            raise MediaError(modality, index, f"its grid has {t} frames, which is not a multiple of {spec.merge_t}")
        if h % spec.merge or w % spec.merge:
            raise MediaError(modality, index, f"its grid {h}x{w} is not divisible by the merge size {spec.merge}")
    return grids
