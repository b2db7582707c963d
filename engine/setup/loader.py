"""Loads an engine: builds the model, allocates caches, reads weights, and joins scheduler and worker in a core."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...callers.errors import ConfigError, short_repr
from ...kernels.dispatch import use_backends
from ...mm.hashing import digest
from ...models.interface import Model, SupportsRowDecoding, SupportsSimilarity
from ...models.layers.ranks import Ranks, all_ranks
from ...processors.interface import ProcessingInfo
from ...processors.text.tokenizer import Tokenizer
from ..config import EngineConfig
from ..core.client import CoreClient
from ..core.engine_core import EngineCore
from ..executor import LocalExecutor
from ..kv_cache.block_pool import BlockPools
from ..kv_cache.groups import group_layers
from ..model_files import ModelFiles
from ..scheduler.encoder_cache import EncoderCache
from ..scheduler.limits import SchedulerLimits
from ..scheduler.policy import make_policy
from ..scheduler.quarantine import Quarantine
from ..scheduler.scheduler import Scheduler
from ..threads import computing_on, run_in_thread
from ..worker.encoder_store import EncoderStore
from ..worker.grammar import GrammarFactory
from ..worker.model_runner import ModelRunner, RunnerOptions
from .connectors import open_kv_store, open_media_connectors
from .draft_model import check_vocabulary, find_draft
from .drafts import make_drafter, make_predictor
from .memory import MaxSizes, adapter_bytes, max_cached_blocks, num_cache_blocks
from .model_source import ModelSource, computing_dtype
from .resolve import describe_dtype, resolve_engine
from .warm_up import encode_small_items

if TYPE_CHECKING:
    from ..core.encoder_core import EncoderCore
    from ..worker.adapter_store import AdapterStore

SAVE_SECONDS = 2.0  # how long a step of a producer waits for the connectors
_log = logging.getLogger(__name__)


def load_core(
    config: EngineConfig, files: ModelFiles, info: ProcessingInfo, tokenizer: Tokenizer
) -> tuple[CoreClient, EngineConfig]:
    """Load the model in this process or, with `engine_process`, in a child process. Return the core and the resolved options.

    Raises:
        ConfigError, CheckpointError: see `load_engine`.
        EngineDeadError: the other process ended while it was loading.
    """
    if config.engine_process:
        from ..core.process import ProcessCore

        core = ProcessCore(config)
        return core, core.config
    return run_in_thread(partial(load_engine, config, files, info, tokenizer))


def load_engine(
    config: EngineConfig, files: ModelFiles, info: ProcessingInfo, tokenizer: Tokenizer, ranks: Sequence[Ranks] = ()
) -> tuple[EngineCore | EncoderCore, EngineConfig]:
    """Build the model, plan and allocate the caches, and load the weights. Return the core and the resolved options.

    Args:
        ranks: the groups of processes that share the model, if this is one of them.

    Raises:
        ConfigError: as `resolve_engine`, and a kernel that cannot run here.
        CheckpointError: missing, surplus or misshapen weights.
    """
    dtype, device = computing_dtype(config, files), config.torch_device
    with use_backends(config.kernels), computing_on(device), ExitStack() as opened:
        if files.dtype(config.dtype) != dtype:
            _log.info("%s", describe_dtype(files, dtype))
        engine = resolve_engine(config, files, info, on_device=True, ranks=ranks)
        config, model = engine.config, engine.model
        draft = find_draft(config, model)
        if draft is not None:
            check_vocabulary(draft, tokenizer)
        kept = config.ec_transfer
        _make_folder("encoder_cache_dir" if config.ec_transfer_config is None else "ec_transfer_config", kept.folder or None)
        _make_folder("packed_cache_dir", config.packed_cache_dir)
        _make_folder("kv_transfer_config", config.kv_transfer.folder or None)
        is_shared = (kept and kept.rows) or config.kv_transfer.is_shared
        content = files.content_digest() if is_shared else ""  # what is on disk may outlive this checkpoint
        fingerprint = digest("sensorium.encoder", content, config.quantization, config.media_device)
        store = EncoderStore(open_media_connectors(kept) if kept.rows else (), fingerprint, model.row_size, dtype, device)
        opened.callback(store.close)
        # the caches are allocated before weights are read, so that a plan that does not fit fails at once
        core: EngineCore | EncoderCore
        if config.parts == "encoder":
            from ..core.encoder_core import EncoderCore

            core = EncoderCore(model, config, engine.sizes.max_model_len, store, engine.source.modalities)
        else:
            grammars = GrammarFactory(
                tokenizer, config.grammar_seconds, config.quarantine_seconds, config.media.worker_sandbox == "require"
            )
            encoder_ranks = all_ranks(ranks) if config.mm_encoder_tp_mode == "data" else None
            kv_store = open_kv_store(config, content, model.cache_specs, dtype, ranks)
            if kv_store is not None:
                opened.callback(kv_store.close)  # if the model cannot be loaded, else a peer server would go on
            attention = info.prompt_attention
            options = RunnerOptions(grammars, prompt_attention=attention, encoder_ranks=encoder_ranks, kv_store=kv_store)
            core = build_core(model, config, engine.sizes, store, options, engine.source)
        engine.source.load_weights(model)
        if isinstance(core, EngineCore):
            _load_predictor(core)
        if isinstance(model, SupportsSimilarity):
            scale, bias = model.similarity()
            core.info = replace(core.info, logit_scale=scale, logit_bias=bias)
        if config.warm_up:
            encode_small_items(model, info, [name for name in info.modalities if config.encodes(name)], dtype, device)
        opened.pop_all()
        return core, config


def load_ranks(
    config: EngineConfig, files: ModelFiles, info: ProcessingInfo, tokenizer: Tokenizer
) -> tuple[EngineCore | EncoderCore, EngineConfig]:
    """Load a model in this process, or its parts in this process and in others. Arguments and errors: see `load_engine`."""
    if config.num_ranks == 1:
        return load_engine(config, files, info, tokenizer)
    from ..core.rank_executor import Peers, RankExecutor

    resolve_engine(config, files, info, on_device=False)  # errors that need no other process
    peers = Peers(config)
    try:
        core, config = load_engine(config, files, info, tokenizer, peers.ranks)
        peers.check_loaded()
    except BaseException as error:
        peers.abandon(error)
        raise
    assert isinstance(core, EngineCore)
    assert isinstance(core.executor, LocalExecutor)
    core.executor = RankExecutor(core.executor, peers)
    return core, config


def _load_predictor(core: EngineCore) -> None:
    """Read the weights of a model that drafts."""
    assert isinstance(core.executor, LocalExecutor)
    runner = core.executor.runner
    if runner.predictor is not None:
        runner.predictor.load(runner.model)


def _make_folder(option: str, path: str | None) -> None:
    """Create the folder of an option. A disk that fails later is no error."""
    try:
        if path is not None:
            Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a name that the file system cannot encode
        reason = f"<<param=>>{short_repr(path)} cannot be created ({getattr(error, 'strerror', None) or error})"
        raise ConfigError(f"{reason}; give a folder that can be written, or leave <<param>> out", param=option) from None


def _adapter_store(config: EngineConfig, model: Model) -> AdapterStore:
    from ..worker.adapter_store import AdapterStore

    return AdapterStore(adapter_bytes(config, model), config.max_lora_rank)


def build_core(
    model: Model,
    config: EngineConfig,
    sizes: MaxSizes,
    store: EncoderStore,
    options: RunnerOptions,
    source: ModelSource | None = None,
) -> EngineCore:
    """Join scheduler, caches and executor around a model on its device.

    Args:
        options: its `grammars`, `prompt_attention`, `encoder_ranks` and `kv_store`; the others follow from `config`.
        source: builds the model again after sleep; with None, the engine cannot sleep.
    """
    if options.prompt_attention.key_order is not None and any(spec.window is not None for spec in model.cache_specs):
        raise ConfigError("sliding windows are not supported for a model whose items see each other across text")
    blocks = num_cache_blocks(config, model.cache_specs, sizes, config.torch_device)
    max_cached = max_cached_blocks(config, model.cache_specs, blocks)
    groups = group_layers(model.cache_specs)
    limits = SchedulerLimits(
        config.max_num_seqs,
        sizes.step_rows,
        sizes.max_model_len,
        config.max_encoder_tokens,
        options.prompt_attention,
        config.enable_prefix_caching,
        encode_beside=config.uses_async_scheduling,
        max_chunk=model.step_rows if isinstance(model, SupportsRowDecoding) else SchedulerLimits.max_chunk,
        max_cross_rows=sizes.cross_rows,
        max_step_cross_rows=sizes.step_cross_rows,
    )
    encoder = EncoderCache(sizes.encoder_cache_bytes, store.row_bytes)
    specs, block_bytes = zip(*((group.spec, group.block_bytes(config.block_size)) for group in groups), strict=True)
    pools = BlockPools(specs, blocks, config.block_size, max_cached, block_bytes)
    drafter, no_drafts = make_drafter(config, model, store.dtype)
    policy = make_policy(config.scheduling_policy)
    scheduler = Scheduler(pools, encoder, limits, Quarantine(config.quarantine_seconds), policy, drafter)
    scheduler.drafts.reason = no_drafts
    options = replace(
        options,
        invariant=config.batch_invariant,
        kernels=config.kernels,
        async_scheduling=config.uses_async_scheduling,
        predictor=None if drafter is None else make_predictor(config, model, sizes, store, source),
        adapters=_adapter_store(config, model) if config.enable_lora else None,
    )
    transfer = config.kv_transfer
    if options.kv_store is not None:
        scheduler.use_connectors(transfer.saves, transfer.loads)
    runner = ModelRunner(model, blocks, config.block_size, config.torch_device, store, options)
    if runner.kv_blocks is not None and not transfer.loads:
        runner.kv_blocks.save_seconds = SAVE_SECONDS
    executor = LocalExecutor(runner, source)
    info = executor.describe(limits.max_model_len, limits.max_num_seqs)
    return EngineCore(scheduler, executor, replace(info, scheduling_policy=config.scheduling_policy))
