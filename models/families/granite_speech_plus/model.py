"""Granite Speech Plus: Granite Speech, whose Q-Former reads several states of the conformer side by side.

Source: the class of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....callers.errors import ConfigError
from ...audio.conformer import ConformerSpec
from ..granite_speech.model import GraniteSpeech


class GraniteSpeechPlus(GraniteSpeech):
    """A model of audio."""

    def encoder_spec(self, audio: Mapping[str, Any]) -> ConformerSpec:
        spec, states = super().encoder_spec(audio), audio.get("cat_hidden_layers") or []
        if not isinstance(states, list) or any(state not in range(spec.layers) for state in states):
            raise ConfigError(
                f"cat_hidden_layers of encoder_config is {states!r}; its numbers must be from 0 to {spec.layers - 1}"
            )
        return replace(spec, states=tuple(sorted(set(states))))
