"""The weights of a mixture of experts, and the rule that chooses among the experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

Expert = Callable[[int, Tensor], Tensor]
"""Function from an expert's number and its rows `[n, dim]` to their results."""
Share = Callable[[Tensor, Sequence[int]], None]
"""Function that fills `[pairs, dim]`, ordered by expert, with the results of other processes' experts. Its second argument is
the number of pairs of each expert."""


@dataclass(frozen=True)
class RoutingConfig:
    """Rule that turns router logits into `top_k` experts and their weights; see `models.text.spec.MoeSpec`."""

    top_k: int
    scoring: str = "softmax"
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int = 1
    group_score: str = "top2"
    jitter: float = 0.0


@dataclass(frozen=True, eq=False)
class StackedWeight:
    """One linear layer of all experts.

    Args:
        weight: `[experts, out, in]`. bias: `[experts, out]`, or None.
        scale: float32 `[experts, out]` of a quantised weight (`eight_bit.Int8Weight`, `eight_bit.Fp8Weight`), or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None


@dataclass(frozen=True, eq=False)
class StackedExperts:
    """The gated MLPs of all experts, `down(act(gate(x)) * up(x))`; `gate_up` computes `[gate | up]`.

    `act` is a name that `activation.act_and_mul` takes, or one of `activation.IN_TORCH`: then the experts have no gate.
    """

    act: str
    gate_up: StackedWeight
    down: StackedWeight
