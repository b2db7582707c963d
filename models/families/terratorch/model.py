"""Models of TerraTorch, such as Prithvi for satellite bands (arXiv 2412.02732). The package terratorch builds and runs them.

Weights must be safetensors: a pickled checkpoint is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ...raw_tensors import RawTensorModel


class Terratorch(RawTensorModel):
    """A network that terratorch describes in `pretrained_cfg`."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        try:
            vllm = import_module("terratorch.vllm")
        except ImportError as error:
            raise ConfigError(f"this model needs the package terratorch ({error}); pip install terratorch") from None
        with torch.device(device):
            self.runners = [vllm.InferenceRunner(config["pretrained_cfg"])]  # in a list: its network is a submodule already
        super().__init__(config, self.runners[0].model, dtype, device)

    def run(self, tensors: Mapping[str, Tensor]) -> Tensor:
        result: Tensor = self.runners[0].forward(**tensors).output
        return result

    def own_name(self, name: str) -> str:
        return name.removeprefix("model.").replace("_timm_module.", "")
