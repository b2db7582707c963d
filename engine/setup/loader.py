"""From a checkpoint's folder to an engine: joins the registry's names with model, processor and memory. Knows no family."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch

from ..kernels.dispatch import BACKENDS, MEDIA_OPS, can_run, has_triton, overrides, using
from ..mm.errors import ConfigError
from ..mm.hashing import digest
from ..mm.registry import Architecture
from ..models.interface import Model
from ..processors.interface import ProcessingInfo
from ..processors.text import Tokenizer
from .admission import SchedulerLimits
from .config import EngineConfig, ModelFiles, check_max_model_len, resolve
from .core import EngineCore
from .encoder_cache import EncoderCache
from .encoder_store import EncoderStore
from .kv import KVBlocks, PoolSpec, bytes_per_block, group_layers
from .memory import Sizes, cache_blocks, encoder_cache_budget, longest_sequence, plan_sizes, settle
from .paths import check, choose
from .quarantine import Quarantine
from .runner import ModelRunner
from .scheduler import Scheduler
from .source import Source, made
from .structured import GrammarFactory
from .threads import computing_on

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engine:
    """A loaded model behind its verbs, and what its inputs have to obey."""

    core: EngineCore
    config: EngineConfig  # as settled for the device
    max_model_len: int
    dtype: torch.dtype
    row_bytes: int  # of one encoder row


def load_processing(
    row: Architecture, files: ModelFiles, options: Mapping[str, Any], tokenizer: Tokenizer | None = None
) -> ProcessingInfo:
    """`tokenizer`: for families whose items are written with text of their own; None: the checkpoint's, once it is needed.

    ConfigError: options, or a checkpoint's JSON, of which no inputs can be made.
    """
    words = cache(lambda: Tokenizer(files.path) if tokenizer is None else tokenizer)
    given = replace(
        files.processors,
        encode=lambda text: words().encode_plain(text),
        decode=lambda ids: words().decode(ids),
        special=lambda text: words().token_to_id(text),
    )
    return cast(ProcessingInfo, made("inputs", resolve(row.processing), given, options))


def load_engine(config: EngineConfig, files: ModelFiles, info: ProcessingInfo, tokenizer: Tokenizer) -> Engine:
    """Build the model, load its weights, plan and allocate the caches.

    Raises:
        ConfigError: an unknown architecture, options that contradict the model, a cache that cannot hold one sequence, a
            kernel that cannot run here.
        CheckpointError: missing, surplus or misshapen weights.
    """
    with using(config.kernels), computing_on(config.torch_device):
        return _load(config, files, info, tokenizer)


def _load(config: EngineConfig, files: ModelFiles, info: ProcessingInfo, tokenizer: Tokenizer) -> Engine:
    row, device = choose(files), config.torch_device
    dtype = files.dtype(config.dtype)
    slow = slow_dtype(config, dtype)
    if slow:
        _log.warning(slow)
    check(row, config)
    check_kernels(config, dtype)
    if config.batch_invariant and (device.type != "cpu" or dtype == torch.float16):
        raise ConfigError("batch_invariant=True is for float32 and bfloat16 on a CPU; pass device='cpu' and such a dtype")
    source = Source(config, files, row, info)
    config = settle(config, source.planned, info)
    model = source.on_device()
    max_model_len = resolve_max_model_len(config, model, device)
    fingerprint = digest("sensorium.encoder", files.fingerprint, config.quantization, config.media_device)
    folder, most = config.encoder_cache_dir, config.encoder_cache_dir_bytes
    store = EncoderStore(folder, most, fingerprint, model.row_size, dtype, device)
    encoder_bytes = encoder_cache_budget(config, info, store.row_bytes, max_model_len)
    # a plan that does not work out is said before weights are read
    sizes = plan_sizes(config, info, max_model_len)
    core = build_core(model, config, sizes, info.prefill, encoder_bytes, store, GrammarFactory(tokenizer), source)
    source.fill(model)
    return Engine(core, config, max_model_len, dtype, store.row_bytes)


def slow_dtype(config: EngineConfig, dtype: torch.dtype) -> str:
    """What to say where a checkpoint's own dtype is a bad choice for the device, else nothing."""
    if config.dtype != "auto" or dtype != torch.float16 or config.torch_device.type != "cpu":
        return ""
    return "the checkpoint is float16, several times slower on a CPU than others: pass dtype=float32 or dtype=bfloat16"


def check_kernels(config: EngineConfig, dtype: torch.dtype) -> None:
    """ConfigError for a backend that was asked for and cannot run here, and for a broken file of launch configurations."""
    media = config.torch_media_device
    for op, name in overrides(config.kernels).items():
        device = media if op in MEDIA_OPS and config.media_device != "cpu" else config.torch_device
        if not can_run(op, name, device, dtype):
            can = [other for other in BACKENDS[op] if can_run(op, other, device, dtype)]
            kind = str(dtype).removeprefix("torch.")
            raise ConfigError(f"kernels: {op}={name} cannot run {kind} on {device} here; {', '.join(can)} can")
    if "cuda" in (config.torch_device.type, media.type) and has_triton():
        from ..kernels.gpu import tune

        try:
            tune.own()
        except ValueError as error:
            raise ConfigError(str(error)) from None


def resolve_max_model_len(config: EngineConfig, model: Model, device: torch.device) -> int:
    """What is asked for; when nothing is, all positions of the model that one sequence's cache has room for."""
    most = check_max_model_len(config.max_model_len, model.max_positions)
    if config.max_model_len is not None:
        return most
    room = longest_sequence(config, model.cache_specs, device)
    if room < most:
        _log.warning("max_model_len is %d, what the key/value cache holds; the model has %d positions", room, most)
    return min(most, room)


def build_core(
    model: Model,
    config: EngineConfig,
    sizes: Sizes,
    prefill: str,
    encoder_bytes: int,
    store: EncoderStore,
    grammars: GrammarFactory | None = None,
    source: Source | None = None,
) -> EngineCore:
    """Scheduler, caches and runner around a model that is ready to run.

    Args:
        prefill: how its prompts may be cut, see `SchedulerLimits`.
        encoder_bytes: of resident encoder rows.
        grammars: for structured outputs; None refuses them.
        source: of the model, for an engine that may sleep.
    """
    if sizes.length < 2:
        raise ConfigError(f"max_model_len={sizes.length} leaves no room for a prompt and an answer")
    blocks = cache_blocks(config, model.cache_specs, sizes, config.torch_device)
    block_bytes = bytes_per_block(model.cache_specs, config.block_size)
    kept = None if config.prefix_cache_bytes is None else config.prefix_cache_bytes // block_bytes
    specs = [group.spec for group in group_layers(model.cache_specs)]
    pools = [PoolSpec(count, spec.kind, spec.window) for count, spec in zip(blocks, specs, strict=True)]
    limits = SchedulerLimits(
        config.max_num_seqs,
        sizes.rows,
        sizes.length,
        config.max_encoder_tokens,
        prefill,
        config.enable_prefix_caching,
        encode_beside=config.overlaps,
    )
    encoder = EncoderCache(encoder_bytes, store.row_bytes)
    scheduler = Scheduler(KVBlocks(pools, config.block_size, kept), encoder, limits)
    invariant, device = config.batch_invariant, config.torch_device
    runner = ModelRunner(
        model,
        blocks,
        config.block_size,
        device,
        store,
        grammars,
        invariant=invariant,
        prefill=prefill,
        kernels=config.kernels,
        overlaps=config.overlaps,
    )
    return EngineCore(scheduler, runner, Quarantine(config.quarantine_seconds), source)
