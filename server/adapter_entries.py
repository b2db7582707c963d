"""The option `adapters`: adapters of a model that requests may name as their model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..callers.errors import ConfigError, InputError, short_repr
from ..engine.frontend.adapters import check_name

AdapterFolders = Mapping[str, str]
"""The folder of each adapter by its name."""


def read_adapters(value: object, where: str = "adapters") -> AdapterFolders:
    """Return the value of the option.

    Args:
        value: an object of names and folders, or a list of NAME=FOLDER or of objects with name and path, as vLLM takes them.
        where: what an error calls the option.

    Raises:
        ConfigError: it has another form, or two adapters have the same name.
    """
    if value is None:
        return {}
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        pairs = [_read_entry(entry, where) for entry in (value if isinstance(value, list | tuple) else [value])]
    adapters: dict[str, str] = {}
    for name, path in pairs:
        try:
            check_name(name)
        except InputError as error:
            raise ConfigError(f"{where}: {error}", code="invalid_config", param=where) from None
        if not (isinstance(path, str) and path):
            raise _error(where, path, f"must be the folder of the adapter {short_repr(name)}")
        if name in adapters:
            raise _error(where, name, "is the name of two adapters; give each its own")
        adapters[name] = path
    return adapters


def _read_entry(entry: Any, where: str) -> tuple[Any, Any]:
    """Return name and folder of an entry in one of vLLM's two forms."""
    if isinstance(entry, str) and "=" in entry:
        name, _, path = entry.partition("=")
        return name, path
    if isinstance(entry, Mapping) and {"name", "path"} <= {*entry} <= {"name", "path", "base_model_name"}:
        return entry["name"], entry["path"]
    raise _error(where, entry, "must be NAME=FOLDER, or an object with name and path")


def _error(where: str, value: object, reason: str) -> ConfigError:
    return ConfigError(f"<<param=>>{short_repr(value)} {reason}", code="invalid_config", param=where)
