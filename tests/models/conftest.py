"""The families' checkpoints, once per session."""

from __future__ import annotations

import pytest
from parity import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("families"))
