"""Frequencies of rotary positions, for each rope type that configs name.

Sources: arXiv 2306.15595 (linear), arXiv 2309.00071 (dynamic, yarn), arXiv 2407.21783 (llama3), transformers (proportional).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...callers.errors import ConfigError
from ...kernels.rope import rotary_cos_sin
from .spec import RopeSpec

FOURIER = "fourier"
"""Rope type of mixed frequencies; see `text.fourier`."""


class CosSin(NamedTuple):
    """Cosines and sines of a step's rows, float32 `[rows, dim / 2]` each, factors of their queries, and positions, `[rows]`.

    If heads of keys have cosines and sines of their own, these are `[kv_heads, rows, dim / 2]`.
    """

    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None = None
    positions: Tensor | None = None


class Rotary:
    """Positions `[axes, rows]` -> cosines and sines of each row."""

    def __init__(self, rope: RopeSpec, device: torch.device) -> None:
        frequencies, self.factor = scaled_frequencies(rope)
        self.frequencies = frequencies.to(device)
        self.axes = torch.tensor(rope.axes, device=device)
        beta = rope.scaling.get("llama_4_scaling_beta")
        self.query_growth = (beta, rope.scaling["original_max_position_embeddings"]) if beta else None

    def __call__(self, positions: Tensor) -> CosSin:
        cos, sin = rotary_cos_sin(positions, self.frequencies, self.axes)
        if self.factor != 1.0:
            cos, sin = cos * self.factor, sin * self.factor
        return CosSin(cos, sin, self._query_scale(positions[0]), positions[0])

    def _query_scale(self, positions: Tensor) -> Tensor | None:
        """Return factors of queries that grow with the logarithm of the position beyond the trained length."""
        if self.query_growth is None:
            return None
        beta, trained = self.query_growth
        scale: Tensor = 1 + beta * torch.log1p(torch.floor(positions / trained))
        return scale


class Temperature:
    """Positions `[axes, rows]` -> factors of queries in layers without rotary positions; see AttentionSpec."""

    def __init__(self, growth: float, interval: float) -> None:
        self.growth, self.interval = growth, interval

    def __call__(self, positions: Tensor) -> CosSin:
        scale = 1 + self.growth * torch.log1p(torch.floor((positions[0] + 1) / self.interval))
        none = scale[:, None][:, :0]
        return CosSin(none, none, scale)


def scaled_frequencies(rope: RopeSpec) -> tuple[Tensor, float]:
    """Return float32 `[dim / 2]` frequencies, and the factor of cosines and sines."""
    plain = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / (rope.dim - rope.odd))
    if not rope.scaling:
        return plain, 1.0
    try:
        return SCALINGS[scaling_type(rope.scaling)](plain, rope)
    except KeyError as missing:
        raise ConfigError(f"rope_parameters in config.json lack {missing}, which their rope_type needs") from None


def scaling_type(scaling: Mapping[str, Any]) -> str:
    """Return the rope type of raw rope parameters; ConfigError for an unknown one. "mrope" (three axes) counts as default."""
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind in ("mrope", "default"):
        return "default"
    kind = "longrope" if kind == "su" else kind
    if kind not in SCALINGS:
        raise ConfigError(f"rope type {kind!r} is not supported; known are default, {', '.join(SCALINGS)}")
    return str(kind)


def _linear(plain: Tensor, rope: RopeSpec) -> tuple[Tensor, float]:
    return plain / rope.scaling["factor"], 1.0


def _dynamic(plain: Tensor, rope: RopeSpec) -> tuple[Tensor, float]:
    """Return frequencies of a base that `alpha` stretches (Hunyuan), or else the plain ones.

    Without `alpha`, the base grows beyond `max_position_embeddings` only, which no sequence exceeds.
    """
    alpha = rope.scaling.get("alpha") or 1.0
    return plain / alpha ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / (rope.dim - 2)), 1.0


def _ntk(plain: Tensor, rope: RopeSpec) -> tuple[Tensor, float]:
    """Stretch the base by `factor`, and all frequencies so that the lowest is divided by it (mGTE)."""
    if rope.scaling.get("mixed_b") is not None:
        raise ConfigError("mixed_b in rope_scaling of config.json is not supported; it must be null")
    factor, exponents = rope.scaling["factor"], torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    return 1.0 / (rope.theta * factor) ** exponents / factor ** (2 / rope.dim), 1.0


def _llama3(plain: Tensor, rope: RopeSpec) -> tuple[Tensor, float]:
    """Scale low frequencies down, keep high ones, interpolate those in between."""
    s = rope.scaling
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    rotations = s["original_max_position_embeddings"] * plain / (2 * math.pi)
    share = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - share) * plain / s["factor"] + share * plain, 1.0


def _proportional(plain: Tensor, rope: RopeSpec) -> tuple[Tensor, float]:
    """Rotate only the first pairs of a head, by `partial_rotary_factor`, with the frequencies of a whole head (Gemma 4)."""
    rotated = int(rope.scaling.get("partial_rotary_factor", 1.0) * rope.dim // 2)
    return torch.where(torch.arange(len(plain)) < rotated, plain / rope.scaling["factor"], 0.0), 1.0


def _fourier(plain: Tensor, rope: RopeSpec) -> tuple[Tensor, float]:
    """Keep the first `num_inv_freq` frequencies, or those that make a whole turn within the trained length."""
    count, trained = rope.scaling.get("num_inv_freq"), rope.scaling["original_max_position_embeddings"]
    return plain[plain > 2 * math.pi / trained] if count is None else plain[:count], 1.0


def _factors(plain: Tensor, rope: RopeSpec) -> tuple[Tensor, float]:
    """Divide each frequency by its own factor (the `rope_freqs` of GGUF files)."""
    return plain / torch.tensor(rope.scaling["factors"]), 1.0


def _yarn(plain: Tensor, rope: RopeSpec) -> tuple[Tensor, float]:
    """Keep high frequencies, scale low ones down, with a linear ramp over the dimensions in between."""
    s, trained = rope.scaling, rope.scaling["original_max_position_embeddings"]
    factor = s["factor"]

    def dimension(rotations: float) -> float:
        return rope.dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(s.get("beta_fast") or 32), dimension(s.get("beta_slow") or 1)
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = ((torch.arange(len(plain), dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp), _yarn_attention(s, factor)


def _longrope(plain: Tensor, rope: RopeSpec) -> tuple[Tensor, float]:
    """Scale each frequency for sequences up to the trained length, which no sequence exceeds (`DecoderSpec.max_positions`)."""
    s = rope.scaling
    if len(s["short_factor"]) != len(plain):
        raise ConfigError(f"short_factor in config.json has {len(s['short_factor'])} numbers; it must have {len(plain)}")
    factor, attention = s["factor"], s.get("short_mscale") or s.get("attention_factor")  # short_mscale: Phi-MoE's
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(s["original_max_position_embeddings"]))
    return plain / torch.tensor(s["short_factor"], dtype=torch.float32), float(attention)


def _yarn_attention(s: Mapping[str, Any], factor: float) -> float:
    if s.get("attention_factor") is not None:
        return float(s["attention_factor"])
    if s.get("mscale") and s.get("mscale_all_dim"):
        return yarn_mscale(factor, s["mscale"]) / yarn_mscale(factor, s["mscale_all_dim"])
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """Return the attention temperature factor for a context extended by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


SCALINGS: dict[str, Callable[[Tensor, RopeSpec], tuple[Tensor, float]]] = {
    "factors": _factors,
    "linear": _linear,
    "dynamic": _dynamic,
    "ntk": _ntk,
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    FOURIER: _fourier,
}
