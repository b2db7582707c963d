"""Bytes of a model's weights after loading, in closed form from a model on the meta device."""

from __future__ import annotations

import torch
from torch import nn

from .interface import Model
from .layers.basic import WeightedLayer
from .layers.linear import LmHead


def weight_bytes(model: Model, device: torch.device, quantization: str | None) -> int:
    """Bytes of all layers as `pack` lays them out on `device`, and of parameters of torch's own layers."""
    assert isinstance(model, nn.Module)
    total = sum(parameter.nbytes for parameter in model.parameters())
    for module in model.modules():
        if isinstance(module, WeightedLayer | LmHead):
            total += module.packed_bytes(device, quantization is not None)
    return total
