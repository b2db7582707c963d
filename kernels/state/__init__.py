"""Layers with a state per sequence: causal convolution, and linear recurrence (Mamba 2, gated delta nets, linear attention).

A step reads the state of each sequence from one slot of a cache and writes the new one to another: the two entries of the
sequence's block table. A sequence whose first token is in the step begins with zeros. A row's bits depend only on its sequence,
not on the batch or on where the sequence is cut into chunks.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..dispatch import implementation
from ..metadata import AttentionMetadata


class StepDecay(NamedTuple):
    """Decays of Mamba 1: element (i, j) of a head's state decays by `exp(rates[i, j] * steps[j])`.

    Attributes:
        steps: float32 `[rows, heads, value_dim]`.
        rates: float32 `[heads, key_dim, value_dim]`, negative.
    """

    steps: Tensor
    rates: Tensor


Decay = Tensor | StepDecay
"""Decays of states: float32 `[rows, heads]`; or `[rows, heads, key_dim]`, each for a row of the matrix; or a StepDecay."""


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, meta: AttentionMetadata) -> Tensor:
    """Convolve each channel of each sequence with its last inputs, summed in float32.

    Args:
        x: `[rows, channels]`; rows may be strided.
        weight: float32 `[taps, channels]`; the last tap is that of the row itself.
        bias: float32 `[channels]`.
        states: float32 `[slots, (taps - 1) * channels]`, slots may be strided: the last inputs, oldest first.

    Returns:
        `[rows, channels]` in x's dtype.
    """
    convolved: Tensor = implementation("causal_conv", x.device, x.dtype).causal_conv(x, weight, bias, states, meta)
    return convolved


def linear_recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Decay, beta: Tensor | None, states: Tensor, meta: AttentionMetadata
) -> Tensor:
    """Compute `S = decay * S + k v'` and `q' S` for each row of a sequence in turn, with a matrix S per head.

    With `beta`, the delta rule replaces v by `beta * (v - k' (decay * S))` (arXiv 2412.06464).

    Args:
        q, k: float32 `[rows, key_heads, key_dim]`; adjacent heads of v share one of them.
        v: float32 `[rows, heads, value_dim]`.
        decay: see Decay. beta: float32 `[rows, heads]`.
        states: float32 `[slots, heads * key_dim * value_dim]`, slots may be strided.

    Returns:
        float32 `[rows, heads, value_dim]`.
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    decay = StepDecay(*(part.contiguous() for part in decay)) if isinstance(decay, StepDecay) else decay.contiguous()
    beta = None if beta is None else beta.contiguous()
    out: Tensor = implementation("linear_recurrence", v.device, v.dtype).linear_recurrence(q, k, v, decay, beta, states, meta)
    return out
