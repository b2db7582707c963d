"""Which path a checkpoint takes: a model of ours, or a class of transformers with our attention. Knows no family."""

from __future__ import annotations

import logging
from typing import Any, cast

import torch

from ..mm.errors import ConfigError
from ..mm.fields import merge
from ..mm.registry import Architecture, find
from ..models.borrowed import class_of
from ..models.fallback import Fallback
from ..models.interface import Model
from ..processors.fallback import FallbackProcessingInfo
from ..processors.interface import ProcessingInfo
from .config import EngineConfig, ModelFiles

_log = logging.getLogger(__name__)
FALLBACK = Architecture("fallback", "Fallback", "FallbackProcessingInfo")


def choose(files: ModelFiles) -> Architecture:
    """The registry's row of a checkpoint, FALLBACK where only transformers has its class; ConfigError where nobody has."""
    name = files.architecture
    try:
        return find(name)
    except ConfigError as unknown:
        try:
            class_of(files.config)
        except ConfigError as error:
            raise ConfigError(f"{unknown}; {error}") from None
    return FALLBACK


def describe(row: Architecture, files: ModelFiles) -> str:
    """The path in words, and why."""
    if row is not FALLBACK:
        return f"own implementation ({row.model.partition(':')[0].replace('.', '/')}.py)"
    way = f"fallback, transformers' {files.architecture} with our paged attention"
    return f"{way}, because the registry does not have it; its memory is measured in a run of one item"


def check(row: Architecture, config: EngineConfig) -> None:
    """ConfigError for what only models of ours can do."""
    if row is not FALLBACK:
        return
    usual = {"quantization": None, "kv_cache_dtype": "auto", "batch_invariant": False, "media_device": "cpu"}
    for name in usual:
        if (value := getattr(config, name)) != usual[name]:
            raise ConfigError(f"{name}={value!r} is for models of ours; this one runs by way of transformers: leave it out")


def rehearse(model: Model, info: ProcessingInfo, dtype: torch.dtype) -> None:
    """Let a class of transformers show, with one item of each modality, what it takes and that we compute what it does."""
    if not isinstance(model, Fallback):
        return
    for modality in info.modalities:
        item, geometry, whole = cast(FallbackProcessingInfo, info).sample(modality, dtype)
        device = model.item_device
        tensors: dict[str, Any] = merge([item], device)
        _log.info("one %s is run through a class of transformers, to measure it and to hold our way to its own", modality)
        model.rehearse(modality, tensors, geometry, {name: value.to(device) for name, value in whole.items()})
