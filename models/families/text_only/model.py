"""Text-only checkpoints: a decoder stack of `text/stacks.py` and its head."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Never

import torch
from torch import Tensor

from ....callers.errors import ConfigError, InputError
from ....checkpoints.config import pooling_mode
from ....checkpoints.consolidated import hub_names
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...internlm2 import internlm2_weights
from ...layers.classification import ClassificationHead, Pooler, count_labels
from ...layers.linear import Linear
from ...text.bidirectional import attends_to_all, one_sided
from ...text.decoder_config import decoder_spec
from ...text.spec import AttentionSpec
from ...text.stacks import replace_parts, stack_of

_HEADLESS = (
    "embed_tokens",
    "layers",
    "norm",
    "embedding_norm",
    "final_layernorm",
    "final_layer_norm",
    "norm_f",
    "ln_f",
    "embed_positions",
)
"""First parts of tensor names in checkpoints saved without the head."""


class TakesNoItems:
    """The encoder side of a model without encoders."""

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> Never:
        raise InputError(f"a text model takes no {modality} items")

    def input_bytes(self, modality: str, rows: int) -> int:
        return 0

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        return 0


class TextModel(TakesNoItems, DecoderModel):
    """A decoder without encoders. The stack is the one of config.json's `model_type`."""

    renames: Sequence[tuple[str, str]] = ()
    prefixes = (
        ("model.", "language_model."),
        ("backbone.", "language_model."),
        ("lm_head.", "head.lm_head."),
        ("transformer.", "language_model."),
        ("h.", "language_model.layers."),
        *((f"{part}.", f"language_model.{part}.") for part in _HEADLESS),
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        stack = stack_of(config)
        spec = decoder_spec(one_sided(config, stack), stack)
        if attends_to_all(config, stack) and any(
            isinstance(layer.mixer, AttentionSpec) and layer.mixer.chunked for layer in spec.layers
        ):
            raise ConfigError("is_causal in config.json is false, which is not defined for attention within chunks")
        if attends_to_all(config, stack) and any(getattr(layer.mixer, "indexer", None) for layer in spec.layers):
            raise ConfigError("is_causal in config.json is false, which is not supported with index_topk; set it to true")
        super().__init__(spec, dtype, device)
        self.pooling = pooling_mode(config, "lasttoken")
        self.renames = stack.renames

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return ((replace_parts(name, self.renames), tensor) for name, tensor in weights)


class MistralText(TextModel):
    """Mistral AI's text models in their publisher's layout."""

    prefixes = TEXT_PREFIXES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        stack = replace(stack_of(config), interleaved=True)
        DecoderModel.__init__(self, decoder_spec(config, stack), dtype, device)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return hub_names(weights)


class ClassificationModel:
    """The classifier's side of models that classify a prompt by one hidden state. They have no language model head.

    `labels_tokens`: each token has classes instead.
    """

    labels_tokens = False
    text_parts: ClassVar[Sequence[str]] = ("language_model", "head", "classifier")
    classifier: ClassificationHead
    reads_encoder_rows: bool

    @property
    def num_labels(self) -> int:
        return self.classifier.num_labels

    def classify(self, hidden: Tensor, activate: bool) -> Tensor:
        return self.classifier(hidden, activate)

    def keep_encoders(self, modalities: Collection[str]) -> None:
        """Remove nothing: the head is needed, and there are no encoders."""
        self.reads_encoder_rows = False

    def choose_head(self, headers: Mapping[str, Tensor]) -> None:
        """Do nothing: a stored language model head is not used."""


class TextClassifier(ClassificationModel, TextModel):
    """A decoder that classifies a prompt by its last token (`...ForSequenceClassification`)."""

    prefixes = (("score.", "classifier.out_proj."), *TextModel.prefixes)
    ignored = ("head.",)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self.head = None
        self.classifier = ClassificationHead(config, self.hidden_size, False, dtype, device)


class RewardModel(ClassificationModel, TextModel):
    """Qwen2.5-Math-RM and -PRM in their publisher's layout: the head is an MLP.

    The first gives a prompt one number. The second has two classes of each step of a solution, wrong and right.
    """

    prefixes = (("score.0.", "classifier.transform.dense."), ("score.2.", "classifier.out_proj."), *TextModel.prefixes)
    ignored = ("head.",)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        labels = 2 if "Process" in str(config.get("architectures")) else 1
        self.head, transform = None, Pooler(self.hidden_size, "relu", dtype, device)
        self.classifier = ClassificationHead({**config, "num_labels": labels}, self.hidden_size, True, dtype, device, transform)


class Voyage(TextModel):
    """voyage-4-nano: Qwen3 with bidirectional attention and a linear layer over the hidden states, as an embedder."""

    text_parts = ("language_model", "linear")

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__({**config, "model_type": "qwen3"}, dtype, device)
        self.head, self.ignored, self.pooling = None, (*self.ignored, "head."), pooling_mode(config, "mean")
        self.vector_size = self.token_size = count_labels(config)
        self.linear = Linear(self.hidden_size, {"linear": self.vector_size}, False, dtype, device, exact=True)

    def project_hidden(self, hidden: Tensor, tokens: bool) -> Tensor:
        return self.linear(hidden)

    def choose_head(self, headers: Mapping[str, Tensor]) -> None:
        """Do nothing: a stored language model head is not used."""


class InternLM2(TextModel):
    """InternLM2 in its publisher's layout."""

    prefixes = TEXT_PREFIXES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__({**config, "attention_bias": config.get("bias", True)}, dtype, device)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return internlm2_weights(((f"language_model.{name}", tensor) for name, tensor in weights), self.spec)
