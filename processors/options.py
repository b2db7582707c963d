"""The caller's `mm_processor_kwargs`: flat keys for every modality, nested ones for one. Knows no family."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from ..mm.errors import ConfigError


def for_modality(options: Mapping[str, Any], modality: str, known: Collection[str]) -> dict[str, Any]:
    """The options that hold for one modality: flat ones, overlaid with those under `<modality>s_kwargs`.

    `{"size": {"shortest_edge": 64}, "images_kwargs": {"size": {"longest_edge": 1024}}}` gives images both edges
    and videos the first only. ConfigError names an unknown key and the nearest known one.
    """
    nests = ("images_kwargs", "videos_kwargs")
    if not all(isinstance(options.get(key) or {}, Mapping) for key in nests):
        raise ConfigError(f"{' and '.join(nests)} hold options by name, e.g. {{'max_pixels': 1003520}}")
    flat = {key: value for key, value in options.items() if key not in nests}
    nested = options.get(f"{modality}s_kwargs") or {}
    for key in (*flat, *nested):
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4) or [", ".join(sorted(known))]
            raise ConfigError(f"unknown processing option {key!r}; did you mean {near[0]}?")
    merged = flat | dict(nested)
    if isinstance(flat.get("size"), Mapping) and isinstance(nested.get("size"), Mapping):
        merged["size"] = {**flat["size"], **nested["size"]}
    return merged
