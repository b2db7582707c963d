"""Imports transformers, which trains the shipped models and is their reference."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def transformers() -> Any:
    """Import transformers, even if torchvision was built for another torch."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
    from oracle import ensure_torchvision

    ensure_torchvision()
    import transformers

    return transformers
