"""A small model of tensors: bands of an image, coordinates and a shared scale in; a map of two classes out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sensorium.models.raw_tensors import RawTensorModel
from torch import Tensor, nn

CONFIG: dict[str, Any] = {
    "architectures": ["TinyBands"],
    "pretrained_cfg": {
        "input": {
            "data": {
                "pixel_values": {"type": "torch.Tensor", "shape": [3, 8, 6]},
                "location_coords": {"type": "torch.Tensor", "shape": [1, 2]},
                "scale": {"type": "torch.Tensor", "shape": [2], "shared": True},
            }
        },
        "output": {"shape": [2, 8, 6]},
    },
}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bands, self.place = nn.Conv2d(3, 2, 3, padding=1), nn.Linear(2, 2)

    def forward(self, pixel_values: Tensor, location_coords: Tensor, scale: Tensor) -> Tensor:
        return self.bands(pixel_values) * scale[:, :, None, None] + self.place(location_coords[:, 0])[:, :, None, None]


class TinyBands(RawTensorModel):
    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, Network(), dtype, device)
