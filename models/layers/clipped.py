"""Linear layers of Gemma 4's encoders, which may clip their inputs and outputs."""

from __future__ import annotations

from torch import Tensor

from .builder import Builder

_LIMITS = ("input_min", "input_max", "output_min", "output_max")


class ClippedLinear:
    """A linear layer without bias whose inputs and outputs are clipped, if the checkpoint stores bounds (`clipped`)."""

    def __init__(self, name: str, inner: int, outer: int, build: Builder, clipped: bool) -> None:
        build = build.scope(name)
        self.linear = build.linear(["linear"], inner, [outer], False)
        self.limits = [build.stored(limit) for limit in _LIMITS] if clipped else []

    def __call__(self, x: Tensor) -> Tensor:
        if not self.limits:
            return self.linear(x)
        low, high, least, most = (limit.weight for limit in self.limits)
        return self.linear(x.clamp(low, high)).clamp_(least, most)
