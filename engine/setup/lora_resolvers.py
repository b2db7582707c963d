"""Finds adapters by names that are not loaded: in a folder, on the Hub, or by a function of another package."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ...callers.errors import CheckpointError, ConfigError, SensoriumError, error_reason, hint, short_repr, typed
from ...processors.files import ADAPTER
from ..config import EngineConfig
from .hub import find_folder
from .hub_cache import is_name

Resolver = Callable[[str], Path | None]
"""Returns the folder of an adapter by its name, or None."""
GROUP = "sensorium.lora_resolvers"
_HUB = "hub:"


def make_resolvers(config: EngineConfig) -> tuple[Resolver, ...]:
    """Return the resolvers of `lora_resolvers`, in order.

    Raises:
        ConfigError: a folder does not exist, no installed package has a resolver of this name, or it cannot be imported.
    """
    return tuple(_resolver(source, config) for source in config.lora_resolvers)


def check_default_adapters(config: EngineConfig, modalities: Collection[str]) -> None:
    """Raise ConfigError if `default_mm_loras` names a modality that the model does not take."""
    for name in config.default_mm_loras:
        if name not in modalities:
            reason = f"<<param=>>{short_repr(name)} is no modality of this model; {hint(name, modalities)}"
            raise ConfigError(reason, param="default_mm_loras")


def _resolver(source: str, config: EngineConfig) -> Resolver:
    if source.startswith(_HUB):
        return partial(_on_hub, source.removeprefix(_HUB), config.offline)
    if os.sep in source or source.startswith((".", "~")):
        folder = Path(source).expanduser().absolute()
        if not folder.is_dir():
            raise ConfigError(f"<<param=>>{short_repr(source)} is no folder; give one that exists", param="lora_resolvers")
        return partial(_in_folder, folder)
    plugins = {entry.name: entry for entry in entry_points(group=GROUP)}
    if source not in plugins:
        reason = f"<<param=>>{short_repr(source)} is neither a path, nor {_HUB}PATTERN, nor a resolver of an installed package"
        advice = f"; give the folder as ./{source}" if Path(source).is_dir() else ""
        raise ConfigError(f"{reason} (entry point group {GROUP}){advice}", param="lora_resolvers")
    try:
        function = plugins[source].load()
    except Exception as error:
        reason = f"<<param=>>{short_repr(source)} cannot be imported from {plugins[source].value} ({error_reason(error)})"
        raise ConfigError(f"{reason}; install its package again", param="lora_resolvers") from error
    return partial(_by_function, function, config.model)


def _in_folder(root: Path, name: str) -> Path | None:
    """Return the folder of this name below `root`. Links that lead out of it are not followed."""
    folder = root / name
    is_inside = folder.resolve().is_relative_to(root.resolve())
    return folder if is_inside and (folder / ADAPTER).is_file() else None


def _on_hub(pattern: str, offline: bool, name: str) -> Path | None:
    """Return the folder of an adapter on the Hub if its name is allowed.

    Raises:
        HubError: it cannot be downloaded.
        CheckpointError: it is no adapter. A request must not download the weights of a model.
    """
    is_allowed = is_name(name) and fnmatchcase(name, pattern)
    return find_folder(name, offline=offline, check=partial(_check_adapter, name)) if is_allowed else None


def _check_adapter(name: str, folder: Path) -> None:
    if not (folder / ADAPTER).is_file():
        raise CheckpointError(f"{name} on the Hub has no {ADAPTER}, so it is no adapter")


def _by_function(function: Callable[[str, str], Any], model: str, name: str) -> Path | None:
    """Return what a function of another package returns for the name and the model's path or name.

    Raises:
        CheckpointError: it fails, or returns neither a path nor None.
    """
    try:
        found = function(name, model)
    except SensoriumError:
        raise
    except Exception as error:
        raise CheckpointError(f"the resolver of the adapter {short_repr(name)} failed: {error_reason(error)}") from error
    if found is not None and not isinstance(found, str | os.PathLike):
        raise CheckpointError(f"the resolver of the adapter {short_repr(name)} returned {typed(found)}, which is no path")
    return None if found is None else Path(found)
