"""Collects every module twice: with the core in this process, and with the core in a separate process.

The second run skips tests that access the core directly: tests marked `in_process`, tests with the toy model, and the modules
in REACHING. By default only two modules run in the second form; `-m full` runs all.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sensorium.engine import llm as llm_module

SAMPLE = ("test_async_llm.py", "test_llm.py")
REACHING = ("test_batch_invariance.py", "test_histories.py", "test_parity.py", "test_soak.py")


class ProcessModule(pytest.Module):
    """A module's tests with `engine_process=True` as the default of LLM."""

    def collect(self) -> Iterable[Any]:
        for item in super().collect():
            if item.get_closest_marker("in_process") or "toy" in getattr(item, "fixturenames", ()):
                continue
            if self.path.name not in SAMPLE:
                item.add_marker(pytest.mark.full)
            yield item

    def setup(self) -> None:
        super().setup()
        patch, make = pytest.MonkeyPatch(), llm_module.make_config
        patch.setattr(llm_module, "make_config", partial(make_config, make))
        self.addfinalizer(patch.undo)


def make_config(make: Any, model: Any, options: Any) -> Any:
    return make(model, {"engine_process": True} | options)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if file_path.suffix != ".py" or not file_path.name.startswith("test_") or file_path.name in REACHING:
        return None
    name = f"{file_path.name}[process]"
    return ProcessModule.from_parent(parent, path=file_path, name=name, nodeid=f"{parent.nodeid}/{name}".lstrip("/"))
