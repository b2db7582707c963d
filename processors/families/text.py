"""Text-only checkpoints: prompts without items."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ...mm.errors import InputError
from ...mm.types import ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ..bases.base import BaseProcessingInfo

_TEXT_ONLY = "this model takes text only; leave out the items"


class TextProcessingInfo(BaseProcessingInfo):
    """The inputs of a model that takes no modality."""

    embeds_layout = None

    def resolve_spec(self, modality: str) -> NoReturn:
        raise InputError(_TEXT_ONLY)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        raise InputError(_TEXT_ONLY)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        raise InputError(_TEXT_ONLY)
