"""The wheel, installed and used from a folder that has its own models.py and engine/."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("*.py", "*.toml", "README.md", "LICENSE", "MANIFEST.in", "py.typed", "Makefile", "constraints.txt")
FOLDERS = ("assets", "cli", "engine", "kernels", "mm", "models", "processors", "tests", "examples", "training")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout stays clean."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for pattern in PARTS:
        for path in ROOT.glob(pattern):
            shutil.copy(path, source)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return next(out.glob("sensorium-*.whl"))


def test_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tree = {
        f"sensorium/{path.relative_to(ROOT).as_posix()}"
        for folder in ("cli", "engine", "kernels", "mm", "models", "processors")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert tree <= names
    assert {"sensorium/__init__.py", "sensorium/py.typed", "sensorium/assets/media/answers.json"} <= names
    outside = ("tests", "examples", "training", "benchmarks", "docs")
    assert not [name for name in names if name.startswith(tuple(f"sensorium/{part}/" for part in outside))]


def test_use_from_a_folder_with_the_same_names(wheel: Path, tmp_path: Path) -> None:
    target, work = tmp_path / "site", tmp_path / "work"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, capture_output=True)
    (work / "engine").mkdir(parents=True)
    (work / "engine" / "__init__.py").write_text("MINE = True\n")
    (work / "models.py").write_text("MINE = True\n")
    (work / "use.py").write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import engine, models, sensorium, sensorium.engine.types, sensorium.models\n"
        "assert engine.MINE and models.MINE\n"
        "assert sensorium.__file__.startswith(sys.argv[1]), sensorium.__file__\n"
        "assert sensorium.SamplingParams(max_tokens=3).max_tokens == 3\n"
        "from sensorium.cli.main import main\n"
        "sys.exit(main(['doctor', '--device', 'cpu', '--model', sys.argv[1] + '/sensorium/assets/tiny-vl']))\n"
    )
    done = subprocess.run([sys.executable, "use.py", str(target)], cwd=work, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Qwen2_5_VLForConditionalGeneration" in done.stdout
