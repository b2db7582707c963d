"""A float16 checkpoint computes in float32 on a CPU, with the weights that it stores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sensorium import LLM, SamplingParams
from sensorium.kernels.linear import keeps_float16
from sensorium.models.layers.linear import Linear

pytestmark = pytest.mark.in_process


@pytest.mark.skipif(not keeps_float16(torch.device("cpu"), torch.float32), reason="needs the C++ kernels")
def test_weights_stay_in_float16(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "half"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16", "torch_dtype": "float16"}), "utf-8")
    for file in folder.glob("*.safetensors"):
        save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    answers, held = [], []
    for dtype in ("auto", "float32"):
        llm = LLM(folder, dtype=dtype, max_model_len=128)
        layers = [one for one in llm._engine_loop.core.runner.model.modules() if isinstance(one, Linear)]
        held.append({one.packed.weight.dtype for one in layers})
        answers.append(llm.generate("one two three", SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].token_ids)
        llm.close()
    assert held[0] == {torch.float16}
    assert torch.float16 not in held[1]
    assert answers[0] == answers[1]
