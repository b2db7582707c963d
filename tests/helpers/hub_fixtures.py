"""Fixtures of a fake Hub that serves the shipped model, with an empty cache."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, serving
from waiting import LONG

NAME = "org/tiny-vl"
TINY = Path(__file__).parents[2] / "assets" / "tiny-vl"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve tiny-vl, beside files that must never be fetched, as org/tiny-vl."""
    folder = shutil.copytree(TINY, tmp_path / "served")
    for name in ("modeling_tiny.py", "pytorch_model.bin", "optimizer.pt", "data.pickle", "sub/config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"never fetched")
    with serving(NAME, folder) as found:
        use_hub(monkeypatch, found.url, tmp_path / "cache")
        yield found


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Point huggingface_hub at a server and at a cache, without a token."""
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", LONG)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", LONG)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no token"))
    monkeypatch.setattr("sensorium.engine.setup.hub_download._RETRY_SECONDS", 0.0)
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    close_session()


def environment(hub: FakeHub, cache: Path) -> dict[str, str]:
    """Return the environment of a process that uses this Hub."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_ETAG_TIMEOUT": str(int(LONG)),
        "HF_HUB_DOWNLOAD_TIMEOUT": str(int(LONG)),
        "NO_PROXY": "127.0.0.1",
    }
