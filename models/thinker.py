"""Config and names of checkpoints that hold a thinker (perceives and writes) and possibly a talker (speaks).

The thinker is the model; `LLM(load_talker=True)` builds the talker beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..callers.errors import ConfigError

TALKER_PREFIXES = ("talker.", "token2wav.", "code2wav.")
"""Prefixes of the tensors that generate speech, which the thinker ignores."""


def thinker_config(config: Mapping[str, Any], tied: bool = False, **defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the thinker's part of a config.json, which may be nested below `thinker_config`.

    Args:
        tied: default of tie_word_embeddings; the key is read from this part only, not from its text section.
        defaults: required sections, each with the defaults of its keys.

    Raises:
        ConfigError: a section is missing or is not an object.
    """
    inner = config.get("thinker_config", config)
    for section in defaults:
        if not isinstance(inner, Mapping) or not isinstance(inner.get(section), Mapping):
            raise ConfigError(f"{section} in config.json must be an object")
    sections = {section: {**values, **inner[section]} for section, values in defaults.items()}
    sections["text_config"]["tie_word_embeddings"] = None
    return {"tie_word_embeddings": tied, **inner, **sections}


def with_thinker_prefix(prefixes: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return the prefixes, and before them the same ones for names below `thinker.`."""
    return (*((f"thinker.{stored}", name) for stored, name in prefixes), ("thinker.", ""), *prefixes)


def check_output_dim(out: int, hidden_size: int) -> None:
    """Raise ConfigError unless the audio tower's rows have the width of the decoder."""
    if out != hidden_size:
        raise ConfigError(f"output_dim {out} of audio_config in config.json is not hidden_size {hidden_size}")
