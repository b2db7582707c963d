"""Resolves an engine's options for a checkpoint and a device. Both the loader and the doctor use it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import torch

from ...callers.errors import ConfigError, short_repr
from ...checkpoints.gguf.reader import SUFFIX
from ...kernels.backends import BACKENDS, MEDIA_OPS, has_triton
from ...kernels.dispatch import can_run, parse_overrides
from ...kernels.linear import keeps_float16
from ...models.interface import Model
from ...models.layers.ranks import Ranks, rank_groups
from ...processors.interface import ProcessingInfo
from ...processors.text.tokenizer import Tokenizer
from ..config import PUBLISHED_FORMATS, EngineConfig, check_max_model_len
from ..model_files import ModelFiles, WholeConfig, resolve
from .implementation import check_options, describe_implementation, explain_fallback, is_fallback, resolve_architecture
from .memory import (
    MaxSizes,
    check_adapter_memory,
    check_cache_memory,
    max_cross_rows,
    max_len_in_cache,
    max_sizes,
    resolve_cache_memory,
    row_bytes,
)
from .model_source import ModelSource, build_from_json, computing_dtype
from .rank_checks import check_rank_options
from .talker import build_talker, talker_bytes

_log = logging.getLogger(__name__)
_MODALITIES = ("image", "video", "audio", "vision_chunk")


@dataclass(frozen=True)
class ResolvedEngine:
    """The resolved options, model and sizes of an engine, before memory is allocated and weights are read.

    Args:
        config: with the bytes of the KV cache, where the GPU's free memory decides them.
        model: on the device or, for a plan, on the meta device.
    """

    config: EngineConfig
    source: ModelSource
    model: Model
    sizes: MaxSizes


def load_processing(files: ModelFiles, options: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> ProcessingInfo:
    """Build the processing of a checkpoint.

    Args:
        tokenizer: for families that write text of their own around items. None loads the checkpoint's when it is needed.

    Raises:
        ConfigError: the options, or the checkpoint's JSON, describe no processing.
    """
    get_tokenizer = cache(lambda: Tokenizer(files.tokenizer_folder) if tokenizer is None else tokenizer)
    processor_files = replace(
        files.processors,
        encode=lambda text: get_tokenizer().encode_ordinary(text),
        encode_trusted=lambda text: get_tokenizer().encode(text, add_special_tokens=False),
        decode=lambda ids: get_tokenizer().decode(ids),
        token_to_id=lambda text: get_tokenizer().token_to_id(text),
    )
    row = resolve_architecture(files)
    with explain_fallback(row, files):
        return cast(ProcessingInfo, build_from_json("processor", resolve(row.processing), processor_files, options))


def check_pruning(config: EngineConfig, info: ProcessingInfo) -> None:
    """Raise ConfigError for a `video_pruning_rate` that the caller gives to a model that does not read it."""
    overrides = config.hf_overrides
    rate = None if isinstance(overrides, WholeConfig) else overrides.get("video_pruning_rate")  # a whole config is the model's
    if rate and not info.prunes_videos:
        reason = f"<<param=>>{short_repr(rate)} cannot be honoured: this model keeps all rows of a video; leave it out"
        raise ConfigError(reason, param="video_pruning_rate")


def resolve_engine(
    config: EngineConfig, files: ModelFiles, info: ProcessingInfo, on_device: bool, ranks: Sequence[Ranks] = ()
) -> ResolvedEngine:
    """Check the options and size the engine. Runs inside `use_backends(config.kernels)`.

    Args:
        on_device: build the model on its device, for weights to be loaded; else on the meta device.
        ranks: the groups of this process. () if there is one process, or to plan for rank 0 of several.

    Raises:
        ConfigError: an unknown architecture, options that contradict the model or the device, or a cache that cannot hold one
            sequence.
    """
    dtype, row = computing_dtype(config, files), resolve_architecture(files)
    if is_fallback(row):
        _log.warning("%s", describe_implementation(row, files))
    check_options(row, config)
    check_rank_options(config)
    if isinstance(config.quantization, str) and config.quantization in PUBLISHED_FORMATS:
        if files.quantization_config is None and files.path.suffix != SUFFIX:
            how = "leave it out, give a quantised one, or quantise while loading with 'int4', 'int8' or 'fp8'"
            raise ConfigError(
                f"<<param=>>{config.quantization!r}, but the checkpoint is not quantised; {how}", param="quantization"
            )
        config = replace(config, quantization=None)
    check_modalities(config, info)
    check_pruning(config, info)
    check_kernels(config, dtype)
    check_cache_memory(config)
    if config.batch_invariant and (config.torch_device.type != "cpu" or dtype == torch.float16):
        raise ConfigError(
            "<<param=>>True needs a CPU and float32 or bfloat16; pass <<device=>>'cpu' and <<dtype=>>'float32' or 'bfloat16'",
            param="batch_invariant",
        )
    if config.load_talker:
        build_talker(config, files, torch.device("meta"))
    ranks = ranks or rank_groups(0, config.tensor_parallel_size, config.pipeline_parallel_size, config.enable_expert_parallel)
    source = ModelSource(config, files, info, ranks)
    plan_model = cache(source.build_for_plan)
    if config.enable_lora:
        check_adapter_memory(config, plan_model())
    if config.parts != "encoder":
        config = resolve_cache_memory(config, plan_model, info, partial(talker_bytes, config, files))
    model = source.build_on_device() if on_device else plan_model()
    sizes = max_sizes(config, info, row_bytes(model), resolve_max_model_len(config, model, info))
    return ResolvedEngine(config, source, model, sizes)


def check_modalities(config: EngineConfig, info: ProcessingInfo) -> None:
    """Raise ConfigError for a limit on items that the model does not take; 0 is the limit of every known modality."""
    for modality, limit in config.limit_mm_per_prompt.items():
        if modality not in info.modalities and (limit or modality not in _MODALITIES):
            modalities = ", ".join(info.modalities) or "text only"
            raise ConfigError(f"<<param>> names {modality!r}; this model takes {modalities}", param="limit_mm_per_prompt")


def check_kernels(config: EngineConfig, dtype: torch.dtype) -> None:
    """Raise ConfigError for a requested backend that cannot run here, or an invalid file of launch configurations."""
    media = config.torch_media_device
    for op, name in parse_overrides(config.kernels).items():
        device = media if op in MEDIA_OPS and config.media_device != "cpu" else config.torch_device
        if not can_run(op, name, device, dtype):
            can = [other for other in BACKENDS[op] if can_run(op, other, device, dtype)]
            kind = str(dtype).removeprefix("torch.")
            raise ConfigError(f"kernels: {op}={name} cannot run {kind} on {device} here; {', '.join(can)} can", param="kernels")
    if "cuda" in (config.torch_device.type, media.type) and has_triton():
        from ...kernels.gpu import launch_config

        try:
            launch_config.user_configs()
        except ValueError as error:
            raise ConfigError(str(error)) from None


def describe_dtype(files: ModelFiles, dtype: torch.dtype) -> str:
    """Return why `dtype="auto"` is not the checkpoint's dtype on this CPU."""
    stored = str(files.dtype("auto")).removeprefix("torch.")
    if dtype == torch.bfloat16:
        return f"the checkpoint is {stored}, in which this CPU is slow; in int8 it runs in bfloat16"
    kept = stored == "float16" and keeps_float16(torch.device("cpu"), torch.float32) and files.adapter is None
    memory = "weights stay in float16" if kept else "with twice the memory for weights"
    return f"the checkpoint is {stored}, in which this CPU is slow; it runs in float32, {memory}"


def resolve_max_model_len(config: EngineConfig, model: Model, info: ProcessingInfo) -> int:
    """Return `max_model_len`. If it is None, return the model's positions, or fewer if the KV cache cannot hold as many."""
    longest = check_max_model_len(config.max_model_len, model.max_positions)
    if config.max_model_len is not None or config.parts == "encoder":
        return longest
    cross_rows = max_cross_rows(config, info, longest)
    room = max_len_in_cache(config, model.cache_specs, config.torch_device, cross_rows)
    if room < longest:
        _log.warning("max_model_len is lowered to %d to fit the KV cache; the model has %d positions", room, longest)
    return min(longest, room)
