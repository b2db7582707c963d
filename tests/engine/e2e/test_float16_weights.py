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
from sensorium.kernels.dispatch import multiplies_pairs
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
        model, planned = llm.engine.loop.core.executor.runner.model, llm.explain().weights
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
        layers = [one for one in llm.engine.loop.core.executor.runner.model.modules() if isinstance(one, Linear)]
        dtypes.append({one.packed.weight.dtype for one in layers})
        answers.append(llm.generate("one two three", SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].token_ids)
        llm.close()
    assert dtypes[0] == {torch.float16}
    assert torch.float16 not in dtypes[1]
    assert answers[0] == answers[1]


@needs_kernels
def test_a_tied_table_stays_in_float16(whisper: Path, tmp_path: Path) -> None:
    """Whisper's head and token embeddings share the table that is stored, and the plan counts it once."""
    folder = half_checkpoint(whisper, tmp_path / "half", lambda name: True)
    answers = []
    for dtype in ("auto", "float32"):
        with LLM(folder, dtype=dtype) as llm:
            model, planned = llm.engine.loop.core.executor.runner.model, llm.explain().weights
            assert model.head.packed.weight.dtype == (torch.float16 if dtype == "auto" else torch.float32)
            assert held(model) <= planned < 1.02 * held(model)
            prompt = {"prompt": "<|startoftranscript|>", "multi_modal_data": {"audio": (torch.zeros(1600), 16000)}}
            answers.append(llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=16))[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


@needs_kernels
def test_int8_computes_in_bfloat16_where_it_is_fast(whisper: Path, tmp_path: Path) -> None:
    folder = half_checkpoint(whisper, tmp_path / "half", lambda name: True)
    dtypes = {}
    for dtype in ("auto", "float32"):
        with LLM(folder, dtype=dtype, quantization="int8") as llm:
            dtypes[dtype] = llm.engine.loop.core.executor.runner.model.encoder.dtype
    assert dtypes == {"auto": torch.bfloat16 if multiplies_pairs() else torch.float32, "float32": torch.float32}
