"""Tests of the fallback run transformers' classes that sensorium implements as well."""

import fallbacks
import pytest


@pytest.fixture(autouse=True)
def native_classes_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    fallbacks.hide_native(monkeypatch)
