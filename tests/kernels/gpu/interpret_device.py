"""`LLM(media_device=...)` with the pixel and mel kernels: an image, a video and audio give the CPU's numbers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))

import pytest
import torch
from family import ask, load_rows, save
from oracle import ensure_torchvision
from sensorium import LLM, SamplingParams
from sensorium.engine.config import EngineConfig
from sensorium.engine.frontend.items import ProcessedItem
from sensorium.engine.frontend.media import MultiModalProcessor
from triton.runtime.interpreter import GridExecutor

WORKERS = {"media_workers": 1, "kernels": "pixels=triton,mel=triton"}  # the interpreter is not thread-safe


def test_the_same_numbers_and_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ensure_torchvision()
    family = load_rows()["qwen2_5_omni"]
    folder, question = save(family, tmp_path), ask(family, "iva")
    monkeypatch.setattr(EngineConfig, "torch_media_device", torch.device("cpu"))
    launched: set[str] = set()
    launch, work = GridExecutor.__call__, MultiModalProcessor._process
    made: list[ProcessedItem] = []

    def spy(self: GridExecutor, *args: object, **kwargs: object) -> None:
        launched.add(self.fn.__name__)
        launch(self, *args, **kwargs)

    def keep(self: MultiModalProcessor, *args: object) -> ProcessedItem:
        made.append(work(self, *args))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(GridExecutor, "__call__", spy)
    monkeypatch.setattr(MultiModalProcessor, "_process", keep)
    answers = []
    for options in ({}, {"media_device": "cuda", **WORKERS}):
        assert not launched
        with LLM(folder, warm_up=False, **family.options, **options) as llm:
            output = llm.generate([question.ours], SamplingParams(max_tokens=4, temperature=0.0), use_tqdm=False)[0]
            assert output.error is None, output.error
            answers.append(output.outputs[0].token_ids)
    assert answers[0] == answers[1]
    assert launched == {"_columns_kernel", "_lines_kernel", "_bands_kernel"}
    assert len(made) == 6
    for plain, sent in zip(made[:3], made[3:], strict=True):
        for (one, grid), (other, same) in zip(plain.pieces, sent.pieces, strict=True):
            assert (grid, one.keys()) == (same, other.keys())
            for name in one:
                near = 1e-5 if name == "input_features" else 0.0
                torch.testing.assert_close(other[name].data, one[name].data, atol=near, rtol=0.0)
