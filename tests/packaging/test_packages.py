"""Compare the list of packages with the tree; check the lazy root package and the files at the root."""

from __future__ import annotations

import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
import sensorium
from package_list import packages
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
OUTSIDE = {"tests", "examples", "benchmarks", "training", "docs", "build", "dist", "out"}


def test_packages_are_those_of_the_tree() -> None:
    found = {"sensorium"}
    for init in ROOT.glob("*/**/__init__.py"):
        folders = init.parent.relative_to(ROOT).parts
        if folders[0] not in OUTSIDE and not folders[0].startswith("."):
            found.add(".".join(("sensorium", *folders)))
    listed = packages()
    assert sorted(listed) == sorted(found)
    for name in listed:
        folder = ROOT.joinpath(*name.split(".")[1:])
        nested = {path.parent for path in folder.rglob("*.py")} if folder != ROOT else set()
        assert all((path / "__init__.py").is_file() for path in nested), f"a folder below {name} has no __init__.py"


def test_kernels_are_compiled_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "build_backend"))
    import clean_setuptools
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    both = threading.Barrier(2, timeout=60)

    class Compiler:
        def compile(self, sources: list[str], debug: bool) -> list[str]:
            both.wait()  # ends only if the other source is compiled at the same time
            return [f"{source}.o" for source in sources]

    def build(command: build_ext, ext: Extension) -> None:
        objects.extend(command.compiler.compile(ext.sources, debug=True))

    objects: list[str] = []
    monkeypatch.setattr(build_ext, "build_extension", build)
    monkeypatch.setattr(clean_setuptools.os, "cpu_count", lambda: 2)
    command = clean_setuptools.ParallelBuild(Distribution())
    command.compiler = Compiler()
    command.build_extension(Extension("kernels", ["a.cpp", "b.cpp"]))
    assert objects == ["a.cpp.o", "b.cpp.o"]


def test_root_holds_two_modules() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_import_is_instant() -> None:
    heavy = ("torch", "numpy", "PIL", "tokenizers", "cv2", "huggingface_hub")
    code = f"import sys, sensorium; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_model_imports_only_what_it_needs() -> None:
    others = (
        "checkpoints.formats.fp8",
        "checkpoints.gguf.tensors",
        "engine.core.process",
        "engine.core.rank_executor",
        "engine.setup.hub_download",
        "engine.worker.adapter_store",
        "models.audio.mel_encoder",
        "models.fallback.fallback",
        "models.request_adapters",
        "models.text.eagle3",
        "pipelines.embed",
        "pipelines.transcribe",
        "processors.elements.formats",
    )
    code = "import sys; from sensorium import LLM; llm = LLM('tiny-vl'); llm.close()\n"
    code += "print(*(name.removeprefix('sensorium.') for name in sys.modules if name.startswith('sensorium.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "engine.engine" in done.stdout.split()
    assert sorted({*others} & {*done.stdout.split()}) == []


@pytest.mark.parametrize("name", sensorium.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(sensorium, name) is not None


def test_completion_offers_the_public_names() -> None:
    assert {name for name in dir(sensorium) if not name.startswith("__")} == set(sensorium.__all__) - {"__version__"}


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = sensorium.nothing_like_it


def requirements() -> list[str]:
    """Return the requirements of the build, of the package and of its extras."""
    extras = CONFIG["project"]["optional-dependencies"].values()
    return [
        *CONFIG["build-system"]["requires"],
        *CONFIG["project"]["dependencies"],
        *(line for extra in extras for line in extra),
    ]


@pytest.mark.parametrize("line", requirements())
def test_every_dependency_has_an_upper_bound(line: str) -> None:
    """A new major version of a dependency may lack what the code uses, so it is taken only once the tests have run with it."""
    operators = [each.operator for each in Requirement(line).specifier]
    assert sorted(operators) == ["<", ">="], f"{line}: give the lowest version and the first that is not tested"


def test_one_dependency_has_the_same_bounds_everywhere() -> None:
    bounds: dict[str, set[str]] = {}
    for requirement in map(Requirement, requirements()):
        bounds.setdefault(requirement.name, set()).add(str(requirement.specifier))
    assert {name: sorted(found) for name, found in bounds.items() if len(found) > 1} == {}


def test_every_dependency_is_pinned() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        assert version, f"{line!r} is no pin"
        pins[name.lower().replace("_", "-")] = version
    wanted = [Requirement(line) for line in requirements()]
    assert {one.name.lower() for one in wanted} <= pins.keys()
    outside = [str(one) for one in wanted if not one.specifier.contains(pins[one.name.lower()])]
    assert outside == [], "constraints.txt pins versions that pyproject.toml excludes"
    assert pins["torch"] == "2.13.0"
    assert not any("+" in version for version in pins.values())


def test_every_kernel_is_compiled() -> None:
    """The extension lists every source and header in the folder, so that the sdist contains them."""
    (module,) = CONFIG["tool"]["setuptools"]["ext-modules"]
    assert module["optional"]
    listed = {*module["sources"], *module["depends"]}
    assert listed == {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels" / "cpu").iterdir()}
