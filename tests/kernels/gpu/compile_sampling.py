"""Launches of the sampler with a large vocabulary."""

from __future__ import annotations

import torch
from sensorium.kernels.sampling import triton as sampling

HOT = {"_gather_kernel", "_sample_kernel", "_log_probs_kernel", "_penalties_kernel"}


def launches() -> None:
    for vocab in (151936, 128257):
        logits, rules = torch.empty(64, vocab), torch.empty(64, 5, dtype=torch.float64)
        for allowed in (None, torch.empty(64, -(-vocab // 32), dtype=torch.int32)):
            sampling.sample(logits, rules, allowed)
        sampling.log_probs(logits, torch.empty(64, dtype=torch.int64))
        rows = torch.empty(5000, dtype=torch.int64)
        sampling.apply_penalties_(logits, rows, rows, torch.empty(5000), torch.empty(64, 3))
