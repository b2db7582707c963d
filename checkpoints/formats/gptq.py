"""GPTQ with 4 or 8 bits: codes packed along inputs, zero points along outputs, with or without a reordering of the inputs.

Source: arXiv 2210.17323; the packing of AutoGPTQ and GPTQModel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.linear.grouped import GroupedWeight
from .base import check_keys, check_pattern, empty, group_size, in_decoder, name_patterns, names_match, scale_dtype, unsupported
from .integers import integer_weight, unpack


@dataclass(frozen=True)
class GptqFormat:
    """A weight with one scale and one zero point per group of inputs.

    Args:
        group: inputs that share a scale, None: all.
        ordered: groups are of inputs in another order (`desc_act`).
        shifted: stored zero points are one too low, as in the first version of the format.
        dtype: of the scales.
    """

    bits: int
    group: int | None
    ordered: bool
    shifted: bool
    dtype: torch.dtype = torch.float16

    def layout(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        groups, each = -(-inputs // (self.group or inputs)), 32 // self.bits
        tensors = {
            "qweight": empty(-(-inputs // each), outputs, dtype=torch.int32),
            "qzeros": empty(groups, -(-outputs // each), dtype=torch.int32),
            "scales": empty(groups, outputs, dtype=self.dtype),
        }
        return tensors | ({"g_idx": empty(inputs, dtype=torch.int32)} if self.ordered else {})

    def decode(self, parts: Mapping[str, Tensor]) -> GroupedWeight:
        index, scales = parts.get("g_idx"), parts["scales"]
        codes = unpack(parts["qweight"].t(), self.bits).t()
        zero = unpack(parts["qzeros"], self.bits)[:, : scales.shape[1]]
        if self.shifted:
            zero = (zero + 1) & ((1 << self.bits) - 1)
        group = self.group or len(codes)
        if not self.ordered and index is not None and not index.is_meta:
            plain = torch.arange(len(codes), device=index.device) // group
            if not torch.equal(index.long(), plain):
                raise ValueError("g_idx reorders the inputs, and desc_act in config.json is false")
        order = index.int() if self.ordered and index is not None else None
        return integer_weight(codes, scales, zero, self.bits, group, order)


@dataclass(frozen=True)
class GptqQuantization:
    """The settings of all modules.

    Args:
        form: the format of modules without rules of their own.
        rules: regexes of modules and their changed settings, None for wide modules.
    """

    form: GptqFormat
    rules: Sequence[tuple[str, Mapping[str, Any] | None]]
    wide: Sequence[str]
    parts: Sequence[str] = ("qweight", "qzeros", "scales", "g_idx")

    def format_of(self, names: Sequence[str], stored: Mapping[str, Tensor] | None) -> GptqFormat | None:
        rule = next((rule for rule in self.rules if any(re.match(rule[0], name) for name in names)), None)
        if stored is None:
            if not in_decoder(names) or names_match(names, self.wide) or (rule is not None and rule[1] is None):
                return None
        elif "qweight" not in stored:
            return None
        weight_format = replace(self.form, dtype=scale_dtype(stored, "scales", torch.float16))
        if rule is not None and rule[1] is not None:
            weight_format = _changed(weight_format, rule[1], names[0])
        return weight_format


def _changed(base: GptqFormat, settings: Mapping[str, Any], module: str) -> GptqFormat:
    if settings.get("bits", base.bits) not in (4, 8):
        raise unsupported(f"gptq with {settings['bits']} bits", module, "4 or 8 bits")
    group = group_size(settings["group_size"]) if "group_size" in settings else base.group
    ordered = bool(settings.get("desc_act", base.ordered))
    return replace(base, bits=settings.get("bits", base.bits), group=group, ordered=ordered)


def read_gptq(config: Mapping[str, Any]) -> GptqQuantization:
    """Read the config. Raise CheckpointError for another number of bits or another layout."""
    bits = config.get("bits", 4)
    checked = {"bits": bits, "checkpoint_format": config.get("checkpoint_format") or "gptq"}
    check_keys(checked, {"bits": (4, 8), "checkpoint_format": ("gptq", "gptq_v2")}, "gptq")
    shifted, rules = checked["checkpoint_format"] == "gptq", []
    for pattern, settings in (config.get("dynamic") or {}).items():
        kind, regex = (pattern[:2], pattern[2:]) if pattern[:2] in ("+:", "-:") else ("+:", pattern)
        check_pattern("dynamic", regex)
        rules.append((regex, None if kind == "-:" else dict(settings)))
    weight_format = GptqFormat(bits, group_size(config.get("group_size", -1)), bool(config.get("desc_act")), shifted)
    return GptqQuantization(weight_format, rules, name_patterns(config, "modules_to_not_convert"))
