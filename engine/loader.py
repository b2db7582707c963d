"""From a checkpoint's folder to an engine: joins the registry's names with model, processor and memory. Knows no family."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch

from ..mm.errors import ConfigError
from ..mm.hashing import digest
from ..mm.registry import Architecture
from ..models.interface import Model
from ..models.weights import load as load_weights
from ..processors.interface import ProcessingInfo
from ..processors.text import Tokenizer
from .config import EngineConfig, ModelFiles, cache_budget, check_max_model_len, num_cache_blocks, resolve
from .core import EngineCore
from .encoder_cache import EncoderCache
from .encoder_store import EncoderStore
from .kv import KVBlocks, bytes_per_block, group_layers
from .memory import encoder_cache_budget, most_keys
from .paths import check, choose, rehearse
from .quarantine import Quarantine
from .runner import ModelRunner
from .scheduler import Scheduler, SchedulerLimits
from .structured import GrammarFactory

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engine:
    """A loaded model behind its verbs, and what its inputs have to obey."""

    core: EngineCore
    max_model_len: int
    dtype: torch.dtype
    row_bytes: int  # of one encoder row


def load_processing(
    row: Architecture, files: ModelFiles, options: Mapping[str, Any], tokenizer: Tokenizer | None = None
) -> ProcessingInfo:
    """`tokenizer`: for families whose items are written with text of their own; None: the checkpoint's, once it is needed."""
    words = cache(lambda: Tokenizer(files.path) if tokenizer is None else tokenizer)
    given = replace(
        files.processors, encode=lambda text: words().encode_plain(text), special=lambda text: words().token_to_id(text)
    )
    return cast(ProcessingInfo, resolve(row.processing)(given, options))


def load_engine(config: EngineConfig, files: ModelFiles, info: ProcessingInfo, tokenizer: Tokenizer) -> Engine:
    """Build the model, load its weights, plan and allocate the caches.

    Raises:
        ConfigError: an unknown architecture, options that contradict the model, a cache that cannot hold one sequence.
        CheckpointError: missing, surplus or misshapen weights.
    """
    row, device = choose(files), config.torch_device
    dtype = files.dtype(config.dtype)
    check(row, config)
    if config.batch_invariant and (device.type != "cpu" or dtype == torch.float16):
        raise ConfigError("batch_invariant=True is for float32 and bfloat16 on a CPU; pass device='cpu' and such a dtype")
    model = cast(Model, resolve(row.model)(files.config, dtype, device))
    max_model_len = resolve_max_model_len(config, model, device)
    fingerprint = digest("sensorium.encoder", files.fingerprint, config.quantization)
    folder, most = config.encoder_cache_dir, config.encoder_cache_dir_bytes
    store = EncoderStore(folder, most, fingerprint, model.row_size, dtype, device)
    encoder_bytes = encoder_cache_budget(config, info, store.row_bytes, max_model_len)
    # a plan that does not work out is said before weights are read
    keys = most_keys(config, info, max_model_len)
    core = build_core(model, config, max_model_len, keys, info.prefill, encoder_bytes, store, GrammarFactory(tokenizer))
    load_weights(files.path, model, config.quantization)
    rehearse(model, info, dtype)
    return Engine(core, max_model_len, dtype, store.row_bytes)


def resolve_max_model_len(config: EngineConfig, model: Model, device: torch.device) -> int:
    """What is asked for; when nothing is, all positions of the model that one sequence's cache has room for."""
    most = check_max_model_len(config.max_model_len, model.max_positions)
    if config.max_model_len is not None:
        return most
    room = cache_budget(config, device) // bytes_per_block(model.cache_specs, config.block_size) * config.block_size
    if room < most:
        _log.warning("max_model_len is %d, what the key/value cache holds; the model has %d positions", room, most)
    return min(most, room)


def build_core(
    model: Model,
    config: EngineConfig,
    max_model_len: int,
    keys: int,
    prefill: str,
    encoder_bytes: int,
    store: EncoderStore,
    grammars: GrammarFactory | None = None,
) -> EngineCore:
    """Scheduler, caches and runner around a model that is ready to run.

    Args:
        keys: of one sequence at most, see `most_keys`.
        prefill: how its prompts may be cut, see `SchedulerLimits`.
        encoder_bytes: of resident encoder rows.
        grammars: for structured outputs; None refuses them.
    """
    if max_model_len < 2:
        raise ConfigError(f"max_model_len={max_model_len} leaves no room for a prompt and an answer")
    block_bytes = bytes_per_block(model.cache_specs, config.block_size)
    blocks = num_cache_blocks(config, block_bytes, keys, config.torch_device)
    kept = None if config.prefix_cache_bytes is None else config.prefix_cache_bytes // block_bytes
    groups = group_layers(model.cache_specs)
    atom = 1 if prefill == "causal" else max_model_len
    limits = SchedulerLimits(
        config.max_num_seqs,
        max(config.max_num_batched_tokens, atom + config.max_num_seqs - 1),  # an atom beside a row of every other sequence
        max_model_len,
        config.max_encoder_tokens,
        prefill,
        config.enable_prefix_caching,
    )
    kv = KVBlocks(len(groups), blocks, config.block_size, kept)
    scheduler = Scheduler(kv, EncoderCache(encoder_bytes, store.row_bytes), limits, [group.spec.kind for group in groups])
    runner = ModelRunner(model, blocks, config.block_size, config.torch_device, store, grammars, config.batch_invariant)
    return EngineCore(scheduler, runner, Quarantine(config.quarantine_seconds))
