"""The documentation as a site: every link and anchor leads somewhere, and the API reference has all public names."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import sensorium

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(find_spec("mkdocs") is None or find_spec("material") is None, reason="mkdocs-material is not installed")
def test_the_site_is_built(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    pages = {path.name: path.read_text("utf-8") for path in (tmp_path / "site").glob("*.html")}
    docs = {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")}
    assert docs | {"index.html", "api.html", "performance.html", "contributing.html", "changelog.html"} <= pages.keys()
    assert [name for name in sensorium.__all__ if name != "__version__" and f">{name}<" not in pages["api.html"]] == []
    assert "fonts.googleapis" not in pages["index.html"]
