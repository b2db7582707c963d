"""The option `quantization`: the formats to which linear layers are quantised while a checkpoint is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..callers.errors import ConfigError, short_repr
from ..kernels.linear.int4 import Int4Options

METHODS = ("int8", "fp8", "int4")
_GROUP_SIZES = (32, 64, 128)
_ACTIVATIONS = ("16", "int8")
_KEYS = ("method", "towers", "group_size", "symmetric", "activations")
_DECODERS = ("language_model.", "mtp_layers.", "decoder.")  # the last in encoder-decoder models


@dataclass(frozen=True)
class Quantization:
    """`text`, `towers`: formats of the decoder's linear layers and of all others ("int8", "fp8", Int4Options, None: exact)."""

    text: str | Int4Options | None
    towers: str | Int4Options | None

    def format_of(self, path: str) -> str | Int4Options | None:
        """Return the format of a Linear at this path of the model."""
        return self.text if path.startswith(_DECODERS) else self.towers

    @property
    def uses_int4(self) -> bool:
        return any(isinstance(options, Int4Options) for options in (self.text, self.towers))

    @property
    def uses_8_bits(self) -> bool:
        return any(isinstance(options, str) for options in (self.text, self.towers))


def parse_quantization(value: str | Mapping[str, Any]) -> Quantization:
    """Parse a method, or a mapping of `method` and its options. Raise ConfigError for an unknown key or value."""
    options: dict[str, Any] = {"method": value} if isinstance(value, str) else dict(value)
    unknown = [key for key in options if key not in _KEYS]
    if unknown:
        raise ConfigError(f"quantization has an unknown key {short_repr(unknown[0])}; it may have {', '.join(_KEYS)}",
                          param="quantization")  # fmt: skip
    method = options.get("method", "int4" if options.keys() - {"towers"} else None)
    _check("method", method, (*METHODS, None) if "towers" in options else METHODS)
    towers = options.get("towers", None if method == "int4" else method)
    _check("towers", towers, (*METHODS, None))
    for key, values in (("group_size", _GROUP_SIZES), ("symmetric", (True, False)), ("activations", _ACTIVATIONS)):
        if key in options:
            _check(key, options[key], values)
            if "int4" not in (method, towers):
                raise ConfigError(f"quantization has {key}, which is for the method int4; leave it out", param="quantization")
    symmetric, int8_rows = bool(options.get("symmetric", True)), options.get("activations") == "int8"
    int4 = Int4Options(options.get("group_size", 128), symmetric, int8_rows)
    return Quantization(text=int4 if method == "int4" else method, towers=int4 if towers == "int4" else towers)


def _check(key: str, value: object, values: tuple[object, ...]) -> None:
    if not isinstance(value, str | int | None) or value not in values:
        choice = ", ".join(map(repr, values))
        raise ConfigError(f"quantization has {key}={short_repr(value)}; it must be one of {choice}", param="quantization")
