"""Base of encoder-decoder models that read a text: its tokens are an item, to which the decoder cross-attends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from ...callers.errors import ConfigError, InputError
from ...mm.fields import BatchedField, FieldElem, FlatField
from ...mm.types import EmbeddingItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ..files import ProcessorFiles
from ..interface import Span
from ..spans import build_span
from .base import BaseProcessingInfo

ENCODER_TEXT = "text"
"""The modality of the encoder's text."""
_IDS = "input_ids"


class EncoderTextInfo(BaseProcessingInfo):
    """Implements SupportsEncoderText. The text takes no tokens of the decoder's prompt, which begins with the start token.

    Tensors: `input_ids` int64 `[tokens]`, and `lengths`, the number of them.
    """

    modalities = (ENCODER_TEXT,)
    valid_kwargs = {ENCODER_TEXT: ()}
    embeds_layout = None
    rewrites_prompts = True
    takes_instruction = False

    def __init__(self, files: ProcessorFiles, *kwargs: Mapping[str, Any]) -> None:
        if names := sorted({name for options in kwargs for name in options}):
            raise ConfigError(f"this model takes text only; leave out {names[0]!r}", param="mm_processor_kwargs")
        super().__init__(files, *kwargs)
        sizes = ("vocab_size", "max_position_embeddings", "decoder_start_token_id")
        self.vocab, self.longest, self.start = (int(self.text_config[key]) for key in sizes)

    def encoder_item(self, ids: Sequence[int]) -> EmbeddingItem:
        """Return the item of the encoder's tokens.

        Raises:
            InputError: there are none, too many, or one is not of the vocabulary.
        """
        if not ids:
            raise InputError("the encoder's text has no tokens; give one that is not empty", param="encoder_prompt")
        if len(ids) > self.longest:
            reason = f"the encoder's text has {len(ids)} tokens, and the encoder reads {self.longest}; shorten it"
            raise InputError(reason, code="too_long", param="encoder_prompt", limit=self.longest, value=len(ids))
        wrong = next((token for token in ids if not 0 <= token < self.vocab), None)
        if wrong is not None:
            reason = f"token {wrong} of the encoder's text is not from 0 to {self.vocab - 1}"
            raise InputError(reason, code="invalid_value", param="encoder_prompt", limit=self.vocab - 1, value=wrong)
        return EmbeddingItem(ENCODER_TEXT, {_IDS: torch.tensor(ids)})

    def resolve_spec(self, modality: str) -> None:
        """Return None: nothing is read from the preprocessor's JSON."""

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Return the rows of the longest text, for which memory is planned."""
        return ItemGeometry(1, self.longest, 1)

    def embeds_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        return ItemGeometry(1, len(item.tensors[_IDS]), 1)

    def tensor_fields(self, item: EmbeddingItem) -> MultiModalKwargsItem:
        ids = item.tensors[_IDS]
        length = FieldElem(torch.tensor(len(ids)), BatchedField(keep_on_cpu=True))
        return {_IDS: FieldElem(ids, FlatField()), "lengths": length}

    def process(self, item: MediaItem, dtype: torch.dtype) -> NoReturn:
        raise InputError(f"this model takes text only; leave out the {item.header.modality}", code="unsupported")

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return an empty span: the text takes no tokens of the decoder's prompt."""
        return build_span([], 0)

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        return None

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Begin the prompt with the decoder's start token, as generation does in transformers."""
        return ids if ids and ids[0] == self.start else [self.start, *ids]
