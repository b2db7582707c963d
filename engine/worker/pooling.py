"""What a prompt's last row gives instead of an answer: a vector, or the logits of a few tokens. Knows no scheduler, no text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Pooling:
    """`token_ids`: whose logits are wanted; none: the last hidden state, scaled to length 1."""

    token_ids: tuple[int, ...] = ()


def pool(hidden: Tensor, wanted: Sequence[Pooling], compute_logits: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Float32 `[hidden]`, or `[tokens]`, of each of the last rows `[n, hidden]`, on the CPU."""
    logits = compute_logits(hidden) if any(one.token_ids for one in wanted) else hidden
    vectors = F.normalize(hidden.float(), dim=-1)
    return [
        (logits[i, list(one.token_ids)] if one.token_ids else vectors[i]).float().cpu().clone() for i, one in enumerate(wanted)
    ]
