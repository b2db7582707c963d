"""The models of `serve_app`, and the replicas of each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...callers.errors import ConfigError, hint, short_repr
from ..model_entries import ModelEntry, read_entries

_OWN = ("replicas", "num_cpus", "num_gpus")
_OF_ENTRY = ("name", "path", "options", "adapters", *_OWN)
Replicas = int | tuple[int, int]


@dataclass(frozen=True)
class ModelDeployment:
    """One model, the number of its replicas (or the smallest and largest number), and what each needs."""

    entry: ModelEntry
    replicas: Replicas
    num_cpus: float
    num_gpus: float


def read_models(models: object, replicas: object, num_cpus: object, num_gpus: object) -> Sequence[ModelDeployment]:
    """Return the models of `serve_app`; its arguments. Raise ConfigError for values of another form."""
    from ..run import model_name

    if isinstance(models, str | os.PathLike):
        models = [{"name": model_name(models), "path": os.fspath(models)}]
    if not isinstance(models, list | tuple) or not all(isinstance(entry, Mapping) for entry in models):
        raise ConfigError("<<param>> must be a model, or a list of objects with path and name", param="models")
    for index, entry in enumerate(models):
        for name in entry:
            if name not in _OF_ENTRY:
                where = f"models[{index}]"
                raise ConfigError(f"unknown key {short_repr(name)} of {where}; {hint(str(name), _OF_ENTRY)}", param=where)
    entries = read_entries([{name: entry[name] for name in entry if name not in _OWN} for entry in models])
    return [
        ModelDeployment(
            entry,
            _replicas(f"models[{index}].replicas", own.get("replicas", replicas)),
            _amount(f"models[{index}].num_cpus", own.get("num_cpus", num_cpus)),
            _amount(f"models[{index}].num_gpus", own.get("num_gpus", num_gpus)),
        )
        for index, (entry, own) in enumerate(zip(entries, models, strict=True))
    ]


def _replicas(name: str, value: object) -> Replicas:
    if not isinstance(value, list | tuple):
        return count(name, value)
    if len(value) != 2 or not all(_is_count(number, 0) for number in value) or not 1 <= value[1] >= value[0]:
        reason = "must be a number, or the smallest and the largest number of replicas"
        raise ConfigError(f"<<param=>>{short_repr(value)} {reason}", param=name)
    return value[0], value[1]


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def count(name: str, value: object) -> int:
    """Return an integer of 1 or above. `name`: of the option, in the ConfigError for other values."""
    if not isinstance(value, int) or not _is_count(value):
        raise ConfigError(f"<<param=>>{short_repr(value)} must be an integer, 1 or above", param=name)
    return value


def _amount(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigError(f"<<param=>>{short_repr(value)} must be a number, 0 or above", param=name)
    return float(value)
