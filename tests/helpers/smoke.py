"""Install the package as the README says with the newest Python of this machine, and try it from another folder (make smoke).

PYTHON_NEWEST=/path/to/python chooses the Python. Without a newer Python than this one, or without a package index, nothing is
tried, and the exit code is 0.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS, BYTES = 900, 9 << 30
"""The longest installation, and the free space that it needs."""
UNREACHED = re.compile(r"NewConnectionError|ConnectTimeout|NameResolutionError|ProxyError|Read timed out|ConnectionResetError")
LEFT_OUT = (".*", "__pycache__", "*.so", "out", "build", "dist", "tests", "benchmarks")
FACTS = "import sys, sysconfig, venv, ensurepip; print(*sys.version_info[:4], sysconfig.get_config_var('Py_GIL_DISABLED') or 0)"
CHECK = """
import io, sys
import av, numpy as np, sensorium
from sensorium.mm.media import gate
from sensorium.mm.media.policy import DecodeSpec, MediaPolicy
from sensorium.mm.parse import MediaSource

assert sensorium.__file__.startswith(sys.argv[1]), sensorium.__file__
file = io.BytesIO()
with av.open(file, "w", "ipod") as container:
    stream = container.add_stream("aac", rate=16_000, layout="mono")
    wave = (np.sin(np.arange(32_000) * 0.17) * 0.5).astype(np.float32)
    for start in range(0, len(wave), 1024):
        frame = av.AudioFrame.from_ndarray(wave[None, start : start + 1024], "fltp", "mono")
        frame.sample_rate, frame.pts = 16_000, start
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))
(item,) = gate.decode(MediaSource("audio", 0, file.getvalue()), DecodeSpec(rate=16_000), MediaPolicy())
sound = np.asarray(item.samples)
assert abs(len(sound) - 32_000) < 2_048, len(sound)
assert 0.3 < sound[2_000:30_000].std() < 0.4, sound.std()
"""


def facts(python: str) -> tuple[int, int] | None:
    """Return the version of a Python that is released, has the GIL and can make environments; None for others."""
    try:
        done = subprocess.run([python, "-c", FACTS], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = done.stdout.split()
    if done.returncode or words[3:] != ["final", "0"]:
        return None
    return int(words[0]), int(words[1])


def newest_python() -> str | None:
    """Return PYTHON_NEWEST, or the newest Python on PATH and among pyenv's that is newer than this one."""
    if chosen := os.environ.get("PYTHON_NEWEST"):
        return chosen
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [str(path) for path in root.glob("versions/3.*/bin/python")]
    candidates += [path for minor in range(sys.version_info[1] + 1, 40) if (path := shutil.which(f"python3.{minor}"))]
    versions = {path: version for path in candidates if (version := facts(path)) is not None and version > sys.version_info[:2]}
    return max(versions, key=lambda path: versions[path], default=None)


def install(python: str, folder: Path) -> str:
    """Install a copy of the clone into `folder/venv`. Return "", or why it cannot be tried. Exit with 1 if it fails."""
    if shutil.disk_usage(folder).free < BYTES:
        return f"{folder} has less than {BYTES >> 30} GiB"
    shutil.copytree(ROOT, folder / "sensorium-src", ignore=shutil.ignore_patterns(*LEFT_OUT))
    project = folder / "sensorium-src" / "pyproject.toml"
    project.write_text(project.read_text("utf-8").replace('"-O3"', '"-O0"'), "utf-8")  # compiling takes less time
    subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
    pip = [str(folder / "venv" / "bin" / "pip"), "install", "--no-compile", "--progress-bar", "off"]
    try:
        done = subprocess.run([*pip, "./sensorium-src[pdf]"], cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"the installation takes longer than {SECONDS} s"
    if done.returncode and UNREACHED.search(done.stdout + done.stderr):
        return "no package index is reached"
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    return ""


def try_out(binaries: Path, work: Path) -> None:
    """Import the package, decode, ask doctor and run the demo, in `work`. Exit with 1 if one of them fails."""
    work.mkdir()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    check = [str(binaries / "python"), "-c", CHECK, str(binaries.parent)]
    for command in (check, [str(binaries / "sensorium"), "doctor", "--device", "cpu"], [str(binaries / "sensorium"), "demo"]):
        done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, check=False)
        if done.returncode or ("doctor" in command and not done.stdout.startswith("problems:\n  none\n")):
            sys.exit(f"{command[0]} {command[1]}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def main() -> None:
    python = newest_python()
    if python is None:
        print("smoke: skipped, this machine has no newer Python (PYTHON_NEWEST=/path/to/python chooses one)")
        return
    with tempfile.TemporaryDirectory(prefix="sensorium-smoke-") as folder:
        reason = install(python, Path(folder))
        if not reason:
            try_out(Path(folder) / "venv" / "bin", Path(folder) / "work")
    print(f"smoke: {python} {f'skipped, {reason}' if reason else 'passed'}")


if __name__ == "__main__":
    main()
