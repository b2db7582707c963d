"""setuptools' build backend (PEP 517) with three changes.

It finds the packages, compiles the C++ kernels on all processors, and leaves no build/ and no *.egg-info in the source folder.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setuptools import Extension, build_meta, find_packages
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("callers", "checkpoints", "cli", "engine", "kernels", "mm", "models", "pipelines", "processors", "server")

Config = Mapping[str, Any] | None


def packages() -> list[str]:
    """Return the packages: the root of the repository, and every folder of the rooms that has an `__init__.py`."""
    folders = find_packages(str(ROOT), include=[pattern for room in ROOMS for pattern in (room, f"{room}.*")])
    return ["sensorium", *(f"sensorium.{name}" for name in sorted(folders))]


class ParallelBuild(build_ext):  # type: ignore[misc]
    """Compiles the sources of an extension at the same time; setuptools compiles one after the other."""

    def build_extension(self, ext: Extension) -> None:
        compile_serially = self.compiler.compile

        def compile_all(sources: Sequence[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_serially([source], **options), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_all
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_serially


@contextmanager
def _outside() -> Iterator[None]:
    """Tell setuptools the packages, and make it put what it makes on the way into a temporary folder.

    setuptools reads the file that DIST_EXTRA_CONFIG names as it reads setup.cfg.
    """
    before = os.environ.get("DIST_EXTRA_CONFIG")
    with tempfile.TemporaryDirectory(prefix="sensorium-build-") as folder:
        config = Path(folder) / "extra.cfg"
        listed = "".join(f"\n    {name}" for name in packages())
        sections = f"[build]\nbuild_base = {folder}/build\n[egg_info]\negg_base = {folder}\n[options]\npackages ={listed}\n"
        sections += f"cmdclass =\n    build_ext = {__name__}.ParallelBuild\n"
        config.write_text(sections, "utf-8")
        os.environ["DIST_EXTRA_CONFIG"] = str(config)
        try:
            yield
        finally:
            os.environ.pop("DIST_EXTRA_CONFIG")
            if before is not None:
                os.environ["DIST_EXTRA_CONFIG"] = before


def get_requires_for_build_wheel(config_settings: Config = None) -> list[str]:
    with _outside():
        return list(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Config = None) -> list[str]:
    with _outside():
        return list(build_meta.get_requires_for_build_editable(config_settings))


def get_requires_for_build_sdist(config_settings: Config = None) -> list[str]:
    with _outside():
        return list(build_meta.get_requires_for_build_sdist(config_settings))


def build_wheel(wheel_directory: str, config_settings: Config = None, metadata_directory: str | None = None) -> str:
    with _outside():
        return str(build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_editable(wheel_directory: str, config_settings: Config = None, metadata_directory: str | None = None) -> str:
    with _outside():
        return str(build_meta.build_editable(wheel_directory, config_settings, metadata_directory))


def build_sdist(sdist_directory: str, config_settings: Config = None) -> str:
    with _outside():
        return str(build_meta.build_sdist(sdist_directory, config_settings))


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Config = None) -> str:
    with _outside():
        return str(build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings))


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Config = None) -> str:
    with _outside():
        return str(build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings))
