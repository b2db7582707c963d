"""Requests of a load: when they come, how long they are, and which items they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random


@dataclass(frozen=True)
class Kind:
    """One kind of request in a mix.

    Args:
        weight: its share, relative to those of the other kinds.
        text_tokens, output_tokens: means; lengths are spread evenly from half of the mean to one and a half of it.
        items: images (or sounds) of a request.
        item_rows: encoder rows, which are also prompt tokens, of an item.
        repeats: share of the items that an earlier request had.
    """

    weight: float
    text_tokens: int
    output_tokens: int
    items: int = 0
    item_rows: int = 0
    repeats: float = 0.0


@dataclass(frozen=True)
class Item:
    """An item of a prompt. `key`: equal for the same item."""

    key: int
    rows: int


@dataclass(frozen=True)
class Request:
    """One request. `arrival`: seconds from the start. `prompt_tokens`: with those of the items."""

    number: int
    arrival: float
    prompt_tokens: int
    output_tokens: int
    items: Sequence[Item] = ()

    @property
    def rows(self) -> int:
        """Encoder rows of all items."""
        return sum(item.rows for item in self.items)


@dataclass(frozen=True)
class Load:
    """Poisson arrivals. `rate`: requests per second. `count`: number of requests."""

    mix: Sequence[Kind]
    rate: float
    count: int


def make_requests(load: Load, seed: int) -> list[Request]:
    """Return the requests of a load. With another rate, the same requests come closer together or further apart."""
    if load.rate <= 0 or load.count < 1 or not load.mix:
        raise ValueError(f"a load needs a rate above 0, requests and a mix, not {load}")
    gaps, shapes = Random(f"{seed} gaps"), Random(f"{seed} shapes")
    arrivals = accumulate(gaps.expovariate(1.0) / load.rate for _ in range(load.count))
    weights = [kind.weight for kind in load.mix]
    items: list[Item] = []
    requests = []
    for number, arrival in enumerate(arrivals):
        (kind,) = shapes.choices(load.mix, weights)
        own = [_item(kind, items, shapes) for _ in range(kind.items)]
        prompt = _around(kind.text_tokens, shapes) + sum(item.rows for item in own)
        requests.append(Request(number, arrival, prompt, _around(kind.output_tokens, shapes), own))
    return requests


def _around(mean: int, random: Random) -> int:
    """Return a length from half of the mean to one and a half of it, 1 or above."""
    return max(1, random.randint(mean - mean // 2, mean + mean // 2))


def _item(kind: Kind, items: list[Item], random: Random) -> Item:
    """Return an earlier item of the same size, or a new one."""
    same = [item for item in items if item.rows == kind.item_rows] if random.random() < kind.repeats else []
    if same:
        return random.choice(same)
    items.append(Item(len(items), kind.item_rows))
    return items[-1]
