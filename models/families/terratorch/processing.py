"""Input of models that read named tensors, which are passed on unchanged. The prompt has one token per encoder row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....callers.errors import InputError
from ....mm.fields import BatchedField, FieldElem, SharedField
from ....mm.raw_tensors import RawTensors, read_raw_tensors
from ....mm.types import EmbeddingItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ....processors.bases.base import BaseProcessingInfo
from ....processors.files import ProcessorFiles

_PLACEHOLDER = 1


class RawTensorInfo(BaseProcessingInfo):
    """ProcessingInfo of models of tensors. The text of a prompt must be empty; its placeholder is inserted."""

    rewrites_prompts = True
    modalities = ("image",)
    takes_instruction = False

    def __init__(self, files: ProcessorFiles, *kwargs: Mapping[str, Any]) -> None:
        self.raw = read_raw_tensors(files.config)
        super().__init__(files, *kwargs)
        self.placeholder_ids = {"image": _PLACEHOLDER}
        self.output_shape = self.raw.output

    def resolve_spec(self, modality: str) -> RawTensors:
        return self.raw

    def _embedding_spec(self, modality: str) -> RawTensors:  # type: ignore[override]
        return self.raw

    @property
    def embed_width(self) -> int:
        return self.raw.output[-1]

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        return ItemGeometry(1, self.raw.rows, 1)

    def embeds_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        return ItemGeometry(1, self.raw.rows, 1)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        raise InputError(f"this model takes tensors; give a mapping with {', '.join(self.raw.tensors)}", code="unsupported")

    def tensor_fields(self, item: EmbeddingItem) -> MultiModalKwargsItem:
        """Return the tensors of an item as fields."""
        return {
            name: FieldElem(item.tensors[name], SharedField() if spec.shared else BatchedField())
            for name, spec in self.raw.tensors.items()
        }

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Return one placeholder. Raise InputError unless the prompt is one item without text."""
        if list(ids) not in ([], [_PLACEHOLDER]) or items.get("image") != 1:
            raise InputError(
                "this model takes one item per prompt and no text; give an empty prompt with its tensors", code="unsupported"
            )
        return [_PLACEHOLDER]
