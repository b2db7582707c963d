"""Chooses the implementation of a checkpoint's architecture: our own model, or transformers' class with our attention."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from ...callers.errors import ConfigError
from ...checkpoints.config import get_text_config
from ...mm.fields import merge
from ...models.interface import Model
from ...models.registry import TEXT_PROCESSING, Architecture, find_architecture, is_registered
from ...models.text.stacks import stack_of
from ...processors.interface import ProcessingInfo
from ..config import EngineConfig
from ..model_files import ModelFiles

if TYPE_CHECKING:
    from ...models.fallback.fallback import Fallback
    from ...processors.fallback.fallback import FallbackProcessingInfo

_log = logging.getLogger(__name__)
FALLBACK = Architecture(
    "sensorium.models.fallback.fallback:Fallback", "sensorium.processors.fallback.fallback:FallbackProcessingInfo"
)
TEXT_FALLBACK = Architecture(FALLBACK.model, TEXT_PROCESSING)


def resolve_architecture(files: ModelFiles) -> Architecture:
    """Return the registry's row for a checkpoint; FALLBACK or TEXT_FALLBACK if only transformers can run it.

    Raises:
        ConfigError: neither the registry nor transformers has it, transformers cannot import it here, or its class is an
            encoder-decoder model.
    """
    architecture, unsupported = files.architecture, _unsupported(files)
    if unsupported is None:
        return find_architecture(architecture)
    from ...models.fallback.borrowed import check_decoder_only, class_of

    try:
        kind = class_of(files.config)
    except ImportError as error:
        raise ConfigError(str(error)) from None
    except ConfigError as error:
        how = "use a checkpoint with an architecture of docs/models.md or of transformers, or register a model of your own"
        if files.remote_code and not is_registered(architecture):
            raise ConfigError(f"{architecture}: {files.remote_code}, which is never run; {how}") from None
        raise ConfigError(f"{unsupported}; {error.info.text}; {how}") from None
    row = FALLBACK if kind.config_class.sub_configs else TEXT_FALLBACK
    with explain_fallback(row, files):
        check_decoder_only(kind, files.config)
    return row


def _unsupported(files: ModelFiles) -> ConfigError | None:
    """Return why none of our own models runs a checkpoint; None if one does."""
    try:
        row, text = find_architecture(files.architecture), get_text_config(files.config)
        if row.takes_any_stack and (text is not files.config or row.is_text_stack):
            stack_of(files.config)
    except ConfigError as error:
        return error
    return None


def is_fallback(row: Architecture) -> bool:
    return row.model == FALLBACK.model


@contextmanager
def explain_fallback(row: Architecture, files: ModelFiles) -> Iterator[None]:
    """Add to a fallback's ConfigError why the registry's own model does not run the checkpoint."""
    try:
        yield
    except ConfigError as error:
        if not is_fallback(row):
            raise
        raise ConfigError(
            f"{_unsupported(files)}; and through transformers: {error.info.text}", param=error.info.param
        ) from None


def describe_implementation(row: Architecture, files: ModelFiles) -> str:
    """Return which implementation runs the checkpoint, and why, as text."""
    if not is_fallback(row):
        return f"own implementation ({row.model.partition(':')[0]})"
    way = f"fallback, transformers' {files.architecture} with our paged attention"
    why = _unsupported(files) if is_registered(files.architecture) else "the registry does not have it"
    measured = "" if row is TEXT_FALLBACK else "; its memory is measured in a run of one item"
    return f"{way}, because {why}{measured}"


def check_options(row: Architecture, config: EngineConfig) -> None:
    """Raise ConfigError for options that only our own models support."""
    if not is_fallback(row):
        return
    defaults = {"quantization": None, "kv_cache_dtype": "auto", "batch_invariant": False, "media_device": "cpu"}
    for name in defaults:
        if (value := getattr(config, name)) != defaults[name]:
            raise ConfigError(
                f"<<param=>>{value!r} is not supported for this model, which runs through transformers; leave it out",
                param=name,
            )


def verify_fallback(files: ModelFiles, model: Model, info: ProcessingInfo, dtype: torch.dtype) -> None:
    """Run transformers' class on one item per modality or on text, to measure its memory and compare its results with ours.

    Do nothing for our own models, whose memory has closed forms. A model on the meta device is only measured.

    Raises:
        ConfigError: our results differ, so the model cannot be served.
    """
    if not is_fallback(resolve_architecture(files)):
        return
    fallback = cast("Fallback", model)
    if not info.modalities:
        fallback.rehearse_text()
    for modality in info.modalities:
        item, geometry, inputs = cast("FallbackProcessingInfo", info).sample(modality, dtype)
        device = fallback.item_device
        tensors: dict[str, Any] = merge([item], device)
        _log.info("running one %s through transformers' class, to measure its memory and compare the results", modality)
        fallback.rehearse(modality, tensors, geometry, {name: value.to(device) for name, value in inputs.items()})
