"""The packages that the build backend lists."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def packages() -> list[str]:
    path = Path(__file__).resolve().parents[2] / "build_backend" / "clean_setuptools.py"
    spec = importlib.util.spec_from_file_location("clean_setuptools", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.packages())
