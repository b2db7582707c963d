"""Every Triton kernel: equal to its reference in the interpreter, and compiled for GPUs that are not here.

An op has two files in gpu/: interpret_<op>.py, checks that pytest collects in a process of their own with the plugin
gpu/interpreted.py, and compile_<op>.py, `launches()` at realistic shapes and `HOT`, the names of kernels that must not spill.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GPU = Path(__file__).parent / "gpu"
CHECKS = sorted(path.stem.removeprefix("interpret_") for path in GPU.glob("interpret_*.py"))

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def interpret(op: str, marks: str) -> None:
    """Run the checks of one op in a process of its own, since a load out of bounds ends the process."""
    paths = [str(GPU), str(ROOT / "tests" / "helpers"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "interpreted", "-p", "no:cacheprovider", "-x", "-m", marks]
    done = subprocess.run(
        [*command, GPU / f"interpret_{op}.py"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    nothing_to_run = done.returncode == 5 and marks == "full"  # an op may have no larger sweep
    assert done.returncode == 0 or nothing_to_run, f"rc {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-1000:]}"


@pytest.mark.sampled
@pytest.mark.parametrize("op", CHECKS)
def test_equals_its_reference(op: str) -> None:
    interpret(op, "not full")


@pytest.mark.full
@pytest.mark.parametrize("op", CHECKS)
def test_equals_its_reference_over_the_whole_sweep(op: str) -> None:
    interpret(op, "full")


def compile_for(*arguments: str) -> None:
    env = {"TRITON_CACHE_DIR": str(ROOT / "out" / "triton")} | os.environ
    command = [sys.executable, "-m", "benchmarks.aot", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.full
def test_one_launch_of_every_kernel_compiles_without_a_card() -> None:
    compile_for("--first", "sm_90")


@pytest.mark.full
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_compiles_without_a_card(target: str) -> None:
    compile_for(target)


def test_every_kernel_is_checked() -> None:
    """Every file with a kernel has checks and a list of launches."""
    paths = (path for path in (ROOT / "kernels").rglob("*.py") if "@triton.jit" in path.read_text())
    files = {path.parent.name if path.stem == "triton" else path.stem for path in paths}
    assert len(files) > 10
    assert files <= set(CHECKS)
    assert files <= {path.stem.removeprefix("compile_") for path in GPU.glob("compile_*.py")}
