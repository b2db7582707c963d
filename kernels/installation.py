"""How this package is installed: the command that builds its C++ kernels, and a clone that Python imports in its place."""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import sys
import sysconfig
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

PACKAGE = Path(__file__).resolve().parents[1]
COMPILERS = {
    "apt-get": "apt-get install g++",
    "dnf": "dnf install gcc-c++",
    "zypper": "zypper install gcc-c++",
    "apk": "apk add g++",
    "pacman": "pacman -S gcc",
}
"""Package manager of a Linux distribution -> its command that installs a C++ compiler."""


def build_command() -> str:
    """Return the command that installs this package again, with its kernels, in the way in which it was installed."""
    source = _source()
    if source is None:
        return f"pip install {shlex.quote(str(PACKAGE))}"
    url = str(source.get("url", ""))
    again = "pip install --force-reinstall --no-deps --no-cache-dir"
    if _is_editable(source):
        return f"pip install --no-deps -e {shlex.quote(_path(url))}"
    if "dir_info" in source:
        return f"{again} {shlex.quote(_path(url))}"
    if "vcs_info" in source:
        vcs = source["vcs_info"]
        return f"{again} {shlex.quote(vcs['vcs'] + '+' + url + '@' + vcs['commit_id'])}"
    if url and not url.endswith(".whl"):  # an archive of the sources
        return f"{again} {shlex.quote(url)}"
    return f"pip wheel --no-deps -w dist CLONE && {again} dist/sensorium-*.whl (CLONE: the folder of the repository)"


def compiler_advice() -> str:
    """Return how to install a C++ compiler, or "" if there is the one that setuptools runs."""
    compiler = os.environ.get("CXX") or str(sysconfig.get_config_var("CXX") or "c++")
    if shutil.which(shlex.split(compiler)[0]):
        return ""
    commands = [command for manager, command in COMPILERS.items() if shutil.which(manager)]
    return f"Install a C++ compiler ({commands[0] if commands else 'g++ or clang++'})"


def has_kernels(package: Path) -> bool:
    return any(package.glob("kernels/_native*.so"))


def hidden_package() -> Path | None:
    """Return the folder of the installed package if Python has imported this one, a clone, in its place; else None.

    Python looks into its current folder and that of the script first. The kernels of an installed wheel are not in the clone
    that it was built from. An editable installation of another clone is hidden only if this one lacks its kernels.
    """
    return _hidden_by(PACKAGE)


def hiding_clone() -> tuple[Path, Path] | None:
    """Return a clone in Python's current folder or this package, and the installed package that it hides; or None.

    `python` imports such a clone, where the command `sensorium` imports the installed package.
    """
    here = Path.cwd() / "sensorium"
    clones = [PACKAGE] if sys.flags.safe_path or not (here / "__init__.py").is_file() else [PACKAGE, here.resolve()]
    return next(((clone, hidden) for clone in clones if (hidden := _hidden_by(clone)) is not None), None)


def describe_clone(clone: Path, hidden: Path) -> str:
    """Return the sentence that says which package is used in place of which, and what to do."""
    lack = "" if has_kernels(clone) else "; it has no C++ kernels, and torch runs in their place, several times slower"
    return (
        f"Python imports the clone {clone} instead of the installed package {hidden}{lack}. "
        f"Run Python in a folder that does not contain the clone, or rename the clone (mv {clone} {clone}-src)"
    )


@functools.cache
def warn_if_hidden() -> None:
    """Warn once if this package is a clone that hides the installed one."""
    if (hidden := hidden_package()) is not None:
        warnings.warn(describe_clone(PACKAGE, hidden), RuntimeWarning, stacklevel=3)


def _hidden_by(clone: Path) -> Path | None:
    source = _source()
    if source is None:
        return None
    if _is_editable(source):
        installed = Path(_path(str(source["url"]))).resolve()
        matters = not has_kernels(clone)
    else:
        installed = Path(str(metadata.distribution("sensorium").locate_file("sensorium"))).resolve()
        matters = True
    return installed if matters and installed != clone and (installed / "__init__.py").is_file() else None


def _source() -> dict[str, Any] | None:
    """Return direct_url.json of the installed package (PEP 610): {} for one from an index, None if none is installed."""
    try:
        text = metadata.distribution("sensorium").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    return dict(json.loads(text)) if text else {}


def _is_editable(source: dict[str, Any]) -> bool:
    return bool(source.get("dir_info", {}).get("editable"))


def _path(url: str) -> str:
    return unquote(urlsplit(url).path)
