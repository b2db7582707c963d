"""The policy "shortest_prompt_first": of equal priority, the sequence with the fewest tokens left to compute comes first.

The mean time to the first token falls when prompts differ much in length. A long prompt waits while shorter ones arrive; give
it a more urgent priority if it must not.
"""

from __future__ import annotations

from .policy import Order, SchedulingPolicy, Work


class ShortestPromptFirst(SchedulingPolicy):
    """Shortest remaining prompt first. Prompts that are not tokenised yet are equally long."""

    def order(self, work: Work) -> Order:
        return work.priority, work.remaining, work.arrival
