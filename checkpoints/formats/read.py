"""Finds the reader of a quantization_config by its `quant_method`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...callers.errors import CheckpointError
from .awq import read_awq
from .base import QuantizationConfig
from .bitsandbytes import read_bitsandbytes
from .compressed_tensors import read_compressed_tensors
from .fp8 import read_fp8
from .gguf import GgufQuantization
from .gptq import read_gptq
from .mlx import read_mlx
from .modelopt import read_modelopt
from .mxfp4 import read_mxfp4
from .torchao import read_torchao

_READERS: Mapping[str, Callable[[Mapping[str, Any]], QuantizationConfig]] = {
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "awq": read_awq,
    "gptq": read_gptq,
    "bitsandbytes": read_bitsandbytes,
    "mxfp4": read_mxfp4,
    "torchao": read_torchao,
    "modelopt": read_modelopt,
    "gguf": lambda config: GgufQuantization(),
    "mlx": read_mlx,
}


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
    try:
        return _READERS[method](config)
    except CheckpointError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(f"quantization_config of {method} in config.json cannot be read ({reason})") from None
