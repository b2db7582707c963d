"""Which replica computes a request: the one whose caches probably have its media or the beginning of its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from math import ceil
from random import random
from typing import Any

_PREFIX = 1024
"""Characters of the text that choose the replica. A longer beginning would send each question about one document elsewhere."""
_MEDIA = frozenset(
    ("uuid", "url", "image", "images", "image_url", "video", "video_url", "audio", "audio_url", "data", "file_data")
)
"""Fields whose text is an item, or names one. `uuid` comes first: with it, later requests may leave out the item."""
_LEADING = ("system", "instructions", "messages", "input", "prompt", "images", "query", "text_1")
"""Fields of the bodies of all APIs that become the beginning of a prompt, in this order."""
SLACK = 4
"""Requests that a replica may have before any goes to another one: an engine computes them in the same steps."""
FACTOR = 1.25
"""How much above the mean of all replicas the requests of one may be (consistent hashing with bounded loads)."""


def routing_key(body: object, tenant: str | None = None) -> str | None:
    """Return a key that is equal for requests which share cached encoder rows or KV blocks, or None if nothing tells.

    Requests about the same first item have the same key; without items, those with the same beginning of the text up to the
    first message of the user, such as the turns of a conversation.

    Args:
        body: the JSON of a request, of any API.
        tenant: see `guard.TENANT`. Tenants share no cache.
    """
    if not isinstance(body, Mapping):
        return None
    texts: list[str] = []
    for name in _LEADING:
        for field, text in _strings(name, _first_turn(body.get(name))):
            if field in _MEDIA or text.startswith("data:"):
                return _digest("item", tenant, body.get("cache_salt"), text)
            texts.append(text)
    prefix = "\n".join(texts)[:_PREFIX]
    return _digest("text", tenant, body.get("cache_salt"), prefix) if prefix else None


def _first_turn(value: object) -> object:
    """Return messages up to the first one of the user, and other values as they are."""
    if not isinstance(value, list):
        return value
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in value]
    return value[: roles.index("user") + 1] if "user" in roles else value


def _strings(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the texts within a JSON value in their order, each with the name of its field."""
    stack: list[tuple[str, Any]] = [(name, value)]  # no recursion: a body may be nested deeply
    while stack:
        name, part = stack.pop()
        if isinstance(part, str):
            yield name, part
        elif isinstance(part, Mapping):
            fields = [(field, entry) for field, entry in part.items() if field != "uuid"][::-1]
            stack += [*fields, ("uuid", part.get("uuid"))]  # the last one is taken first
        elif isinstance(part, list):
            stack += [(name, entry) for entry in reversed(part)]


def _digest(*values: object) -> str:
    digest = blake2b(digest_size=16)
    for value in values:
        data = repr(value).encode() if value is None or not isinstance(value, str) else value.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def preferred(key: str | None, loads: Mapping[str, int]) -> Sequence[str]:
    """Return the replicas in the order in which a request tries them.

    With a key, the order is that of rendezvous hashing: if a replica comes or goes, only its own requests move. Replicas that
    have `SLACK` requests or more, and more than `FACTOR` times the mean, come last. Without a key, those with fewer requests
    come first.

    Args:
        loads: the requests in progress of each replica by its id.
    """
    if key is None:
        return sorted(loads, key=lambda replica: (loads[replica], random()))
    limit = max(SLACK, ceil(FACTOR * (sum(loads.values()) + 1) / max(1, len(loads))))
    return sorted(loads, key=lambda replica: (max(0, loads[replica] - limit + 1), _digest(key, replica)))
