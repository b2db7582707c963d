"""The base of models that map named tensors to one tensor, without text: a network, and no decoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..callers.errors import CheckpointError, InputError
from ..mm.raw_tensors import read_raw_tensors
from .encoder_only import EncoderOnlyModel
from .interface import StepLimits

_ACTIVATIONS = 16  # copies of an item's input and result that a network is assumed to hold at once


class RawTensorModel(EncoderOnlyModel):
    """Implements `models.interface.Model`; a family passes the network and overrides `run`.

    Each row along the last axis of an item's result is an encoder row. Items are computed one by one, so that a result does
    not depend on the batch.
    """

    def __init__(self, config: Mapping[str, Any], network: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        raw = read_raw_tensors(config)
        super().__init__(raw.output[-1], 2, raw.rows + 1, dtype)
        self.raw, self.network = raw, network.to(device, dtype).eval()

    def run(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the results `[items, ...]` for tensors `[items, ...]`."""
        result: Tensor = self.network(**tensors)
        return result

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        inputs = {name: value.to(self.dtype) for name, value in tensors.items()}
        batched = [name for name in inputs if not self.raw.tensors[name].shared]
        count = len(inputs[batched[0]]) if batched else 1
        rows = []
        for i in range(count):
            result = self.run({name: value[i : i + 1] if name in batched else value[None] for name, value in inputs.items()})[0]
            if tuple(result.shape) != self.raw.output:
                raise InputError(f"the model's result has the shape {list(result.shape)}, config.json says {self.raw.output}")
            rows.append(result.reshape(self.raw.rows, -1))
        return rows

    def input_bytes(self, modality: str, rows: int) -> int:
        return self._items(rows) * self.raw.numbers * 4

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        """Return an estimate, because the network is unknown. Items are computed one by one."""
        base = self.input_bytes(modality, rows) + 2 * rows * self.row_size * self.dtype.itemsize
        return base + _ACTIVATIONS * (self.raw.numbers + self.raw.rows * self.row_size) * self.dtype.itemsize

    def _items(self, rows: int) -> int:
        return -(-rows // self.raw.rows)

    def own_name(self, name: str) -> str:
        """Hook: return the network's name of a stored tensor."""
        return name

    def check_weights(self, headers: Mapping[str, Tensor]) -> None:
        expected = self.network.state_dict()
        stored = {self.own_name(name): tensor for name, tensor in headers.items()}
        for verb, names in (("lacks", expected.keys() - stored.keys()), ("holds unknown", stored.keys() - expected.keys())):
            if names:
                raise CheckpointError(f"the checkpoint {verb} {', '.join(sorted(names)[:3])}; it does not fit its config.json")
        for name, tensor in stored.items():
            if tensor.shape != expected[name].shape:
                needed = list(expected[name].shape)
                raise CheckpointError(f"{name} has shape {list(tensor.shape)}, the config needs {needed}")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        tensors = dict(weights)
        self.check_weights(tensors)
        self.network.load_state_dict({self.own_name(name): tensor for name, tensor in tensors.items()})
