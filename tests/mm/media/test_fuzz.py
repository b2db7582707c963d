"""Fuzzing: mutated files give typed errors, no crash and bounded memory; files that the bare codec reads are read."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutants import FILES

LOOP = Path(__file__).parents[2] / "helpers" / "fuzz.py"


def fuzz(modality: str, seed: int, count: int, folder: Path) -> dict[str, Any]:
    """Run the fuzz loop in a process and return its report. Fail with the number of the case if the process dies."""
    progress, command = folder / "case", [sys.executable, "-W", "ignore", LOOP, modality, "--seed", str(seed)]
    done = subprocess.run([*command, "--count", str(count), "--progress", progress], capture_output=True, text=True)
    if done.returncode:
        how = signal.Signals(-done.returncode).name if done.returncode < 0 else done.stderr[-2000:]
        pytest.fail(f"{modality}, seed {seed}, case {progress.read_text() if progress.exists() else 0}: {how}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(modality, "seed", seed, {name: value for name, value in report.items() if name not in ("unlike", "memory")})
    return report


def assert_sound(report: dict[str, Any], seed: int, disagreements: float) -> None:
    """Check a report. `disagreements`: share of the files read by the bare codec that may be refused or decoded differently."""
    assert not report["wrong"], f"seed {seed}: " + "\n".join(report["wrong"][:10])
    missed = report["bare"] - report["agreed"]
    assert missed <= disagreements * report["bare"], f"seed {seed}: {missed} of {report['bare']}:\n" + "\n".join(
        report["unlike"][:20]
    )
    assert report["jumped"] >= 0.95 * report["taken"], "decoders conceal damage with earlier frames, but not that often"
    assert report["taken"] >= 0.25 * report["cases"], "too many mutants are refused for the test to be meaningful"
    later = report["memory"][len(report["memory"]) // 2 :]
    if len(later) > 100:  # of fewer, one step of the allocator says more than a leak
        slope = np.polyfit(np.arange(len(later)), later, 1)[0] * len(later)
        assert slope < 48 << 20, f"seed {seed}: memory grew by {slope / 2**20:.0f} MB in the second half"
    assert report["peak"] < 512 << 20, f"seed {seed}: {report['peak'] >> 20} MB at the most"


@pytest.mark.parametrize("modality", sorted(FILES))
def test_mutants_are_refused_with_a_reason_or_decoded_as_the_codec_does(modality: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("FUZZ_SEED", 0))
    assert_sound(fuzz(modality, seed, 400, tmp_path), seed, disagreements=0.02)


@pytest.mark.full
@pytest.mark.parametrize("modality", sorted(FILES))
def test_ten_thousand_mutants_of_a_new_seed(modality: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("FUZZ_SEED") or secrets.randbelow(1 << 31))
    assert_sound(fuzz(modality, seed, 10_000, tmp_path), seed, disagreements=0.01)
