"""Finds models that are given by name: in the Hub's cache or, if a needed file is missing there, on the Hub."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...callers.errors import ConfigError, HubError, short_repr
from ...checkpoints.external import external_parts, find_part_folder, lacks_weights
from ...checkpoints.files import read_json
from ...checkpoints.gguf.reader import SUFFIX
from ...checkpoints.weight_files import read_headers
from ...processors.files import ADAPTER
from ..config import EngineConfig
from ..model_files import SHIPPED, call_overrides, load_model_files
from ..speculative_config import MODEL_METHODS, read_speculative_config
from .eagle3 import with_draft_folder
from .hub_cache import (
    MAIN,
    CachedModel,
    check_revision,
    is_adapter,
    is_name,
    remote_weights,
    small_files,
)
from .implementation import resolve_architecture

_log = logging.getLogger(__name__)
ASSETS = Path(__file__).resolve().parents[2] / "assets"


def check_architecture(folder: Path) -> None:
    """Raise ConfigError or CheckpointError for a checkpoint whose JSON files show that it cannot be served."""
    if not is_adapter(folder):
        resolve_architecture(load_model_files(folder))


def find_model(config: EngineConfig, weights: bool = True) -> EngineConfig:
    """Return the config with `model` and `adapter` as folders. If `model` was a name, `revision` becomes the commit.

    Args:
        weights: False downloads only the files beside the weights.

    Raises:
        ConfigError: a revision of a folder, or an architecture that is not supported, before its weights are downloaded.
        HubError, CheckpointError: see `find_folder`.
    """
    resolved, adapter = _with_folder(config, weights), config.adapter
    if adapter is None and is_adapter(Path(resolved.model)):
        adapter, resolved = _with_folder(config, True).model, _base_of(config, Path(resolved.model), weights)
    elif adapter is not None:
        adapter = _with_folder(replace(config, model=adapter, revision=None), True).model
    find_external_parts(Path(resolved.model), config.offline, weights)
    resolved = _with_draft_folder(resolved, weights)
    if callable(resolved.hf_overrides):
        resolved = replace(resolved, hf_overrides=call_overrides(resolved.model, resolved.hf_overrides))
    if adapter is None:
        return resolved
    if not is_adapter(Path(adapter)) or is_adapter(Path(resolved.model)):
        reason = f"{resolved.model} must be a model, not an adapter; give <<base_with_adapter>>"
        if not is_adapter(Path(adapter)):
            files = f"{ADAPTER} and its weights (adapter_model.safetensors)"
            reason = f"the adapter {adapter} has no {ADAPTER}; give a folder as peft writes it, with {files}"
        raise ConfigError(reason, param="adapter")
    return replace(resolved, adapter=adapter)


def _with_folder(
    config: EngineConfig, weights: bool, check: Callable[[Path], None] | None = check_architecture
) -> EngineConfig:
    """Return the config with `model` as a folder. An existing folder comes before a shipped model of that name."""
    if config.model in SHIPPED and not os.path.exists(config.model):
        config = replace(config, model=str(ASSETS / config.model))
    if os.path.isdir(config.model) or config.model.endswith(SUFFIX) or not is_name(config.model):
        if config.revision not in (None, Path(config.model).name):
            reason = (
                f"<<param=>>{config.revision!r} is for a model's name on the Hub, and {config.model} is a path; leave it out"
            )
            raise ConfigError(reason, param="revision")
        return config
    folder = find_folder(config.model, config.revision, config.offline, weights=weights, check=check)
    return replace(config, model=str(folder), revision=folder.name)


def _with_draft_folder(config: EngineConfig, weights: bool) -> EngineConfig:
    """Return the config with the model that drafts, if there is one, as a folder."""
    limits = read_speculative_config(config.speculative_config)
    if not limits.model or limits.method not in MODEL_METHODS or not limits.predicted:
        return config
    draft = EngineConfig(limits.model, offline=config.offline)
    folder = _with_folder(draft, weights, check=None).model
    return replace(config, speculative_config=with_draft_folder(config.speculative_config or {}, folder))


def _base_of(config: EngineConfig, adapter: Path, weights: bool) -> EngineConfig:
    """Return the config with the folder of the base model that an adapter names.

    Raises:
        ConfigError: it is neither a folder nor a name.
        HubError: it cannot be downloaded.
    """
    raw = read_json(adapter / ADAPTER)
    name, revision = raw.get("base_model_name_or_path"), raw.get("revision")
    how = "give the base model, <<base_with_adapter>>"
    if isinstance(name, str) and name and ((adapter / name).is_dir() or os.path.isdir(name)):
        return replace(config, model=str(adapter / name) if (adapter / name).is_dir() else name, revision=None)
    if not isinstance(name, str) or not is_name(name):
        reason = f"{adapter} is an adapter of {short_repr(name)}, which is neither a folder here nor a name on the Hub"
        raise ConfigError(f"{reason}; {how}", param="model")
    try:
        return _with_folder(replace(config, model=name, revision=revision if isinstance(revision, str) else None), weights)
    except HubError as error:
        raise HubError(f"the base model of {adapter}: {error.info.text}, or {how}", code=error.info.code) from None


def find_external_parts(folder: Path, offline: bool = False, weights: bool = True) -> None:
    """Download parts of a checkpoint that config.json names, if they are in other repositories on the Hub."""
    config = read_json(folder / "config.json")
    for part, name in external_parts(config):
        needs_weights = weights and lacks_weights(read_headers(folder), part)
        if is_name(name) and find_part_folder(folder, name) is None and (needs_weights or not config.get(part.section)):
            find_folder(name, offline=offline, weights=needs_weights)


def find_folder(
    name: str,
    revision: str | None = None,
    offline: bool = False,
    *,
    weights: bool = True,
    update: bool = False,
    check: Callable[[Path], None] | None = None,
) -> Path:
    """Return the folder of a model on the Hub: the cached snapshot if it is complete, else a downloaded one.

    Args:
        revision: a branch, a tag or a commit; None is the branch main.
        offline: never use the network, as with HF_HUB_OFFLINE=1.
        weights: False downloads only the files beside the weights.
        update: ask the Hub for the newest commit of a branch, even if the cache holds an older one.
        check: called with the folder before the weights are downloaded.

    Raises:
        HubError: the model is not found or gated, the Hub cannot be reached, or the disk is full.
        CheckpointError: a downloaded file is damaged, the model has no safetensors, or the cache cannot be written.
        ConfigError: an invalid revision.
    """
    cached, branch = CachedModel(name), check_revision(revision or MAIN)
    commit = None if update else cached.commit(branch)
    usable = commit if commit and cached.is_complete(commit, weights) else None
    if usable and cached.files(usable) is not None:
        return cached.snapshot(usable)
    from .hub_download import hub_errors

    # a usable snapshot of another program has the weights, but its other files may be incomplete
    try:
        with hub_errors(cached, branch, offline):
            return _download(cached, usable or branch, branch, weights, check)
    except HubError as error:
        if usable is None:
            raise
        _log.warning("the cached %s may be incomplete: %s", name, error)
        return cached.snapshot(usable)


def _download(cached: CachedModel, revision: str, branch: str, weights: bool, check: Callable[[Path], None] | None) -> Path:
    """Download what the snapshot of a revision lacks, the weights last, and return its folder."""
    from .hub_download import fetch_files, list_files

    commit, files = list_files(cached, revision)
    folder = cached.snapshot(commit)
    fetch_files(cached, commit, [files[name] for name in small_files(files)])
    if check is not None:
        check(folder)
    if weights:
        fetch_files(cached, commit, remote_weights(cached.name, files, folder))
    cached.write_ref(branch, commit)
    return folder
