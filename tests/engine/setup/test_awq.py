"""`sensorium quantize --method awq`: less error than rounding to nearest, and scales that fold without a change."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import ConfigError
from sensorium.cli.main import main
from sensorium.cli.quantize import read_prompts
from sensorium.engine.setup.quantize import _quantised_names, _search, make_config, quantize_checkpoint
from sensorium.models.text.decoder import DecoderLayer
from sensorium.pipelines.calibration import run_prompts
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

TINY_VL = Path(__file__).parents[3] / "assets" / "tiny-vl"
TEXTS = ["Read the text.", "The quick brown fox jumps over the lazy dog", "1 + 1 = 2", "Which way does it move?"] * 4
OTHERS = ["Which colour is it?", "Pack my box with five dozen liquor jugs", "What is written here?"]


def block_outputs(model: Path, prompts: Sequence[str]) -> list[Tensor]:
    """Return the outputs of all decoder layers for these prompts, one after another."""
    found: list[Tensor] = []

    def note(module: Any, args: Any, output: Any) -> None:
        if isinstance(module, DecoderLayer):
            found.append(output.detach().double().clone())

    with LLM(model, device="cpu", dtype="float32", enable_prefix_caching=False) as llm:
        handle = register_module_forward_hook(note)
        try:
            for prompt in prompts:
                llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        finally:
            handle.remove()
    return found


def error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    return sum(float((a - b).square().mean() / b.square().mean()) for a, b in zip(found, wanted, strict=True))


def test_block_outputs_have_a_smaller_error(tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("\n".join([*TEXTS, json.dumps("Read."), ""]))
    how = ["--group-size", "64"]
    assert main(["quantize", str(TINY_VL), str(tmp_path / "rtn"), *how]) == 0
    assert (
        main(
            ["quantize", str(TINY_VL), str(tmp_path / "awq"), *how, "--method", "awq", "--calibration", str(tmp_path / "texts")]
        )
        == 0
    )
    wanted = block_outputs(TINY_VL, OTHERS)
    assert error(block_outputs(tmp_path / "awq", OTHERS), wanted) < 0.9 * error(block_outputs(tmp_path / "rtn", OTHERS), wanted)


def test_scales_fold_without_a_change(tmp_path: Path) -> None:
    """Scale the checkpoint and do not round it."""
    config = make_config(str(TINY_VL), {"quantization": {"method": "int4", "group_size": 32}, "device": "cpu"})
    root, names = _quantised_names(config, 32)
    changes = _search(str(TINY_VL), root, names, 32, partial(run_prompts, str(TINY_VL), 3))
    folder = shutil.copytree(TINY_VL, tmp_path / "folded")
    changed = set()
    for file in folder.glob("*.safetensors"):
        tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
        folded = {name: changes[name](tensor) if name in changes else tensor for name, tensor in tensors.items()}
        changed |= {name for name in folded if not torch.equal(folded[name], tensors[name])}
        save_file(folded, file, {"format": "pt"})
    assert changed <= set(changes)
    assert len(changed) > 4
    for found, wanted in zip(block_outputs(folder, OTHERS), block_outputs(TINY_VL, OTHERS), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_calibration_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for samples in (0, 1 << 20):
        with pytest.raises(ConfigError, match=f"samples={samples} must be from 1"):
            run_prompts(str(TINY_VL), samples)
    with pytest.raises(ConfigError, match="no calibration prompts"):
        quantize_checkpoint(str(TINY_VL), tmp_path / "w4", 32, print, partial(run_prompts, str(TINY_VL), prompts=[]))
    with pytest.raises(ConfigError, match=r"ran 0 of 4 decoder layers .* round to nearest instead"):
        quantize_checkpoint(str(TINY_VL), tmp_path / "w4", 32, print, lambda: None)
    assert read_prompts('a b\n\n"c\\nd"\n[{"role": "user", "content": "e"}]') == [
        "a b",
        "c\nd",
        [{"role": "user", "content": "e"}],
    ]
    with pytest.raises(ConfigError, match="line 2 of the calibration file is not JSON"):
        read_prompts("a\n[1] b")
    for option in ("--calibration", str(tmp_path / "texts")), ("--samples", "4"):  # without --method awq
        assert main(["quantize", str(TINY_VL), str(tmp_path / "w4"), *option]) == 2
        assert not (tmp_path / "w4").exists()
    assert main(["quantize", str(TINY_VL), str(tmp_path / "w4"), "--method", "awq", "--calibration", str(tmp_path)]) == 2
    assert f"the calibration file {tmp_path} cannot be read" in capsys.readouterr().err
