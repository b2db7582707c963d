"""Garbage collections of Python."""

from __future__ import annotations

import gc


def freeze_loaded() -> None:
    """Leave what is loaded now out of later garbage collections, each of which would pause steps for 0.1 s.

    For processes that keep it until they end. `gc.unfreeze` takes this back.
    """
    gc.collect()
    gc.freeze()
