"""Says which options and models cannot be divided among ranks (`tensor_parallel_size`)."""

from __future__ import annotations

from typing import cast

from torch import nn

from ...callers.errors import ConfigError
from ...models.interface import Model
from ...models.layers.ranks import Ranks
from ..config import EngineConfig
from ..speculative_config import read_speculative_config

_PARAM = "tensor_parallel_size"
_WHOLE = {
    "parts": "all",
    "load_talker": False,
    "load_mtp": False,
    "enable_lora": False,
}  # options and the value that ranks take


def check_rank_options(config: EngineConfig) -> None:
    """Raise ConfigError for an option that several ranks cannot honour."""
    if config.tensor_parallel_size == 1:
        return
    if config.torch_device.type != "cpu":
        raise _error(config.tensor_parallel_size, "divides a model on a CPU only; use <<device=>>'cpu', or an engine per GPU")
    if config.uses_async_scheduling:
        raise _error(config.tensor_parallel_size, "needs <<async_scheduling=>>None or False")
    for name, value in _WHOLE.items():
        if getattr(config, name) != value:
            raise _error(config.tensor_parallel_size, f"cannot be combined with <<{name}>>; leave one of them out")
    if read_speculative_config(config.speculative_config).predicted:
        reason = "cannot be combined with drafts of a model; use the method 'suffix' or 'ngram' in <<speculative_config>>"
        raise _error(config.tensor_parallel_size, reason)


def check_ranks(model: Model, ranks: Ranks, architecture: str) -> None:
    """Raise ConfigError if a model has weights that cannot be divided, or no layer that could be."""
    if getattr(model, "formats", None) is not None:
        reason = "the checkpoint is quantised; give one that is not, with quantization='int8' or 'int4' if it shall be smaller"
        raise _error(ranks.size, f"cannot be honoured: {reason}")
    if model.adapters:
        raise _error(ranks.size, f"cannot be honoured: {architecture} has adapters of its own")
    if not any(getattr(module, "ranks", None) is not None for module in cast(nn.Module, model).modules()):
        raise _error(ranks.size, f"cannot be honoured: it divides neither the heads nor the MLPs of {architecture}")


def _error(size: int, reason: str) -> ConfigError:
    return ConfigError(f"<<param=>>{size} {reason}", param=_PARAM, value=str(size))
