"""BERT and its descendants as embedders and classifiers: bidirectional encoders (arXiv 1810.04805, 1907.11692, 2004.09297)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ....checkpoints.config import pooling_mode
from ...decoder_model import DecoderModel
from ...interface import StepLimits
from ...layers.basic import TensorModule
from ...layers.classification import ClassificationHead, Pooler
from ...text.decoder import Decoder
from ...text.spec import AttentionSpec, DecoderSpec
from ..text_only.model import ClassificationModel, TakesNoItems
from .config import LAYOUTS
from .deberta import DebertaEncoder, split_projections
from .encoder import BertEncoder

_IGNORED = (
    "pooler.", "cls.", "lm_head.", "head.", "decoder.", "classifier.", "embeddings.position_ids", "vocab_transform.",
    "vocab_layer_norm.", "vocab_projector.", "rotary_emb.", "lm_predictions.", "mask_predictions.",
)  # fmt: skip


class TextEncoder(TakesNoItems, DecoderModel):
    """Base of embedders. Prompts are never chunked, because all of their tokens attend to each other."""

    prefixes: tuple[tuple[str, str], ...] = (("", "language_model."),)
    ignored = tuple(f"language_model.{name}" for name in _IGNORED)

    def __init__(
        self, config: Mapping[str, Any], spec: DecoderSpec, encoder: TensorModule, dtype: torch.dtype, device: torch.device
    ) -> None:
        DecoderModel.__init__(self, spec, dtype, device, cast(Decoder, encoder))
        self.head, self.pooling = None, pooling_mode(config, "mean")

    def choose_head(self, headers: Mapping[str, Tensor]) -> None:
        """Do nothing: heads of other tasks are not used."""


class Bert(TextEncoder):
    """An encoder of `config.LAYOUTS` as an embedder."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self.layout = LAYOUTS.get(str(config.get("model_type")), LAYOUTS["bert"])
        text = self.layout.read(config)
        spec, kind = self.layout.spec(text), DebertaEncoder if self.layout.disentangled else BertEncoder
        self.encoder = (kind(spec, self.layout, text, dtype, device),)  # in a tuple: it is registered as the decoder
        super().__init__(text, spec, self.encoder[0], dtype, device)
        if self.encoder[0].embed_positions is None:  # some checkpoints store a table that is not used
            self.ignored = (*self.ignored, "language_model.embed_positions.")

    def forward_bytes(self, limits: StepLimits) -> int:
        return super().forward_bytes(limits) + self.encoder[0].position_bytes(limits)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        if self.layout.disentangled:
            weights = split_projections(weights, cast(AttentionSpec, self.spec.attentions[0]).heads)
        return self.layout.renamed(weights)


class BertTokenClassifier(ClassificationModel, Bert):
    """An encoder that classifies each token (`...ForTokenClassification`)."""

    labels_tokens = True
    prefixes = (("classifier.", "classifier.out_proj."), *Bert.prefixes)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self.classifier = ClassificationHead(config, self.hidden_size, True, dtype, device)


class BertClassifier(ClassificationModel, Bert):
    """An encoder that classifies a prompt, or a pair of texts, by its first token."""

    prefixes = (("pooler.", "classifier.transform."), ("classifier.", "classifier."), *Bert.prefixes)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__({**config, "pooling_mode": "cls"}, dtype, device)
        transform = Pooler(self.hidden_size, self.layout.pooler_act(config), dtype, device)
        self.classifier = ClassificationHead(config, self.hidden_size, True, dtype, device, transform)
        (encoder,) = self.encoder
        encoder.pairs = encoder.embed_types is not None and len(encoder.embed_types.weight) > 1

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors under our names. BERT stores the first linear layer as pooler, RoBERTa stores both as classifier."""
        for name, tensor in super().convert_weights(weights):
            name = re.sub(r"^(pooler\.dense|classifier\.dense|pre_classifier)\.", "classifier.transform.dense.", name)
            if name in ("classifier.weight", "classifier.bias"):
                name = name.replace("classifier.", "classifier.out_proj.")
            yield name, tensor
