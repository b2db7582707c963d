"""jina-reranker-m0: Qwen2-VL that scores a document, a text or an image, for a query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...layers.classification import ClassificationHead, Pooler
from ..qwen2_vl.model import Qwen2VL

_LOGIT_BIAS = 2.65  # published with the model; config.json does not have it


class JinaReranker(Qwen2VL):
    """The score is an MLP's output for the last token, which the processor adds."""

    prefixes = (("score.0.", "classifier.transform.dense."), ("score.2.", "classifier.out_proj."), *Qwen2VL.prefixes)
    text_parts = ("language_model", "head", "classifier")
    num_labels = 1

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self.head, self.ignored = None, (*self.ignored, "head.")
        transform = Pooler(self.hidden_size, "relu", dtype, device)
        self.classifier = ClassificationHead({"num_labels": 1}, self.hidden_size, True, dtype, device, transform)

    def classify(self, hidden: Tensor, activate: bool) -> Tensor:
        logits: Tensor = self.classifier(hidden, False)
        return (logits - _LOGIT_BIAS).sigmoid() if activate else logits

    def choose_head(self, headers: Mapping[str, Tensor]) -> None:
        """Do nothing: a stored language model head is not used."""
