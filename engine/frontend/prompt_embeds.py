"""Prompts that are given as token embeddings: checks, and the features that carry their rows to the model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...callers.errors import InputError, MediaError
from ...mm.embeddings import PROMPT_EMBEDS, PROMPT_EMBEDS_ROWS, ROWS, check_rows
from ...mm.fields import FieldElem, FlatField
from ...mm.hashing import digest
from ...mm.types import ItemGeometry, MultiModalFeature, PlaceholderRange


def read_prompt_embeds(value: object, width: int, max_tokens: int, dtype: torch.dtype) -> Tensor:
    """Return `prompt_embeds` as a copy `[tokens, width]` of the model's dtype on the CPU.

    Raises:
        InputError: another type, shape or number of axes, no row or more than `max_tokens`, or values that are not finite in
            this dtype.
    """
    if isinstance(value, Tensor) and value.ndim == 3 and value.shape[0] == 1:
        value = value[0]  # as transformers' embedding layer returns one prompt
    if isinstance(value, Tensor) and value.ndim == 2 and value.shape[0] > max_tokens:
        reason = f"the prompt has {value.shape[0]} embeddings, but <<max_model_len>> is {max_tokens + 1}; shorten it"
        raise InputError(reason, code="too_long", param="prompt_embeds", limit=max_tokens, value=value.shape[0])
    try:
        rows = check_rows(PROMPT_EMBEDS, 0, value, width).to("cpu", dtype)
    except MediaError as error:
        raise InputError(f"<<param>>: {error.info.without_item().text}", param="prompt_embeds") from None
    if not bool(rows.isfinite().all()):
        kind = str(dtype).removeprefix("torch.")
        raise InputError(f"<<param>>: a value is too large for {kind}, the model's dtype", param="prompt_embeds")
    return rows


def prompt_embeds_features(rows: Tensor, row_size: int, salt: str | None) -> tuple[MultiModalFeature, ...]:
    """Split a prompt's embeddings into pieces. Each piece is an item whose rows have the positions of text tokens.

    Prompts with equal first pieces share encoder rows and KV blocks.

    Args:
        row_size: width of an encoder row. Deepstack levels are zeros.
        salt: the prompt's `cache_salt`. Prompts with different salts share no rows.
    """
    features = []
    for start in range(0, len(rows), PROMPT_EMBEDS_ROWS):
        piece = F.pad(rows[start : start + PROMPT_EMBEDS_ROWS], (0, row_size - rows.shape[1]))
        count = len(piece)
        features.append(
            MultiModalFeature(
                PROMPT_EMBEDS,
                {ROWS: FieldElem(piece, FlatField())},
                PlaceholderRange(start, count),
                ItemGeometry(count, 1, 1, linear=True),
                digest("sensorium.prompt_embeds", salt, piece),
            )
        )
    return tuple(features)
