"""Install the wheel and use it from a folder with its own models.py and engine/."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("*.py", "*.toml", "README.md", "LICENSE", "MANIFEST.in", "py.typed", "Makefile", "constraints.txt")
FOLDERS = (
    "assets",
    "build_backend",
    "callers",
    "checkpoints",
    "cli",
    "engine",
    "kernels",
    "mm",
    "models",
    "pipelines",
    "processors",
    "server",
    "tests",
    "examples",
    "training",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, so that the checkout stays clean, and without optimisation, which takes less time."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for pattern in PARTS:
        for path in ROOT.glob(pattern):
            shutil.copy(path, source)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    project = source / "pyproject.toml"
    text = project.read_text("utf-8")
    assert '"-O3"' in text
    project.write_text(text.replace('"-O3"', '"-O0"'), "utf-8")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert [path for pattern in ("build", "*.egg-info") for path in source.glob(pattern)] == []
    return next(out.glob("sensorium-*.whl"))


def test_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tree = {
        f"sensorium/{path.relative_to(ROOT).as_posix()}"
        for folder in ("callers", "checkpoints", "cli", "engine", "kernels", "mm", "models", "pipelines", "processors")
        for path in (ROOT / folder).rglob("*.py")
    }
    tree |= {f"sensorium/server/page/{path.name}" for path in (ROOT / "server" / "page").iterdir()}
    assert tree <= names
    assert {"sensorium/__init__.py", "sensorium/py.typed", "sensorium/assets/media/answers.json"} <= names
    assert not [name for name in names if name.startswith("sensorium/build_backend")]
    outside = ("tests", "examples", "training", "benchmarks", "docs")
    assert not [name for name in names if name.startswith(tuple(f"sensorium/{part}/" for part in outside))]


def install(wheel: Path, venv: Path) -> Path:
    """Return the Python of a new environment with the wheel and this environment's other packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (venv / "lib" / version / "site-packages" / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.full
def test_use_from_a_folder_with_the_same_names(wheel: Path, tmp_path: Path) -> None:
    venv, work = tmp_path / "venv", tmp_path / "work"
    python = install(wheel, venv)
    (work / "engine").mkdir(parents=True)
    (work / "engine" / "__init__.py").write_text("MINE = True\n")
    (work / "models.py").write_text("MINE = True\n")
    (work / "use.py").write_text(
        "import sys, engine, models, sensorium, sensorium.engine.types, sensorium.models\n"
        "assert engine.MINE and models.MINE\n"
        "assert sensorium.__file__.startswith(sys.argv[1]), sensorium.__file__\n"
        "assert sensorium.SamplingParams(max_tokens=3).max_tokens == 3\n"
    )
    use = [str(python), "use.py", str(venv)]
    commands = ([str(python), "-m", "sensorium", "demo"], [str(venv / "bin" / "sensorium"), "doctor", "--device", "cpu"])
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in (use, *commands):
        done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert (work / "out" / "demo.png").is_file()
