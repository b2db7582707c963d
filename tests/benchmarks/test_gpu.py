"""benchmarks/gpu on a CPU: every part at tiny shapes, and parts that fail, hang or crash."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import parts, ranks, shapes, worker  # noqa: E402
from benchmarks.gpu.exact import checked, distance  # noqa: E402
from benchmarks.gpu.machine import Bench, slug  # noqa: E402
from benchmarks.gpu.parts import SECONDS, SECTIONS, Part  # noqa: E402
from benchmarks.gpu.record import Figure, Journal, Lacks  # noqa: E402

CPU = torch.device("cpu")
BROKEN = """
import os
import time

from benchmarks.gpu.record import Figure, Lacks


def good(bench):
    yield Figure("one", 1.0, "of two", least=0.5)


def breaks():
    raise RuntimeError("it broke | here")


def raises(bench):
    yield Figure("before", 2.0, "s")
    yield breaks
    yield lambda: Figure("behind", 2.0, "s")
    breaks()


def lacks(bench):
    raise Lacks("a card")
    yield


def dies(bench):
    yield Figure("last words", 3.0, "s")
    os._exit(7)


def hangs(bench):
    yield Figure("still there", 4.0, "s")
    time.sleep(600)


def slow(bench):
    while True:
        time.sleep(0.3)
        yield Figure("more", 5.0, "s")
"""


@pytest.mark.parametrize("part", [part for own in SECTIONS.values() for part in own], ids=lambda part: part.name)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_part_runs_on_a_cpu(part: Part) -> None:
    """Every part yields figures and no wrong result; its speed means nothing here."""
    made = []
    with pytest.raises(Lacks) if part.name == "mixture" else contextlib.nullcontext():
        for one in part.load()(Bench(CPU, tiny=True)):
            made.extend(worker._figures(one))
    assert made
    assert [one for one in made if one.verdict == "WRONG"] == []
    assert all(one.value == one.value and one.value < float("inf") for one in made)


def test_sections_end_in_time() -> None:
    """The usual times of parts fit into a section, which takes less than four minutes even if a part hangs."""
    assert SECONDS + worker._GRACE < 240
    for own in SECTIONS.values():
        assert sum(part.seconds for part in own) <= SECONDS
        assert all(part.seconds < part.limit < SECONDS for part in own)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Journal:
    """Replace a section by parts that go wrong, in this process and in the child."""
    names = {"raises": 9.0, "lacks": 9.0, "dies": 9.0, "hangs": 0.5, "slow": 0.5, "good": 9.0}
    own = tuple(Part(name, f"broken:{name}", 0.1, limit) for name, limit in names.items())
    monkeypatch.setitem(SECTIONS, "train", own)
    (tmp_path / "broken.py").write_text(BROKEN)
    lines = [f"import sys; sys.path.insert(0, {str(ROOT)!r})", "from benchmarks.gpu import parts, worker"]
    lines += [f"from benchmarks import gpu; gpu.__path__.append({str(tmp_path)!r})"]
    lines += [f"parts.SECTIONS['train'] = ({', '.join(map(repr, own))},)".replace("Part(", "parts.Part(")]
    lines += ["from benchmarks.gpu.__main__ import main", "sys.exit(main())"]
    (tmp_path / "start.py").write_text("\n".join(lines))
    real = subprocess.Popen

    def popen(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        at = command.index("benchmarks.gpu")
        return real([command[0], str(tmp_path / "start.py"), *command[at + 1 :]], **options)

    monkeypatch.setattr(worker.subprocess, "Popen", popen)
    monkeypatch.setattr(worker, "_GRACE", 4.0)  # time for parts that check the clock to end themselves
    return Journal(tmp_path / "gpu-none-today")


def test_no_part_stops_the_others(broken: Journal) -> None:
    """Errors, exits and endless loops are recorded after the figures measured before them; the last part still runs."""
    assert worker.supervise(["train"], CPU, True, broken.lines.with_suffix(""), 600.0) == 1
    found: dict[str, list[str]] = {}
    for line in broken.read():
        if line["kind"] not in ("machine", "begin", "end"):
            found.setdefault(line["part"], []).append(line["kind"])
    assert found["raises"] == ["figure", "failure"] * 2
    assert found["lacks"] == ["lacks"]
    assert found["dies"] == ["figure", "failure"]
    assert found["hangs"] == ["figure", "failure"]
    assert found["slow"][-1] == "left out"
    assert found["good"] == ["figure"]
    table = broken.table.read_text()
    assert "| train" not in table
    for said in ("it broke / here (broken.py:", "ended with 7", "stopped after", "| good | one | 1 of two | >= 0.5 | ok |"):
        assert said in table, table


def test_parts_without_time_are_left_out(broken: Journal) -> None:
    worker.supervise(["train"], CPU, True, broken.lines.with_suffix(""), 0.0)
    assert [line["kind"] for line in broken.read()] == ["machine"] + ["left out"] * len(SECTIONS["train"])


def test_the_last_run_of_a_part_counts(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "gpu-x")
    journal.write("machine", card="X", date="today", versions="torch 1")
    for value in (1.0, 2.0):
        journal.write("begin", section="ops", part="norms")
        journal.figure("ops", "norms", Figure("RMSNorm", value, "GB/s"))
    text = journal.render()
    assert "# X, today" in text
    assert "| norms | RMSNorm | 2 GB/s |" in text
    assert "1 GB/s" not in text
    assert json.loads(journal.lines.read_text().splitlines()[-1])["value"] == 2.0


def test_ratio_to_the_peer(tmp_path: Path) -> None:
    """The first of our settings counts, which has all switches on."""
    journal = Journal(tmp_path / "gpu-x")
    for part, name, value in (
        ("M", "decode, batch 1, graphs on", 0.8),
        ("M", "decode, batch 1, graphs off", 0.1),
        ("M", "decode, batch 16", 0.5),
        ("transformers: M", "decode, batch 1", 0.2),
        ("transformers: M", "tower", 0.2),
    ):
        journal.figure("e2e", part, Figure(name, value, "of bandwidth floor"))
    assert [line for line in journal.render().splitlines() if line.endswith("x |")] == ["| M | decode, batch 1 | 4.00x |"]


@pytest.mark.parametrize("only", [[], ["--only", "ranks"]])
def test_error_without_a_gpu(tmp_path: Path, only: list[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path), *only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "sees no GPU" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_on_gpus_compute_what_one_computes() -> None:
    figures = list(ranks.mlp(Bench(torch.device("cuda"), tiny=True)))
    assert figures
    assert [figure for figure in figures if figure.verdict == "WRONG"] == []


def test_ranks_lack_a_second_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Lacks, match="a second GPU"):
        list(ranks.mlp(Bench(torch.device("cuda"))))


def test_distance() -> None:
    exact = torch.tensor([[1.0, 2.0], [1000.0, 3.0]], dtype=torch.float64)
    assert distance(exact.bfloat16(), exact) == 0
    assert distance(exact.bfloat16() + torch.tensor([0.0, 1 / 32]).bfloat16(), exact) == pytest.approx(2.0, rel=0.1)
    broken = exact.float()
    broken[1, 1] = float("nan")
    assert checked("x", broken, exact).verdict == "WRONG"


@pytest.mark.parametrize(("config", "billions"), [(shapes.qwen2_5_vl, 7.62), (shapes.qwen3_vl, 8.19)])
def test_shapes_are_the_published_ones(config, billions: float) -> None:
    """Parameters of the decoders, with embedding tables, equal those of the model cards."""
    sums = shapes.decoder(config(False))
    assert (sums.linear + 2 * sums.head) / 1e9 == pytest.approx(billions, abs=0.02)


def test_operations_of_a_tower() -> None:
    """They equal a count by hand for one small shape."""
    config = shapes.qwen3_vl(True)
    block, patch = 4 * 32**2 + 2 * 32 * 40, 3 * 2 * 16**2 * 32
    merged = 4 * (128 * 128 + 128 * 64)
    assert shapes.tower(config, 4) == 2 * 16 * (patch + 4 * block) + 2 * 4 * merged + 4.0 * 16 * 32 * 4 * 16


def test_names_of_files() -> None:
    assert slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    assert parts.find("ops", "norms").run == "ops:norms"
