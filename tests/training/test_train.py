"""The trainer resumes from its last step, and the engine loads what it exports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sensorium import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from training import export, train  # noqa: E402
from training.batch import STAGES, Stage, make  # noqa: E402
from training.data import held_out  # noqa: E402
from training.evaluate import request  # noqa: E402
from training.model import mrope  # noqa: E402


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_resumes_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()

    def run(minutes: float) -> dict[str, float]:
        argv = ["train", "--minutes", str(minutes), "--out", str(tmp_path), "--batch", "4", "--threads", "1"]
        monkeypatch.setattr(sys, "argv", argv)
        train.main()
        return json.loads((tmp_path / "state.json").read_text())

    first = run(0.01)
    second = run(first["seconds"] / 60 + 0.02)  # minutes in total; the first run may have exceeded its time
    torch.set_num_threads(threads)
    assert 0 < first["step"] < second["step"]
    assert second["seen"] > first["seen"]
    export.write(tmp_path / "last.safetensors", tmp_path / "model")
    llm = LLM(tmp_path / "model")
    (output,) = llm.generate(request(held_out("text", 1)[0]), SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.error is None


@pytest.mark.parametrize("stage", STAGES)
def test_batches_fit_their_grid(stage: Stage) -> None:
    for seed in range(6):
        batch = make(np.random.default_rng(seed), stage, 4)
        t, h, w = batch.grid
        assert batch.patches.shape[1:] == (t, h * w, 384)
        assert batch.ids.shape == batch.labels.shape
        assert int((batch.labels >= 0).sum(1).min()) >= 2
        if batch.aux is not None:
            assert batch.aux.shape == (5, len(batch.ids), h * w // 4)
            assert int(batch.aux[0].max()) > 0


def test_positions_of_a_video() -> None:
    """A step of the grid is one second and two positions long."""
    t, h, w = mrope(10, 1, (2, 4, 4)).tolist()
    assert t == [0, 1, 1, 1, 1, 3, 3, 3, 3, 4]
    assert h == [0, 1, 1, 2, 2, 1, 1, 2, 2, 4]
    assert w == [0, 1, 2, 1, 2, 1, 2, 1, 2, 4]
