"""From a checkpoint's folder to an engine: joins the registry's names with model, processor and memory. Knows no family."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, cast

import torch

from ..mm.errors import ConfigError
from ..mm.registry import Architecture, find
from ..models.interface import Model
from ..models.weights import load as load_weights
from ..processors.interface import ProcessingInfo
from ..processors.text import Tokenizer
from .config import EngineConfig, ModelFiles, cache_budget, check_max_model_len, num_cache_blocks
from .core import EngineCore
from .kv import KVBlocks, bytes_per_block, group_layers
from .runner import ModelRunner
from .scheduler import Scheduler

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engine:
    """A loaded model behind its verbs, and what its inputs have to obey."""

    core: EngineCore
    max_model_len: int
    dtype: torch.dtype
    row_bytes: int  # of one encoder row


def resolve(name: str) -> Any:
    """`"module:Class"` below the package."""
    module, _, attribute = name.partition(":")
    package = __name__.rsplit(".", 2)[0]
    return getattr(import_module(f".{module}", package), attribute)


def load_processing(
    row: Architecture, files: ModelFiles, options: Mapping[str, Any], tokenizer: Tokenizer | None = None
) -> ProcessingInfo:
    """`tokenizer`: for families whose items are written with text of their own."""
    given = files.processors if tokenizer is None else replace(files.processors, encode=tokenizer.encode_plain)
    return cast(ProcessingInfo, resolve(row.processing)(given, options))


def load_engine(config: EngineConfig, files: ModelFiles) -> Engine:
    """Build the model, load its weights, plan and allocate the cache.

    Raises:
        ConfigError: an unknown architecture, options that contradict the model, a cache that cannot hold one sequence.
        CheckpointError: missing, surplus or misshapen weights.
    """
    row, device = find(files.architecture), config.torch_device
    dtype = files.dtype(config.dtype)
    model = cast(Model, resolve(row.model)(files.config, dtype, device))
    max_model_len = resolve_max_model_len(config, model, device)
    core = build_core(model, config, max_model_len)  # a plan that does not work out is said before weights are read
    load_weights(files.path, model)
    return Engine(core, max_model_len, dtype, model.hidden_size * dtype.itemsize)


def resolve_max_model_len(config: EngineConfig, model: Model, device: torch.device) -> int:
    """What is asked for; when nothing is, all positions of the model that one sequence's cache has room for."""
    most = check_max_model_len(config.max_model_len, model.max_positions)
    if config.max_model_len is not None:
        return most
    room = cache_budget(config, device) // bytes_per_block(model.cache_specs, config.block_size) * config.block_size
    if room < most:
        _log.warning("max_model_len is %d, what the key/value cache holds; the model has %d positions", room, most)
    return min(most, room)


def build_core(model: Model, config: EngineConfig, max_model_len: int) -> EngineCore:
    """Scheduler, cache and runner around a model that is ready to run."""
    device = config.torch_device
    if max_model_len < 2:
        raise ConfigError(f"max_model_len={max_model_len} leaves no room for a prompt and an answer")
    blocks = num_cache_blocks(config, bytes_per_block(model.cache_specs, config.block_size), max_model_len, device)
    kv = KVBlocks(len(group_layers(model.cache_specs)), blocks, config.block_size)
    scheduler = Scheduler(kv, config.max_num_seqs, config.max_num_batched_tokens, max_model_len)
    return EngineCore(scheduler, ModelRunner(model, blocks, config.block_size, device))
