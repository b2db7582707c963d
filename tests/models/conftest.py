"""Fixtures that build the families' checkpoints once per session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import fallbacks
import pytest
from parity import LoadedModels


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModels:
    return LoadedModels(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that builds the checkpoint of a name in `fallbacks.BUILD` once and returns its folder."""
    root = tmp_path_factory.mktemp("fallback")
    return cache(lambda family: fallbacks.build(root / family, family))
