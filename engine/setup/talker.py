"""Loads the talker of a checkpoint, and plans its memory."""

from __future__ import annotations

from typing import Any, cast

import torch

from ...callers.errors import CheckpointError, ConfigError
from ...checkpoints.stored_rows import StoredRows
from ...checkpoints.weight_files import read_checkpoint, rename
from ...kernels.dispatch import use_backends
from ...models.interface import StepLimits
from ...models.talker import Talker
from ...models.weights import weight_bytes
from ..config import EngineConfig
from ..kv_cache.groups import group_layers
from ..model_files import ModelFiles, resolve
from ..threads import computing_on
from ..worker.talker_runner import MAX_CODES, STEP_ROWS, TalkerRunner
from .implementation import resolve_architecture
from .model_source import build_from_json, computing_dtype

_TABLE = "language_model.embed_tokens.weight"


def load_talker(config: EngineConfig, files: ModelFiles) -> TalkerRunner:
    """Build the talker and load its weights.

    Raises:
        ConfigError: as `build_talker`.
        CheckpointError: missing, surplus or misshapen tensors, or no readable voices.
    """
    device = config.torch_device
    with use_backends(config.kernels), computing_on(device):
        talker = build_talker(config, files, device)
        prefixes = resolve(resolve_architecture(files).model).prefixes
        table = StoredRows(files.path, lambda name: rename(name, prefixes) == _TABLE)
        talker.load(files.path, read_checkpoint(files.path, talker.is_unused), table)
        if not talker.voices:
            raise CheckpointError(f"{files.path} has no voices; download it again")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return TalkerRunner(talker, device, config.block_size, config.kernels, config.max_speech_streams)


def build_talker(config: EngineConfig, files: ModelFiles, device: torch.device) -> Talker:
    """Build the talker without weights. Raise ConfigError if the checkpoint has none, or parts="encoder" is set."""
    name, kind = files.architecture, getattr(resolve(resolve_architecture(files).model), "talker", None)
    if kind is None:
        raise ConfigError(f"<<param=>>True, but {name} does not speak here; leave it out", param="load_talker")
    if not files.config.get("enable_audio_output", True) or "talker_config" not in files.config:
        reason = "enable_audio_output in config.json is false" if "talker_config" in files.config else "it is a thinker alone"
        raise ConfigError(f"<<param=>>True, but this checkpoint has no talker ({reason}); leave it out", param="load_talker")
    if config.parts != "all":
        reason = f"<<param=>>True needs the whole model, not <<parts=>>{config.parts!r}; leave one of them out"
        raise ConfigError(reason, param="load_talker")
    return cast(Talker, build_from_json("talker", kind, files.config, computing_dtype(config, files), device))


def talker_bytes(config: EngineConfig, files: ModelFiles, max_model_len: int) -> int:
    """Return the bytes of the talker's weights, of what `max_speech_streams` answers hold, and of the largest step.

    Each answer has the longest KV cache, for MAX_CODES codes. The step has room for what one answer holds besides.

    Raises:
        ConfigError: as `build_talker`.
    """
    if not config.load_talker:
        return 0
    device = config.torch_device
    talker = build_talker(config, files, torch.device("meta"))
    longest = min(max_model_len + 2 + MAX_CODES, talker.max_positions)
    blocks = -(-longest // config.block_size)
    cache = blocks * sum(group.block_bytes(config.block_size) for group in group_layers(talker.cache_specs))
    if talker.predictor is not None:
        frame = -(-(talker.predictor.count + 1) // config.block_size)
        cache += frame * sum(group.block_bytes(config.block_size) for group in group_layers(talker.predictor.cache_specs))
    step = StepLimits(min(STEP_ROWS, longest), longest, longest, device)
    weights = weight_bytes(cast(Any, talker), device)
    others = (config.max_speech_streams - 1) * (cache + talker.kept_bytes(longest))
    return weights + cache + talker.peak_bytes(step, min(MAX_CODES, talker.max_codes)) + others
