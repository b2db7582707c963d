"""Configs of decoders whose tokens all attend to each other, as those of embedders do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...checkpoints.config import positive_int
from .stack import Stack

_FLAG, _WINDOW = "use_bidirectional_attention", "sliding_window"


def attends_to_all(text: Mapping[str, Any], stack: Stack) -> bool:
    """Return True if every token of a prompt attends to all others, those of layers with a window to as many on both sides."""
    return text.get("is_causal") is False or _has_flag(text, stack)


def one_sided(text: Mapping[str, Any], stack: Stack) -> Mapping[str, Any]:
    """Return the config of a causal decoder whose windows reach as far back as those of this one reach to both sides.

    `use_bidirectional_attention` halves windows. With `is_causal: false`, which its value "all" implies, tokens that are
    `sliding_window` away are seen, too.
    """
    if not attends_to_all(text, stack):
        return text
    window = text.get(_WINDOW, stack.defaults.get(_WINDOW))
    if window is not None:
        window = positive_int({_WINDOW: window}, _WINDOW)
        window = window // 2 + 1 if _has_flag(text, stack) else window
        window += text.get("is_causal") is False or text.get(_FLAG) == "all"
    return {**text, "is_causal": True, _FLAG: None, _WINDOW: window}


def _has_flag(text: Mapping[str, Any], stack: Stack) -> bool:
    return stack.bidirectional is not None and text.get(_FLAG) == stack.bidirectional
