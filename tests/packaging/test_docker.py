"""The Dockerfile: what each instruction must have, and, in the full run, its pip steps in a clean environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
STEPS = [line.split(maxsplit=1) for line in TEXT.splitlines() if line and not line.startswith("#")]


def words(name: str) -> list[str]:
    return [text for step, text in STEPS if step == name]


def test_the_image_is_pinned_small_and_not_root() -> None:
    assert words("USER") == ["sensorium"]
    assert STEPS.index(["USER", "sensorium"]) > STEPS.index(["COPY", "--from=build /opt/venv /opt/venv"])
    pips = [text for text in words("RUN") if "pip install" in text]
    assert pips
    assert all("--no-cache-dir" in text and "-c constraints.txt" in text for text in pips)
    assert all("rm -rf /var/lib/apt/lists/*" in text for text in words("RUN") if "apt-get" in text)
    (check,) = words("HEALTHCHECK")
    assert "/health" in check
    assert json.loads(words("ENTRYPOINT")[0]) == ["sensorium", "serve", "--host", "0.0.0.0"]
    (model,) = json.loads(words("CMD")[0])
    assert (ROOT / model.partition("/sensorium/")[2] / "config.json").is_file()


@pytest.mark.full
def test_the_steps_in_a_clean_environment(tmp_path: Path) -> None:
    """Run the pip steps as the Dockerfile has them, then the server and the health check of the image."""
    source, venv = tmp_path / "src", tmp_path / "venv"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in tracked:
        if not name.startswith(("tests/", ".")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    for command in words("RUN"):
        if "pip install" in command:
            done = subprocess.run(
                ["sh", "-c", command.replace("/opt/venv", str(venv))], cwd=source, env=env, capture_output=True
            )
            assert done.returncode == 0, done.stderr.decode()[-2000:]
    (model,) = json.loads(words("CMD")[0])
    model = re.sub(r"/opt/venv/lib/python[\d.]+", str(next((venv / "lib").iterdir())), model)
    command = [venv / "bin" / "sensorium", "serve", model, "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as server:
        line = server.stderr.readline()
        assert line.startswith("tiny-vl is served on "), line
        program = json.loads(words("HEALTHCHECK")[0].partition("CMD ")[2])
        code = program[2].replace("127.0.0.1:8000", line.split("//")[1].strip()).replace("timeout=4", "timeout=60")
        subprocess.run([venv / "bin" / program[0], "-c", code], check=True)
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
