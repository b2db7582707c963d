"""Layers on a pooled vector: what sentence-transformers' modules after the pooling compute (Dense, LayerNorm, Normalize)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...callers.errors import ConfigError, short_repr
from ...checkpoints.config import positive_int
from .basic import Norm, TensorModule
from .linear import Linear

_log = logging.getLogger(__name__)
VECTOR_HEAD = "vector_head"
_ACTIVATIONS = (
    "Identity", "Tanh", "ReLU", "ReLU6", "LeakyReLU", "ELU", "CELU", "SELU", "GELU", "SiLU", "Mish", "Sigmoid", "LogSigmoid",
    "Softplus", "Softsign", "Tanhshrink", "Hardtanh", "Hardswish", "Hardsigmoid",
)  # fmt: skip
_EPS = 1e-5  # of torch.nn.LayerNorm, whose default the module uses


class VectorHead(TensorModule):
    """`[n, pooled] -> float32 [n, size]`. All layers compute in float32.

    Args:
        steps: (kind, its config.json) of each layer: "Dense", "LayerNorm" or "Normalize".
        pooled: length of the pooled vector.

    Raises:
        ConfigError: the layers do not fit the vector or each other, or an activation is not supported.
    """

    def __init__(self, steps: Sequence[tuple[str, Mapping[str, Any]]], pooled: int, device: torch.device) -> None:
        super().__init__()
        self.pooled = size = pooled
        layers = list[TensorModule]()
        for kind, config in steps:
            if kind == "Dense":
                inputs = positive_int(config, "in_features", "a Dense module's config.json")
                _check_size(inputs, size, "a Dense module", "in_features")
                layer = DenseLayer(config, inputs, device)
                layers.append(layer)
                size = layer.outputs
            elif kind == "LayerNorm":
                _check_size(positive_int(config, "dimension", "a LayerNorm module's config.json"), size, "a LayerNorm module")
                layers.append(VectorNorm(size, device))
            else:
                layers.append(UnitLength())
        self.layers, self.size = nn.ModuleList(layers), size

    def forward(self, pooled: Tensor) -> Tensor:
        vectors = pooled.float()
        for layer in self.layers:
            vectors = layer(vectors)
        return vectors


class DenseLayer(TensorModule):
    """A linear layer, an activation (Tanh if config.json names none), and the input added to the result if it says so."""

    def __init__(self, config: Mapping[str, Any], inputs: int, device: torch.device) -> None:
        super().__init__()
        self.outputs = positive_int(config, "out_features", "a Dense module's config.json")
        bias = bool(config.get("bias", True))
        self.linear = Linear(inputs, {"linear": self.outputs}, bias, torch.float32, device, exact=True)
        self.activation = _activation(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
        self.adds_input, self.residual = bool(config.get("use_residual", False)), None
        if self.adds_input and inputs != self.outputs:
            self.residual = Linear(inputs, {"residual": self.outputs}, False, torch.float32, device, exact=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(self.linear(x))
        if not self.adds_input:
            return out
        return out + (x if self.residual is None else self.residual(x))


class VectorNorm(TensorModule):
    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        self.norm = Norm(size, _EPS, True, torch.float32, device)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class UnitLength(TensorModule):
    """Scales vectors to length 1."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


def _activation(name: object) -> nn.Module:
    """Return the activation of a class of `torch.nn`. For other classes, which are code, the library takes Tanh."""
    if name is None:
        return nn.Identity()
    module, _, last = str(name).rpartition(".")
    if not module.startswith("torch"):
        _log.warning("a Dense module's activation %s is not of torch and is not run; Tanh is used", short_repr(name))
        return nn.Tanh()
    if last not in _ACTIVATIONS:
        choice = ", ".join(_ACTIVATIONS)
        raise ConfigError(f"a Dense module's activation_function {short_repr(name)} is not supported; known are {choice}")
    activation: nn.Module = getattr(nn, last)()
    return activation


def _check_size(stated: int, size: int, module: str, key: str = "dimension") -> None:
    if stated != size:
        raise ConfigError(f"{module} states {key}={stated}, but the vector before it has {size} values; download it again")
