"""`sensorium tune` without a GPU."""

from __future__ import annotations

import pytest
from sensorium.cli.main import main


def test_it_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--device", "cpu"]) == 2
    assert "sensorium tune needs a GPU" in capsys.readouterr().err
