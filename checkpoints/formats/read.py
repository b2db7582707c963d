"""Finds the reader of a quantization_config by its `quant_method`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...callers.errors import CheckpointError

if TYPE_CHECKING:
    from .base import QuantizationConfig

_READERS = {
    "compressed-tensors": "compressed_tensors:read_compressed_tensors",
    "fp8": "fp8:read_fp8",
    "awq": "awq:read_awq",
    "gptq": "gptq:read_gptq",
    "bitsandbytes": "bitsandbytes:read_bitsandbytes",
    "mxfp4": "mxfp4:read_mxfp4",
    "torchao": "torchao:read_torchao",
    "modelopt": "modelopt:read_modelopt",
    "gguf": "gguf:read_gguf_config",
    "mlx": "mlx:read_mlx",
}
"""quant_method -> "module:function", imported when a checkpoint has it."""


def _unnamed(config: Mapping[str, Any]) -> str:
    """Return the quantisation method of a config without quant_method, "" if it is unknown."""
    if "config_groups" in config:
        return "compressed-tensors"
    return "mlx" if "group_size" in config and "bits" in config else ""


def read_quantization(config: Mapping[str, Any] | None) -> QuantizationConfig | None:
    """Read a quantization_config; None for a checkpoint without one.

    Raises:
        CheckpointError: the method or one of its settings is not supported; the message names it.
    """
    if config is None:
        return None
    method = str(config.get("quant_method") or _unnamed(config))
    if method not in _READERS:
        raise CheckpointError(
            f"quantization_config in config.json has quant_method {method[:60]!r}, which is not supported; "
            f"use a checkpoint with one of {', '.join(_READERS)}, or one that is not quantised"
        )
    module, _, name = _READERS[method].partition(":")
    read: Callable[[Mapping[str, Any]], QuantizationConfig] = getattr(import_module(f".{module}", __package__), name)
    try:
        return read(config)
    except CheckpointError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(f"quantization_config of {method} in config.json cannot be read ({reason})") from None
