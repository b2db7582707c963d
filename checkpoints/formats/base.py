"""Interface of weight formats, and helpers to read quantization_config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...callers.errors import CheckpointError, short_repr
from ...kernels.linear.grouped import QuantizedWeight
from ..patterns import compile_pattern

META = torch.device("meta")


class WeightFormat(Protocol):
    """Storage format of one weight `[out, in]`. Implementations are frozen dataclasses."""

    def layout(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        """Return the stored tensors that are always there, by the last part of their name, on the meta device."""

    def decode(self, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        """Return the weight that the stored tensors make. Tensors on the meta device give its size."""


class QuantizationConfig(Protocol):
    """The quantization_config of a checkpoint."""

    @property
    def parts(self) -> Sequence[str]:
        """Last parts of the names of tensors that a quantised module may have."""

    def format_of(self, names: Sequence[str], stored: Mapping[str, Tensor] | None) -> WeightFormat | None:
        """Return the format of a module, None for a wide weight.

        Args:
            names: the names that the module may have in quantization_config, the stored one first.
            stored: its stored tensors on the meta device by the last part of their name; None if no weight files are there.

        Raises:
            CheckpointError: the scheme is unknown or unsupported; the message names it and the module.
        """


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def unsupported(scheme: object, module: str, supported: str) -> CheckpointError:
    return CheckpointError(
        f"{module} is quantised as {str(scheme)[:120]}, which is not supported; use a checkpoint with {supported}, or one that "
        "is not quantised"
    )


def check_keys(config: Mapping[str, Any], supported: Mapping[str, Iterable[object]], method: str) -> None:
    """Raise CheckpointError if the config has a value under one of these keys that is not among the known ones."""
    for key, values in supported.items():
        if key in config and config[key] not in values:
            choice = ", ".join(map(repr, values))
            raise CheckpointError(f"quantization_config of {method} has {key}={config[key]!r}; supported are {choice}")


def group_size(size: object) -> int | None:
    """Return the inputs of a group, None for -1 (all). Raise CheckpointError for another value."""
    if size in (-1, None):
        return None
    if isinstance(size, int) and size > 0:
        return size
    raise CheckpointError(f"quantization_config has group_size={size!r}; it must be a positive integer, or -1")


def name_patterns(config: Mapping[str, Any], *keys: str) -> list[str]:
    """Return the names and "re:" patterns of modules in the lists under these keys.

    Raises:
        CheckpointError: an entry is not a string, or not a valid pattern.
    """
    patterns = []
    for key in keys:
        names = config.get(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"quantization_config has {key}={short_repr(names)}; it must be a list of module names")
        for name in names:
            patterns.append(name)
            if name.startswith("re:"):
                check_pattern(key, name[3:])
    return patterns


def check_pattern(key: str, pattern: str) -> None:
    """Raise CheckpointError if the pattern is not a valid regular expression, or could take minutes to match."""
    try:
        compile_pattern(pattern)
    except ValueError as error:
        raise CheckpointError(f"quantization_config has an invalid pattern {pattern[:60]!r} in {key}: {error}") from None


def in_decoder(names: Iterable[str]) -> bool:
    """Return whether a module belongs to a decoder's layers. Methods without lists of wide modules quantise nothing else."""
    return any(name.startswith("language_model.layers.") for name in names)


def names_match(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Return whether a pattern is one of the names, a part of one at dots, or after "re:" a regex for its beginning."""
    return any(_matches(name, pattern) for name in names for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return f".{pattern}." in f".{name}."


def scale_dtype(stored: Mapping[str, Tensor] | None, part: str, default: torch.dtype) -> torch.dtype:
    """Return the dtype of a stored scale, or the default if no weight files are there."""
    return default if stored is None or part not in stored else stored[part].dtype
