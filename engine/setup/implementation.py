"""Chooses the implementation of a checkpoint's architecture: our own model, or transformers' class with our attention."""

from __future__ import annotations

import logging
from typing import Any, cast

import torch

from ...mm.errors import ConfigError
from ...mm.fields import merge
from ...mm.registry import Architecture, find_architecture, native
from ...models.fallback.borrowed import class_of
from ...models.fallback.fallback import Fallback
from ...models.interface import Model
from ...processors.fallback.fallback import FallbackProcessingInfo
from ...processors.interface import ProcessingInfo
from ..config import EngineConfig
from ..model_files import ModelFiles

_log = logging.getLogger(__name__)
FALLBACK = native("fallback", "Fallback", "FallbackProcessingInfo", folder="fallback")


def resolve_architecture(files: ModelFiles) -> Architecture:
    """Return the registry's row for a checkpoint, or FALLBACK if only transformers has its class.

    Raises:
        ConfigError: neither the registry nor transformers has it, or transformers cannot import it here.
    """
    name = files.architecture
    try:
        return find_architecture(name)
    except ConfigError as unknown:
        try:
            class_of(files.config)
        except ImportError as error:
            raise ConfigError(str(error)) from None
        except ConfigError as error:
            if files.remote_code:
                known = "an architecture of docs/models.md or of transformers"
                raise ConfigError(f"{files.remote_code}, which is never run; use a checkpoint with {known}") from None
            raise ConfigError(f"{unknown}; {error}") from None
    return FALLBACK


def describe_implementation(row: Architecture, files: ModelFiles) -> str:
    """Return which implementation runs the checkpoint, and why, as text."""
    if row is not FALLBACK:
        return f"own implementation ({row.model.partition(':')[0]})"
    way = f"fallback, transformers' {files.architecture} with our paged attention"
    return f"{way}, because the registry does not have it; its memory is measured in a run of one item"


def check_options(row: Architecture, config: EngineConfig) -> None:
    """Raise ConfigError for options that only our own models support."""
    if row is not FALLBACK:
        return
    defaults = {"quantization": None, "kv_cache_dtype": "auto", "batch_invariant": False, "media_device": "cpu"}
    for name in defaults:
        if (value := getattr(config, name)) != defaults[name]:
            raise ConfigError(
                f"{name}={value!r} is not supported for this model, which runs through transformers; leave it out", param=name
            )


def verify_fallback(model: Model, info: ProcessingInfo, dtype: torch.dtype) -> None:
    """Run transformers' class on one item per modality, to measure its memory and to verify that our results agree.

    Do nothing for our own models, whose memory has closed forms. A model on the meta device is only measured.

    Raises:
        ConfigError: our results differ, so the model cannot be served.
    """
    if not isinstance(model, Fallback):
        return
    for modality in info.modalities:
        item, geometry, whole = cast(FallbackProcessingInfo, info).sample(modality, dtype)
        device = model.item_device
        tensors: dict[str, Any] = merge([item], device)
        _log.info("running one %s through transformers' class, to measure its memory and compare the results", modality)
        model.rehearse(modality, tensors, geometry, {name: value.to(device) for name, value in whole.items()})
