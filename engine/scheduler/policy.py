"""Which work comes first, which may take the place of other work, and which loses its blocks.

One policy decides that everywhere: for prompts in the input queue, for requests of a large call, and for sequences in the core.
A new policy is a subclass in a file of this folder, a row of POLICIES, and its name in `config.SCHEDULING_POLICIES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Protocol, TypeVar

Order = tuple[Any, ...]

POLICIES = {
    "fcfs": "policy:SchedulingPolicy",
    "priority": "policy:SchedulingPolicy",  # vLLM's name for first-come-first-served with priorities
    "shortest_prompt_first": "shortest_prompt_first:ShortestPromptFirst",
}
"""Name of a policy -> its file and class."""


class Work(Protocol):
    """The properties of a prompt, a request or a sequence by which a policy orders it."""

    @property
    def priority(self) -> int:
        """The caller's number; smaller values come first."""

    @property
    def arrival(self) -> Any:
        """Place in the order of arrival, which orders all work that is compared with this one."""

    @property
    def remaining(self) -> int:
        """Tokens that are not computed yet; 0 while they are not known."""


AnyWork = TypeVar("AnyWork", bound=Work)


@dataclass(frozen=True)
class Submitted:
    """Work that is not tokenised yet."""

    priority: int
    arrival: int
    remaining: int = 0


class SchedulingPolicy:
    """First come, first served, among work of equal priority."""

    def order(self, work: Work) -> Order:
        """Return the key that sorts work; smaller keys come first. No two keys are equal."""
        return work.priority, work.arrival

    def preempts(self, waiting: Work, running: Work) -> bool:
        """Return True if a sequence that waits takes the place of one that runs when there is no other."""
        return waiting.priority < running.priority

    def victim(self, idle: Iterable[AnyWork], waiting: Sequence[AnyWork], running: Sequence[AnyWork]) -> AnyWork | None:
        """Return which of these sequences loses its blocks: an idle one, else the last that waits, else the last that runs.

        `waiting` is in order.
        """
        last = max(running, key=self.order, default=None)
        return next((work for work in (*idle, *reversed(waiting))), last)

    def is_background(self, work: Work) -> bool:
        """Return True if preparing this work may take longer so that other work does not wait for it."""
        return work.priority > 0


def make_policy(name: str) -> SchedulingPolicy:
    """Return the policy of this name, one of `config.SCHEDULING_POLICIES`."""
    policy: SchedulingPolicy = resolve_name(f"{__package__}.{POLICIES[name]}")()
    return policy
