"""A float16 checkpoint computes in float32 on a CPU, with the weights that it stores."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from measured import held
from safetensors.torch import load_file, save_file
from sensorium import LLM, SamplingParams
from sensorium.kernels.linear import keeps_float16
from sensorium.models.layers.linear import Linear

pytestmark = pytest.mark.in_process


needs_kernels = pytest.mark.skipif(not keeps_float16(torch.device("cpu"), torch.float32), reason="needs the C++ kernels")


def half_checkpoint(checkpoint: Path, folder: Path, is_half: Callable[[str], bool]) -> Path:
    """Return a copy of a checkpoint whose config.json says float16, with the tensors of these names in float16."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16", "torch_dtype": "float16"}), "utf-8")
    for file in folder.glob("*.safetensors"):
        tensors = {name: tensor.half() if is_half(name) else tensor.float() for name, tensor in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    return folder


@needs_kernels
def test_the_plan_counts_weights_of_the_stored_dtype(checkpoint: Path, tmp_path: Path) -> None:
    folder = half_checkpoint(checkpoint, tmp_path / "mixed", lambda name: "mlp" not in name)
    with LLM(folder, max_model_len=128) as llm:
        model, planned = llm._engine_loop.core.runner.model, llm.explain().weights
        layers = [one for one in model.modules() if isinstance(one, Linear)]
        used = held(model)
    assert {one.packed.weight.dtype for one in layers} == {torch.float16, torch.float32}
    assert used <= planned < 1.02 * used


@needs_kernels
def test_weights_stay_in_float16(checkpoint: Path, tmp_path: Path) -> None:
    folder = half_checkpoint(checkpoint, tmp_path / "half", lambda name: True)
    answers, dtypes = [], []
    for dtype in ("auto", "float32"):
        llm = LLM(folder, dtype=dtype, max_model_len=128)
        layers = [one for one in llm._engine_loop.core.runner.model.modules() if isinstance(one, Linear)]
        dtypes.append({one.packed.weight.dtype for one in layers})
        answers.append(llm.generate("one two three", SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].token_ids)
        llm.close()
    assert dtypes[0] == {torch.float16}
    assert torch.float16 not in dtypes[1]
    assert answers[0] == answers[1]
