"""The choice of the models that make room for another one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Occupant:
    """A model in memory, for the choice of what to unload.

    Args:
        num_bytes: what unloading it frees.
        last_used: time of its last request.
        is_busy: it must stay.
    """

    name: str
    num_bytes: int
    last_used: float
    is_busy: bool


def choose_victims(occupants: Collection[Occupant], needed: int, budget: int) -> list[str] | None:
    """Return the models to unload so that `needed` further bytes fit into the budget, or None if that is impossible.

    Those that were not used for the longest time come first. None is unloaded in vain: without any one of the victims, the
    bytes would not fit.
    """
    excess = sum(occupant.num_bytes for occupant in occupants) + needed - budget
    victims: list[Occupant] = []
    for occupant in sorted(occupants, key=lambda occupant: occupant.last_used):
        if sum(victim.num_bytes for victim in victims) >= excess:
            break
        if not occupant.is_busy and occupant.num_bytes > 0:
            victims.append(occupant)
    spare = sum(victim.num_bytes for victim in victims) - excess
    if spare < 0:
        return None
    for victim in sorted(
        victims, key=lambda occupant: -occupant.last_used
    ):  # a large old model may make a smaller one unnecessary
        if victim.num_bytes <= spare:
            spare -= victim.num_bytes
            victims.remove(victim)
    return [victim.name for victim in victims]
