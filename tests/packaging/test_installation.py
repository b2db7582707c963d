"""How the package is installed: the command that builds its kernels, and a clone that hides the installed package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from sensorium.kernels import installation

ROOT = Path(__file__).resolve().parents[2]
AGAIN = "pip install --force-reinstall --no-deps --no-cache-dir"
OF_A_WHEEL = f"pip wheel --no-deps -w dist CLONE && {AGAIN} dist/sensorium-*.whl (CLONE: the folder of the repository)"


class Installed:
    """A distribution in `folder` whose direct_url.json is `origin`."""

    def __init__(self, origin: object = None, folder: Path | None = None) -> None:
        self.origin, self.folder = origin, folder

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)

    def locate_file(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / name


def make_package(folder: Path, kernels: bool) -> Path:
    package = folder / "sensorium"
    (package / "kernels").mkdir(parents=True)
    (package / "__init__.py").touch()
    if kernels:
        (package / "kernels" / "_native.so").touch()
    return package.resolve()


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///a/b%20c", "dir_info": {"editable": True}}, "pip install --no-deps -e '/a/b c'"),
        ({"url": "file:///a/b", "dir_info": {}}, f"{AGAIN} /a/b"),
        ({"url": "https://h/x", "vcs_info": {"vcs": "git", "commit_id": "c1"}}, f"{AGAIN} git+https://h/x@c1"),
        ({"url": "https://h/x.tar.gz", "archive_info": {}}, f"{AGAIN} https://h/x.tar.gz"),
        (
            {"url": "file:///a/s-1.whl", "archive_info": {}},
            OF_A_WHEEL,
        ),
        (None, OF_A_WHEEL),
    ],
)
def test_the_command_fits_how_it_was_installed(monkeypatch: pytest.MonkeyPatch, origin: object, command: str) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(origin))
    assert installation.build_command() == command


def test_the_command_of_a_clone_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", none)
    assert installation.build_command() == f"pip install {installation.PACKAGE}"
    assert installation.hiding_clone() is None


def test_a_clone_in_the_current_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`sensorium doctor` runs the installed package, and says that `python` would run the clone in this folder."""
    installed, clone = make_package(tmp_path / "site", True), make_package(tmp_path / "work", False)
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(folder=installed.parent))
    monkeypatch.setattr(installation, "PACKAGE", installed)
    monkeypatch.chdir(tmp_path)
    assert installation.hiding_clone() is None
    monkeypatch.chdir(tmp_path / "work")
    assert installation.hiding_clone() == (clone, installed)
    assert installation.hidden_package() is None  # the engine runs the installed one
    (clone / "__init__.py").unlink()  # a folder without it does not come before a package
    assert installation.hiding_clone() is None


@pytest.mark.parametrize("kernels", [False, True])
def test_an_editable_installation_of_another_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels: bool) -> None:
    """A clone on PYTHONPATH with kernels of its own is left alone, as git's worktrees are."""
    installed, clone = make_package(tmp_path / "a", True), make_package(tmp_path / "b", kernels)
    origin = {"url": installed.as_uri(), "dir_info": {"editable": True}}
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(origin))
    monkeypatch.setattr(installation, "PACKAGE", clone)
    assert installation.hidden_package() == (None if kernels else installed)
    monkeypatch.setattr(installation, "PACKAGE", installed)
    assert installation.hidden_package() is None


CODE = """
import sys, warnings
import sensorium
assert "torch" not in sys.modules
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        sensorium.LLM(sys.argv[1], device="cpu")
print(*[text for line in said if "instead of the installed" in (text := str(line.message))], sep="\\n")
from sensorium.cli.main import main
main(["doctor", "--device", "cpu"])
"""


@pytest.mark.full
def test_an_engine_of_a_clone_that_hides_the_installed_package_warns_once(tmp_path: Path) -> None:
    """Python runs in the folder that contains the clone. Importing it says nothing."""
    installed = make_package(tmp_path / "site", True)
    info = tmp_path / "site" / "sensorium-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sensorium\nVersion: 0.1.0\n")
    work = tmp_path / "work"
    work.mkdir()
    (work / "sensorium").symlink_to(ROOT)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-c", CODE, str(ROOT / "assets" / "tiny-vl")]
    done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    warning, title, problem, *_ = done.stdout.splitlines()
    assert title == "problems:"
    assert warning.startswith(f"Python imports the clone {ROOT} instead of the installed package {installed}")
    assert problem.split(maxsplit=1) == ["clone", warning]
