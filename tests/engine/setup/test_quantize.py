"""`sensorium quantize`: the written checkpoint loads, and its weights are those of transformers' decompression formula."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import ConfigError
from sensorium.cli.main import main
from sensorium.engine.setup.quantize import pack_tensors, quantize_checkpoint
from sensorium.kernels.linear.int4 import Int4Options, quantize_int4

TINY_VL = Path(__file__).parents[3] / "assets" / "tiny-vl"


def test_codes_are_packed_as_compressed_tensors_reads_them() -> None:
    weight = torch.randn(6, 64)
    stored = pack_tensors("q.", weight, 32)
    words = stored["q.weight_packed"]
    codes = torch.stack([(words >> 4 * place) & 15 for place in range(8)], -1).flatten(1) - 8
    wide = codes.view(6, 2, 32) * stored["q.weight_scale"][..., None]
    assert torch.equal(wide.flatten(1), quantize_int4(weight, Int4Options(32)).dequantize())
    assert stored["q.weight_shape"].tolist() == [6, 64]


def test_a_written_checkpoint_answers_as_int4_does(tmp_path: Path) -> None:
    out, group = tmp_path / "w4", {"method": "int4", "group_size": 32}
    assert main(["quantize", str(TINY_VL), str(out), "--group-size", "32"]) == 0
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == "pack-quantized"
    assert "lm_head" in config["ignore"]
    names = [name for file in out.glob("*.safetensors") for name in load_file(file)]
    packed = [name for name in names if name.endswith("weight_packed")]
    assert packed
    assert not any("visual" in name for name in packed)
    params, prompts = SamplingParams(temperature=0.0, max_tokens=8), ["Read the text.", "a"]
    told = LLM(out, device="cpu", dtype="float32").generate(prompts, params, use_tqdm=False)
    expected = LLM(TINY_VL, device="cpu", dtype="float32", quantization=group).generate(prompts, params, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in told] == [one.outputs[0].token_ids for one in expected]
    assert [file.name for file in tmp_path.iterdir()] == ["w4"]


def test_files_of_subfolders_are_copied(tmp_path: Path) -> None:
    model = shutil.copytree(TINY_VL, tmp_path / "model")
    for name in ("1_Pooling/config.json", "additional_chat_templates/rag.jinja", "lora/adapter_model.safetensors"):
        (model / name).parent.mkdir()
        (model / name).write_text("{}")
    for name in ("onnx/model.onnx", ".cache/config.json"):
        (model / name).parent.mkdir()
        (model / name).write_text("{}")
    out = quantize_checkpoint(str(model), tmp_path / "w4", 32, print)
    found = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file() and file.parent != out}
    assert found == {"1_Pooling/config.json", "additional_chat_templates/rag.jinja", "lora/adapter_model.safetensors"}


def test_a_folder_without_config_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text('{"dim": 8, "hidden_dim": 8, "n_layers": 1, "n_heads": 2, "vocab_size": 16}')
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        quantize_checkpoint(str(tmp_path), tmp_path / "w4", 32, print)


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists; give a new folder"):
        quantize_checkpoint(str(TINY_VL), tmp_path, 32, print)
