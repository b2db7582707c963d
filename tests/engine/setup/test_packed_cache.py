"""packed_cache_dir: a second start maps packed weights, and a file that does not fit is written again."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sensorium import LLM, SamplingParams
from sensorium.kernels import linear, native
from sensorium.models.packed_cache import restore_packed

TINY_VL = Path(__file__).parents[3] / "assets" / "tiny-vl"
INT4 = {"method": "int4", "group_size": 32, "symmetric": False, "towers": "int8"}
PACKERS = ("quantize_int4", "pack_int8")
needs_kernels = pytest.mark.skipif(native.products() is None, reason="needs the C++ kernels")


def refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a weight was packed again")


def answers(model: Path, folder: Path | None, **options: Any) -> list[list[int]]:
    with LLM(model, device="cpu", packed_cache_dir=folder, **options) as llm:
        outputs = llm.generate(["Read the text.", "a"], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in outputs]


@needs_kernels
@pytest.mark.parametrize(
    "options", [{"quantization": INT4}, {"quantization": "int8", "dtype": "bfloat16"}], ids=["int4", "int8"]
)
def test_a_second_start_packs_nothing(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = answers(TINY_VL, tmp_path, **options)
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        for name in PACKERS:
            patch.setattr(linear, name, refuse)
        assert answers(TINY_VL, tmp_path, **options) == first
    assert answers(TINY_VL, None, **options) == first
    assert file.stat().st_mtime_ns == written


@needs_kernels
def test_another_checkpoint_has_its_own_file(tmp_path: Path) -> None:
    folder, model = tmp_path / "packed", shutil.copytree(TINY_VL, tmp_path / "model")
    answers(model, folder, quantization="int8")
    for weights in model.glob("*.safetensors"):  # another file of the same name, size and time, as package stores make them
        before = weights.stat()
        weights.write_bytes(weights.read_bytes())
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    answers(model, folder, quantization="int8")
    answers(model, folder, quantization=INT4)
    assert len(list(folder.iterdir())) == 3


@needs_kernels
def test_a_broken_file_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = answers(TINY_VL, tmp_path, quantization=INT4)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    other = {"__metadata__": header["__metadata__"] | {"sensorium": json.dumps({"language_model.layers.0.mlp.down": {}})}}
    changed = json.dumps(header | other).encode()
    for broken in (whole[: len(whole) // 2], b"", len(changed).to_bytes(8, "little") + changed + whole[8 + length :]):
        file.write_bytes(broken)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert answers(TINY_VL, tmp_path, quantization=INT4) == first
        assert "will be written again" in caplog.text
        assert file.read_bytes() == whole


def test_a_folder_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert restore_packed(torch.nn.Module(), tmp_path / "none") == set()
    if native.products() is not None:
        from sensorium.models.layers.linear import Linear
        from sensorium.models.packed_cache import save_packed

        root = torch.nn.Module()
        root.layer = Linear(64, {"layer": 32}, False, torch.bfloat16, torch.device("cpu"))
        root.layer.quantization = "int8"
        root.layer.weight.zero_()
        root.layer.pack()
        save_packed(root, tmp_path / "file" / "x", set())
        assert "cannot be kept" in caplog.text
