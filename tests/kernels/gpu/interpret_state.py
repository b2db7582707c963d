"""The kernels of layers with a state against torch."""

from __future__ import annotations

import pytest
import torch
from sensorium.kernels import state as reference
from sensorium.kernels.dispatch import use_backends
from sensorium.kernels.gpu import launch_config
from sensorium.kernels.metadata import AttentionMetadata
from sensorium.kernels.state import triton as state


def batch() -> AttentionMetadata:
    """Three sequences: five rows that begin with zeros, one and seven rows after others; then a padding row of a graph."""
    tables = torch.tensor([[0, 3], [1, 4], [2, 5], [0, 0]], dtype=torch.int32)
    return AttentionMetadata((0, 5, 6, 13, 14), (5, 9, 20, 0), tables, torch.zeros(0, dtype=torch.int64), 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_convolution(dtype: torch.dtype, with_bias: bool) -> None:
    x, weight = torch.randn(14, 50).to(dtype)[:, 4:44], torch.randn(4, 40)
    bias, start = torch.randn(40) if with_bias else None, torch.randn(6, 3 * 40 + 8)
    ours, theirs = start.clone(), start.clone()
    with launch_config.override_config("causal_conv", {"BLOCK": 16}):
        found = state.causal_conv(x, weight, bias, ours[:, :120], batch())
    with use_backends("causal_conv=torch"):
        wanted = reference.causal_conv(x, weight, bias, theirs[:, :120], batch())
    torch.testing.assert_close(found[:13], wanted[:13])
    assert torch.equal(ours, theirs)
    assert torch.equal(ours[:3], start[:3]), "a state that is read, or that a padding row names, is not written"


KINDS = [(2, True, "head"), (2, False, "head"), (6, False, "head"), (6, True, "key"), (1, False, "step")]
"""Key heads, delta rule, and decays of gated delta nets, Mamba 2, lightning attention, Kimi delta attention and Mamba 1."""


@pytest.mark.parametrize(("key_heads", "delta", "decays"), KINDS)
@pytest.mark.parametrize("value_dim", [16, 40])
def test_recurrence(key_heads: int, delta: bool, decays: str, value_dim: int) -> None:
    q, k, v = torch.randn(14, key_heads, 20), torch.randn(14, key_heads, 20) * 0.3, torch.randn(14, 6, value_dim)
    beta, start = torch.rand(14, 6) if delta else None, torch.randn(6, 120 * value_dim + 8)
    decay: reference.Decay = torch.rand(14, 6) if decays == "head" else torch.rand(14, 6, 20)
    if decays == "step":
        decay = reference.StepDecay(torch.rand(14, 6, value_dim), -torch.rand(6, 20, value_dim))
    ours, theirs = start.clone(), start.clone()
    found = state.linear_recurrence(q, k, v, decay, beta, ours[:, 8:], batch())
    with use_backends("linear_recurrence=torch"):
        wanted = reference.linear_recurrence(q, k, v, decay, beta, theirs[:, 8:], batch())
    torch.testing.assert_close(found[:13], wanted[:13], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours[:3], start[:3])
