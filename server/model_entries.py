"""The option `models`: several models of one server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..callers.errors import ConfigError, hint, short_repr
from .adapter_entries import AdapterFolders, read_adapters

PARSERS_OF_MODEL = ("tool_call_parser", "reasoning_parser")
"""Options of the server that each model may have."""
_FIELDS = ("name", "path", "options", "preload", "adapters")


@dataclass(frozen=True)
class ModelEntry:
    """One of several models.

    Args:
        names: those that requests may give; the first one is in responses.
        path: folder of a checkpoint, a GGUF file, or a name on the Hub.
        options: of LLM, and the parsers. Those that are left out are the server's.
        preload: load it before the server takes requests.
        adapters: folder of each adapter by its name, which requests may name instead of the model.
    """

    names: Sequence[str]
    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    preload: bool = False
    adapters: AdapterFolders = field(default_factory=dict)


def read_entries(value: object) -> tuple[ModelEntry, ...]:
    """Return the entries of the option. If none is to be preloaded, the first one is.

    Raises:
        ConfigError: an entry has another form, or two have the same name.
    """
    if isinstance(value, tuple) and all(isinstance(entry, ModelEntry) for entry in value):
        return value
    if not isinstance(value, list | tuple) or not value:
        raise _error("models", value, "must be a list of objects with name, path, options and preload")
    entries = [_read_entry(entry, f"models[{index}]") for index, entry in enumerate(value)]
    names = [name for entry in entries for name in (*entry.names, *entry.adapters)]
    for name in names:
        if names.count(name) > 1:
            raise _error("models", name, "is the name of two models or adapters; give each its own")
    if not any(entry.preload for entry in entries):
        entries[0] = replace(entries[0], preload=True)
    return tuple(entries)


def _read_entry(value: object, where: str) -> ModelEntry:
    if not isinstance(value, Mapping):
        raise _error(where, value, "must be an object with name, path, options and preload")
    for name in value:
        if name not in _FIELDS:
            raise ConfigError(f"unknown key {short_repr(name)} of {where}; {hint(str(name), _FIELDS)}", param=where)
    path, options, preload = value.get("path"), value.get("options") or {}, value.get("preload", False)
    if path is None:
        raise ConfigError("<<param>> is missing; give a folder, a GGUF file, or a name on the Hub", param=f"{where}.path")
    if not (isinstance(path, str) and path):
        raise _error(f"{where}.path", path, "must be a folder, a GGUF file, or a name on the Hub")
    names = value.get("name", path)
    names = list(names) if isinstance(names, list | tuple) else [names]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise _error(f"{where}.name", value.get("name"), "must be a non-empty string, or a list of them")
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise _error(f"{where}.options", options, "must be an object of options of LLM")
    if not isinstance(preload, bool):
        raise _error(f"{where}.preload", preload, "must be true or false")
    adapters = read_adapters(value.get("adapters"), f"{where}.adapters")
    return ModelEntry(names, path, {name.replace("-", "_"): option for name, option in options.items()}, preload, adapters)


def _error(name: str, value: object, reason: str) -> ConfigError:
    return ConfigError(f"<<param=>>{short_repr(value)} {reason}", code="invalid_config", param=name)
