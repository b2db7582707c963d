"""Measure speed of sampling, and compare its tokens with the reference."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sensorium.kernels.sampling import apply_penalties_, log_probs, sample
from sensorium.kernels.sampling.reference import apply_penalties_ as apply_penalties_reference_
from sensorium.kernels.sampling.reference import sample as sample_reference
from torch import Tensor

from . import exact
from .attention import timed
from .machine import Bench
from .parts import Made
from .record import Figure

_RULES = {  # temperature, top_k, top_p, logarithm of min_p
    "greedy": (0.0, 0, 1.0, -torch.inf),
    "temperature": (0.8, 0, 1.0, -torch.inf),
    "top_k 50, top_p 0.9": (0.8, 50, 0.9, -torch.inf),
    "top_p 0.9": (1.0, 0, 0.9, -torch.inf),
    "min_p 0.05": (1.0, 0, 1.0, -2.995732273553991),
}


def sampling(bench: Bench) -> Iterator[Made]:
    """Measure sampling over Qwen3's vocabulary, relative to reading the logits once."""
    rows, vocab = bench.pick((64, 151_936), (6, 200))
    logits = bench.randn(rows, vocab, dtype=torch.float32) * 3
    number = torch.rand(rows, 1, dtype=torch.float64, device=bench.device)
    for name, rule in _RULES.items():
        rules = torch.tensor(rule, dtype=torch.float64, device=bench.device).expand(rows, 4)
        rules = torch.cat((rules, number), 1)
        yield partial(_drawn, name, logits, rules)
        yield partial(timed, bench, f"{name}, {rows} x {vocab}", logits.nbytes, partial(sample, logits, rules))
    token = torch.randint(vocab, (rows,), device=bench.device)
    yield partial(_logged, logits, token)
    yield partial(timed, bench, f"log probabilities, {rows} x {vocab}", logits.nbytes, partial(log_probs, logits, token))
    yield partial(_penalties, bench, logits)


def _drawn(name: str, logits: Tensor, rules: Tensor) -> Figure:
    """Compare tokens: every row must agree whose result no rounding can change."""
    drawn, wrong = sample(logits, rules)
    same = (drawn == sample_reference(logits, rules)[0]) & (wrong == 0)
    return Figure(f"{name}, tokens of the reference", same.double().mean().item(), "of rows", least=0.96)


def _logged(logits: Tensor, token: Tensor) -> Iterator[Figure]:
    own, rank, _ = log_probs(logits, token)
    wide, chosen = logits.double(), token[:, None]
    yield exact.checked("log probabilities", own[:, None], wide.log_softmax(-1).gather(1, chosen))
    ranks = (wide > wide.gather(1, chosen)).sum(-1) + 1
    yield Figure("ranks that are right", (rank == ranks).double().mean().item(), "of rows", least=1.0)


def _penalties(bench: Bench, logits: Tensor) -> Figure:
    rows, vocab = logits.shape
    each = bench.pick(500, 9)
    row = torch.arange(rows, device=bench.device).repeat_interleave(each)
    token = torch.stack([torch.randperm(vocab, device=bench.device)[:each] for _ in range(rows)]).flatten()
    counts = torch.randint(0, 3, (len(row),), device=bench.device).float()
    penalties = torch.tensor([1.3, 0.4, 0.2], device=bench.device).expand(rows, 3).contiguous()
    found, wanted = logits.clone(), logits.double()
    apply_penalties_(found, row, token, counts, penalties)
    apply_penalties_reference_(wanted, row, token, counts.double(), penalties.double())
    return exact.checked("penalties", found, wanted)
