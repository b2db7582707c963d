"""Causal convolution and linear recurrence: equal to transformers, to the reference, and the same bits in any batch."""

import pytest
import torch
from sensorium.kernels.dispatch import use_backends
from sensorium.kernels.metadata import AttentionMetadata
from sensorium.kernels.state import StepDecay, causal_conv, linear_recurrence

BOTH = pytest.mark.parametrize("backend", ["native", "torch"])


def batch(chunks, past):
    """Return metadata of sequences with `chunks` rows after `past` tokens. Sequence i reads slot i and writes slot i + n."""
    starts = [0]
    for rows in chunks:
        starts.append(starts[-1] + rows)
    count = len(chunks)
    lens = tuple(rows + before for rows, before in zip(chunks, past, strict=True))
    tables = torch.tensor([[i, i + count] for i in range(count)], dtype=torch.int32)
    return AttentionMetadata(tuple(starts), lens, tables, torch.zeros(0, dtype=torch.int64), 16)


def conv_inputs(rows, channels=37, taps=4, dtype=torch.float32):
    gen = torch.Generator().manual_seed(rows)
    wide = torch.randn(rows, channels + 5, generator=gen).to(dtype)
    return wide[:, 2:-3], torch.randn(taps, channels, generator=gen), torch.randn(channels, generator=gen)


def rule_inputs(rows, value_dim=24, delta=True, decays="head"):
    gen = torch.Generator().manual_seed(rows)
    q, k = (torch.randn(rows, 2, 20, generator=gen) * 0.3 for _ in range(2))
    v, decay = torch.randn(rows, 6, value_dim, generator=gen), torch.rand(rows, 6, generator=gen)
    beta = torch.rand(rows, 6, generator=gen) if delta else None
    if decays == "key":
        decay = torch.rand(rows, 6, 20, generator=gen)
    elif decays == "step":
        fixed = torch.Generator().manual_seed(0)  # the rates are weights
        decay = StepDecay(torch.rand(rows, 6, value_dim, generator=gen), -torch.rand(6, 20, value_dim, generator=fixed))
    return q, k, v, decay, beta


def select(part, rows):
    """Return the rows of an input of the recurrence."""
    if isinstance(part, StepDecay):
        return StepDecay(part.steps[rows], part.rates)
    return None if part is None else part[rows]


def join(parts):
    if isinstance(parts[0], StepDecay):
        return StepDecay(torch.cat([part.steps for part in parts]), parts[0].rates)
    return None if parts[0] is None else torch.cat(parts)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution_equals_torch(backend, dtype):
    x, weight, bias = conv_inputs(9, dtype=dtype)
    states = torch.full((2, 3 * 37), torch.nan)
    with use_backends(f"causal_conv={backend}"):
        found = causal_conv(x, weight, bias, states, batch([9], [0]))
    padded = torch.nn.functional.pad(x.float().T, (3, 0))[None]
    expected = torch.nn.functional.conv1d(padded, weight.T[:, None], bias, groups=37)[0].T
    torch.testing.assert_close(found, expected.to(dtype), rtol=1e-5, atol=1e-5)
    assert torch.equal(states[1].view(3, 37), x[-3:].float()), "the last inputs"


@BOTH
@pytest.mark.parametrize("value_dim", [16, 24])
def test_delta_rule_equals_transformers(backend, value_dim):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    q, k, v, decay, beta = rule_inputs(11, value_dim)
    start = torch.randn(6, 20, value_dim)
    expected, last = torch_recurrent_gated_delta_rule(
        q[None], k[None], v[None], decay.log()[None], beta[None], start[None].clone(), True
    )
    states = torch.cat((start.flatten()[None], torch.full((1, start.numel()), torch.nan)))
    with use_backends(f"linear_recurrence={backend}"):
        found = linear_recurrence(q * 20**-0.5, k, v, decay, beta, states, batch([11], [5]))
    torch.testing.assert_close(found, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states[1].view_as(last[0]), last[0], rtol=1e-5, atol=1e-5)


@BOTH
def test_decays_by_key_equal_transformers(backend):
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

    q, k, v, decay, beta = rule_inputs(11, decays="key")
    q, k, start = q.repeat_interleave(3, 1), k.repeat_interleave(3, 1), torch.randn(6, 20, 24)
    expected, last = recurrent_kimi_delta_attention(
        q[None], k[None], v[None], decay.log()[None], beta[None], start[None].clone(), True
    )
    states = torch.cat((start.flatten()[None], torch.full((1, start.numel()), torch.nan)))
    with use_backends(f"linear_recurrence={backend}"):
        found = linear_recurrence(q * 20**-0.5, k, v, decay, beta, states, batch([11], [5]))
    torch.testing.assert_close(found, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states[1].view_as(last[0]), last[0], rtol=1e-5, atol=1e-5)


@BOTH
def test_decays_by_step_equal_transformers(backend):
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    gen = torch.Generator().manual_seed(1)
    channels, steps = torch.randn(9, 48, generator=gen), torch.rand(9, 48, generator=gen)
    rates, keys, queries = -torch.rand(48, 20, generator=gen), *(torch.randn(9, 1, 20, generator=gen) for _ in range(2))
    expected, last = mamba_selective_scan(
        channels.T[None], steps.T[None], rates, keys[:, 0].T[None], queries[:, 0].T[None], return_last_state=True
    )
    heads = [part.view(9, 3, 16) for part in (channels * steps, steps)]
    states = torch.full((2, rates.numel()), torch.nan)
    with use_backends(f"linear_recurrence={backend}"):
        decay = StepDecay(heads[1], rates.view(3, 16, 20).transpose(1, 2))
        found = linear_recurrence(queries, keys, heads[0], decay, None, states, batch([9], [0]))
    torch.testing.assert_close(found.flatten(1), expected[0].T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states[1].view(3, 20, 16).transpose(1, 2).reshape(48, 20), last[0], rtol=1e-5, atol=1e-5)


@BOTH
def test_recurrence_without_delta_is_a_decayed_sum(backend):
    q, k, v, decay, _ = rule_inputs(5, delta=False)
    with use_backends(f"linear_recurrence={backend}"):
        found = linear_recurrence(q, k, v, decay, None, torch.full((2, 6 * 20 * 24), torch.nan), batch([5], [0]))
    scores = torch.einsum("ahd,bhd->hab", q, k).repeat_interleave(3, 0)
    sums = decay.log().cumsum(0)
    scores = (scores * (sums[:, None] - sums[None]).permute(2, 0, 1).exp()).tril()
    torch.testing.assert_close(found, torch.einsum("hab,bhd->ahd", scores, v), rtol=1e-4, atol=1e-5)


@BOTH
@pytest.mark.parametrize("op", ["conv", "delta", "sum", "key", "step"])
def test_bits_depend_on_neither_chunks_nor_batch(backend, op):
    """Three sequences in one batch of chunks of any size give the bits of each sequence alone in one step."""
    lengths = (13, 6, 1)
    parts = [conv_inputs(n)[:1] if op == "conv" else rule_inputs(n, delta=op in ("delta", "key"), decays=op) for n in lengths]
    _, weight, bias = conv_inputs(1)
    size = 3 * 37 if op == "conv" else 6 * 20 * 24

    def run(inputs, states, meta):
        if op == "conv":
            return causal_conv(inputs[0], weight, bias, states, meta)
        return linear_recurrence(*inputs, states, meta)

    with use_backends(f"causal_conv={backend},linear_recurrence={backend}"):
        alone = [run(part, torch.zeros(2, size), batch([n], [0])) for part, n in zip(parts, lengths, strict=True)]
        done, states = [0, 0, 0], torch.full((3, size), torch.nan)
        for step in ((5, 6, 1), (1, 0, 0), (7, 0, 0)):
            here = [i for i in range(3) if step[i]]
            rows = [slice(done[i], done[i] + step[i]) for i in here]
            joined = [
                join([select(one, at) for one, at in zip(part, rows, strict=True)])
                for part in zip(*(parts[i] for i in here), strict=True)
            ]
            slots = torch.cat((states[here], torch.full((len(here), size), torch.nan)))
            found = run(joined, slots, batch([step[i] for i in here], [done[i] for i in here]))
            expected = torch.cat([alone[i][at] for i, at in zip(here, rows, strict=True)])
            assert torch.equal(found, expected)
            states[here] = slots[len(here) :]
            for i in here:
                done[i] += step[i]
    assert done == list(lengths)
