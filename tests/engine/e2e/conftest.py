"""Collects every module three times: with the core in this process, with the core in a separate process, and with an executor
whose messages are encoded and decoded both ways.

The second run skips tests that access the core directly: tests marked `in_process`, tests with the toy model, and the modules
in REACHING. The third one skips tests with the toy model. By default only SAMPLE runs in the second form, and only WIRE_SAMPLE
in the third; `-m full` runs all.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sensorium.engine import engine as engine_module
from sensorium.engine.setup import loader
from wire_executor import WireExecutor

SAMPLE = ("test_async_llm.py", "test_llm.py")
WIRE_SAMPLE = ("test_inputs.py", "test_llm.py", "test_whisper.py")
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
        patch, make = pytest.MonkeyPatch(), engine_module.make_config
        patch.setattr(engine_module, "make_config", partial(make_config, make))
        self.addfinalizer(patch.undo)


class WireModule(pytest.Module):
    """A module's tests with a WireExecutor under every core of this process."""

    def collect(self) -> Iterable[Any]:
        for item in super().collect():
            if "toy" in getattr(item, "fixturenames", ()):
                continue
            if self.path.name not in WIRE_SAMPLE:
                item.add_marker(pytest.mark.full)
            yield item

    def setup(self) -> None:
        super().setup()
        patch = pytest.MonkeyPatch()
        patch.setattr(loader, "LocalExecutor", WireExecutor)
        self.addfinalizer(patch.undo)


def make_config(make: Any, model: Any, options: Any) -> Any:
    return make(model, {"engine_process": True} | options)


class Forms(pytest.File):
    """The further forms of a module."""

    def collect(self) -> Iterable[Any]:
        for form, kind in {"process": ProcessModule, "wire": WireModule}.items():
            if form == "wire" or self.path.name not in REACHING:
                name = f"{self.path.name}[{form}]"
                nodeid = f"{self.nodeid.removesuffix(self.path.name)}{name}"
                yield kind.from_parent(self, path=self.path, name=name, nodeid=nodeid)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.File | None:
    is_module = file_path.suffix == ".py" and file_path.name.startswith("test_")
    return Forms.from_parent(parent, path=file_path) if is_module else None
