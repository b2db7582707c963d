"""The head of classification checkpoints (`...ForSequenceClassification`): pooled hidden states -> one number per class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...callers.errors import ConfigError, short_repr
from ...checkpoints.config import positive_int
from ...kernels.activation import activation
from .basic import TensorModule
from .linear import Linear

_BY_PROBLEM = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_DEFAULT_LABELS = 2  # transformers' default
_ACTIVATIONS = ("identity", "sigmoid", "softmax")


def count_labels(config: Mapping[str, Any]) -> int:
    """Return the number of classes: 2 if config.json does not say."""
    if "num_labels" in config:
        return positive_int(config, "num_labels")
    names = config.get("id2label")
    if names is not None and not isinstance(names, Mapping | list):
        raise ConfigError(f"id2label in config.json is {short_repr(names)}; it must map each class to its name")
    return len(names) if names else _DEFAULT_LABELS


def label_activation(config: Mapping[str, Any], labels: int) -> str:
    """Return "identity", "sigmoid" or "softmax": from sentence-transformers' config, the problem type or the classes.

    Raises:
        ConfigError: sentence-transformers' config names another activation.
    """
    module = config.get("sentence_transformers")
    older = next((value for key, value in config.items() if key.endswith("_ce_default_activation_function")), None)
    named = (module.get("activation_fn") if isinstance(module, Mapping) else None) or older
    if named is None:
        return _BY_PROBLEM.get(str(config.get("problem_type")), "sigmoid" if labels == 1 else "softmax")
    name = str(named).rpartition(".")[2].lower()
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"the classifier's activation {short_repr(named)} is not supported; known are {', '.join(_ACTIVATIONS)}"
        )
    return name


class Pooler(TensorModule):
    """A linear layer and an activation (a name of `kernels.activation`)."""

    def __init__(self, width: int, act: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.act = act
        self.dense = Linear(width, {"dense": width}, True, dtype, device, exact=True)

    def forward(self, pooled: Tensor) -> Tensor:
        return activation(self.act, self.dense(pooled))


class ClassificationHead(TensorModule):
    """`[n, width] -> float32 [n, labels]`. `transform`: a module applied to the pooled states first."""

    def __init__(
        self,
        config: Mapping[str, Any],
        width: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        transform: TensorModule | None = None,
    ) -> None:
        super().__init__()
        self.num_labels = count_labels(config)
        self.activation = label_activation(config, self.num_labels)
        self.transform = transform
        self.out = Linear(width, {"out_proj": self.num_labels}, bias, dtype, device, exact=True)

    def forward(self, pooled: Tensor, activate: bool) -> Tensor:
        """Return one number per class: a probability if `activate`, else a logit."""
        logits = self.out(pooled if self.transform is None else self.transform(pooled)).float()
        if not activate or self.activation == "identity":
            return logits
        return logits.sigmoid() if self.activation == "sigmoid" else logits.softmax(-1)
