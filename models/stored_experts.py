"""Quantised experts that a checkpoint stores in one tensor `[experts, ...]`, split to the weights of each expert's layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ..checkpoints.formats.base import WeightFormat
from ..kernels.linear.grouped import QuantizedWeight
from .layers.linear import Linear
from .layers.moe import Mixture

ENDINGS = {
    "": "weight",
    "_scale_inv": "weight_scale_inv",
    "_activation_scale": "activation_scale",
    "_blocks": "blocks",
    "_scales": "scales",
    ".weight": "weight",  # this and the next two: MLX
    ".scales": "scales",
    ".biases": "biases",
}
"""Ends of the names of such tensors -> the same part of a single weight."""


@dataclass(frozen=True)
class ExpertStack:
    """One layer of all experts.

    Args:
        modules: canonical paths of the shards of each expert's layer; () for an expert that another rank holds.
        shape: outputs and inputs of an expert's layer.
        transposed: a square matrix is stored as `[in, out]`. Others show it by their shape.
    """

    modules: tuple[tuple[str, ...], ...]
    shape: tuple[int, int]
    transposed: bool

    def parts(self, number: int, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of an expert. A scale that all experts share is not indexed."""
        count = len(self.modules)
        expert = {part: tensor[number] if tensor.ndim and len(tensor) == count else tensor for part, tensor in stored.items()}
        matrix = expert.get("weight")
        if matrix is not None and matrix.shape == self.shape[::-1] and (self.transposed or matrix.shape != self.shape):
            expert = {part: tensor.mT if tensor.ndim == 2 else tensor for part, tensor in expert.items()}
        return expert

    def split(self, weight_format: WeightFormat, stored: Mapping[str, Tensor]) -> Iterator[tuple[str, QuantizedWeight]]:
        """Yield the canonical names and weights of the experts here. Raise ValueError for another shape."""
        for number, modules in enumerate(self.modules):
            if not modules:
                continue
            weight, count = weight_format.decode(self.parts(number, stored)), len(modules)
            if weight.shape != self.shape:
                raise ValueError(f"an expert of shape {list(weight.shape)}, the config needs {list(self.shape)}")
            each = self.shape[0] // count
            for i, module in enumerate(modules):
                rows = (
                    slice(i, None, count) if getattr(weight_format, "interleaved", False) else slice(i * each, (i + 1) * each)
                )
                yield f"{module}.weight", weight.select(rows)


def stacks(model: nn.Module) -> dict[str, ExpertStack]:
    """Return the stacks that a model's checkpoint may have, by the canonical name of the wide tensor."""
    stacked = {}
    for path, layer in model.named_modules():
        if isinstance(layer, Mixture):
            for name, part, chosen in (
                ("experts.gate_up_proj", "gate_up", slice(2)),
                ("experts.down_proj", "down", slice(1)),
                ("switch_mlp.gate_proj", "gate_up", slice(1)),  # this and the next two: MLX
                ("switch_mlp.up_proj", "gate_up", slice(1, 2)),
                ("switch_mlp.down_proj", "down", slice(1)),
            ):
                first = next(layer.experts.children()).get_submodule(part)
                assert isinstance(first, Linear)
                shards = list(first.shards.items())[chosen]
                modules = tuple(
                    () if i in layer.absent_experts else tuple(f"{path}.experts.{i}.{shard}" for shard, _ in shards)
                    for i in range(layer.num_experts)
                )
                shape = sum(outputs for _, outputs in shards), first.weight.shape[1]
                stacked[f"{path}.{name}"] = ExpertStack(modules, shape, layer.transposed)
    return stacked
