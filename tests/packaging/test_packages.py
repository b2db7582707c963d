"""Compare the list of packages with the tree; check the lazy root package and the files at the root."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import sensorium

ROOT = Path(__file__).parents[2]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
OUTSIDE = {"tests", "examples", "benchmarks", "training", "docs", "build", "dist", "out"}


def test_packages_are_those_of_the_tree() -> None:
    found = {"sensorium"}
    for init in ROOT.glob("*/**/__init__.py"):
        folders = init.parent.relative_to(ROOT).parts
        if folders[0] not in OUTSIDE and not folders[0].startswith("."):
            found.add(".".join(("sensorium", *folders)))
    listed = CONFIG["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(found)
    for name in listed:
        folder = ROOT.joinpath(*name.split(".")[1:])
        nested = {path.parent for path in folder.rglob("*.py")} if folder != ROOT else set()
        assert all((path / "__init__.py").is_file() for path in nested), f"a folder below {name} has no __init__.py"


def test_root_holds_two_modules() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_import_is_instant() -> None:
    heavy = ("torch", "numpy", "PIL", "tokenizers", "cv2", "huggingface_hub")
    code = f"import sys, sensorium; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sensorium.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(sensorium, name) is not None


def test_completion_offers_the_public_names() -> None:
    assert {name for name in dir(sensorium) if not name.startswith("__")} == set(sensorium.__all__) - {"__version__"}


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = sensorium.nothing_like_it


def test_every_dependency_is_pinned() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        assert version, f"{line!r} is no pin"
        pins[name.lower().replace("_", "-")] = version
    project = CONFIG["project"]
    wanted = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    assert {re.split(r"\[|>=", line)[0].lower() for line in wanted} <= pins.keys()
    assert pins["torch"] == "2.13.0"
    assert not any("+" in version for version in pins.values())


def test_every_kernel_is_compiled() -> None:
    """The extension lists every source and header in the folder, so that the sdist contains them."""
    (module,) = CONFIG["tool"]["setuptools"]["ext-modules"]
    assert module["optional"]
    listed = {*module["sources"], *module["depends"]}
    assert listed == {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels" / "cpu").iterdir()}
