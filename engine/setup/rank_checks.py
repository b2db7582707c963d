"""Says which options and models cannot be divided among ranks (`tensor_parallel_size`, `pipeline_parallel_size`)."""

from __future__ import annotations

from typing import cast

from torch import nn

from ...callers.errors import ConfigError
from ...models.interface import Model
from ...models.layers.moe import Mixture
from ...models.layers.ranks import Ranks
from ...models.text.decoder import Decoder, modules_of_all_ranks
from ..config import EngineConfig
from ..speculative_config import read_speculative_config
from ..transfer_config import check_ports

_ALLOWED = {
    "parts": "all",
    "load_talker": False,
    "load_mtp": False,
}
"""Options that several ranks support with one value only, and this value."""


def check_rank_options(config: EngineConfig) -> None:
    """Raise ConfigError for an option that several ranks cannot honour."""
    if config.num_ranks == 1:
        return
    layers = config.pipeline_parallel_size > 1
    size = config.pipeline_parallel_size if layers else config.tensor_parallel_size
    if config.torch_device.type != "cpu":
        raise _error(size, layers, "divides a model on a CPU only; use <<device=>>'cpu', or an engine per GPU")
    if config.uses_async_scheduling:
        raise _error(size, layers, "needs <<async_scheduling=>>None or False")
    for name, value in _ALLOWED.items():
        if getattr(config, name) != value:
            raise _error(size, layers, f"cannot be combined with <<{name}>>; leave one of them out")
    if read_speculative_config(config.speculative_config).predicted:
        reason = "cannot be combined with drafts of a model; use the method 'suffix' or 'ngram' in <<speculative_config>>"
        raise _error(size, layers, reason)
    check_ports(config.kv_transfer, config.num_ranks)


def check_ranks(model: Model, ranks: Ranks, architecture: str) -> None:
    """Raise ConfigError if a model has weights that cannot be divided, or no layer that could be."""
    reason = None
    if model.adapters:
        reason = f"{architecture} has adapters of its own"
    elif ranks.layers:
        reason = _undivided_layers(getattr(model, "language_model", None), ranks, architecture)
    else:
        divided = [module for _, module in modules_of_all_ranks(cast(nn.Module, model)) if _divides_outputs(module)]
        if ranks.experts and not any(isinstance(module, Mixture) for module in divided):
            unfit = f"{architecture} has no layer with an expert for each of {ranks.size} processes"
            raise ConfigError(f"<<param=>>True cannot be honoured: {unfit}; leave it out", param="enable_expert_parallel")
        reason = None if divided else f"it divides neither the heads nor the MLPs of {architecture}"
        heads = _most_heads(getattr(model, "language_model", None))
        if divided and 0 < heads < ranks.size:
            reason = f"{architecture} has {heads} attention heads here; give at most as many, and a divisor of {heads}"
    if reason is not None:
        raise _error(ranks.size, ranks.layers, f"cannot be honoured: {reason}")


def _most_heads(decoder: object) -> int:
    """Return the largest number of attention heads in a layer; 0 for a decoder without attention."""
    layers = decoder.spec.layers if isinstance(decoder, Decoder) else ()
    return max((getattr(layer.mixer, "heads", 0) for layer in layers), default=0)


def _divides_outputs(module: nn.Module) -> bool:
    ranks = getattr(module, "ranks", None)
    return isinstance(ranks, Ranks) and not ranks.layers


def _undivided_layers(decoder: object, ranks: Ranks, architecture: str) -> str | None:
    """Return why ranks cannot divide the layers of a decoder, or None."""
    if not isinstance(decoder, Decoder) or type(decoder).forward is not Decoder.forward:
        return f"the layers of {architecture} cannot be divided"
    layers = decoder.spec.layers
    if len(layers) < ranks.size:
        return f"{architecture} has {len(layers)} layers here"
    parts = [ranks.range_of(rank, len(layers)) for rank in range(ranks.size)]
    sources = ((number, getattr(layer.mixer, "source", None)) for number, layer in enumerate(layers))
    if any(source is not None and not any(number in part and source in part for part in parts) for number, source in sources):
        return f"layers of {architecture} read the KV cache of layers that another process would hold"
    indexers = (getattr(layers[part[0]].mixer, "indexer", None) for part in parts)
    if any(indexer is not None and indexer.shared for indexer in indexers):
        return f"layers of {architecture} attend to keys that a layer of another process would select"
    return None


def _error(size: int, layers: bool, reason: str) -> ConfigError:
    param = "pipeline_parallel_size" if layers else "tensor_parallel_size"
    return ConfigError(f"<<param=>>{size} {reason}", param=param, value=str(size))
