"""Drafters whose further rows cost nothing, so that everything that may be right is verified, and drafts with mistakes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sensorium.engine.drafts.depth import StepCosts
from sensorium.engine.drafts.drafter import Drafter
from sensorium.engine.speculative_config import DraftLimits

FREE = (1.0,) * 16
ALL = DraftLimits(suffix=True, shortest=2, corpus_answers=100)


class _FreeDrafter(Drafter):
    """Predictions of the worker cost nothing either: their seconds, which are measured there, are left out."""

    def end_step(self, predict_seconds: float = 0.0, num_predicted: int = 0) -> None:
        super().end_step()


def free_drafter(
    vocab_size: int = 101, limits: DraftLimits = ALL, proposers: Any = (), costs: Sequence[float] = FREE
) -> Drafter:
    """Return a drafter without measured costs; on a busy machine they may allow no drafts."""
    return _FreeDrafter(limits, StepCosts(costs), vocab_size, proposers, now=lambda: 0.0)


def use(scheduler: Any, drafter: Drafter | None) -> None:
    """Let a scheduler draft with this drafter, or not at all."""
    scheduler.drafts.drafter = drafter


@contextmanager
def drafting(llm: Any, drafter: Drafter | None) -> Iterator[Any]:
    """Let an LLM or a server whose core is in this process draft with this drafter, or not at all."""
    scheduler = llm.engine.loop.core.scheduler
    before = scheduler.drafts.drafter
    use(scheduler, drafter)
    try:
        yield scheduler
    finally:
        use(scheduler, before)


def with_mistakes(token_ids: Sequence[int], vocab_size: int, seed: int = 0) -> tuple[int, ...]:
    """Return tokens with every fifth or so replaced."""
    rng = random.Random(seed)
    return tuple(rng.randrange(vocab_size) if rng.random() < 0.2 else token for token in token_ids)
