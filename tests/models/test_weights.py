"""Checkpoint folders: sharded, tied heads stored or not, and errors that name the problem."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import family
import pytest
import torch
from family import ask, load_rows, save
from oracle import build_checkpoint
from parity import make_llm, positions, record
from safetensors.torch import load_file, save_file
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import CheckpointError, ConfigError
from sensorium.checkpoints import weight_files
from sensorium.engine.config import EngineConfig
from sensorium.engine.setup.doctor import describe_checkpoint, explain
from sensorium.models import decoder_model, weights
from sensorium.models.layers.moe import Mixture
from sensorium.models.text.spec import MoeSpec

ROW = load_rows()["qwen2_5_vl"]


def logits(folder: Path) -> torch.Tensor:
    return record(make_llm(ROW, folder), ask(ROW, "iv"), 1)[1]


def test_shards_are_one_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    sharded = build_checkpoint(tmp_path, shard_size="200KB")
    assert (sharded / "model.safetensors.index.json").exists()
    assert dict(weight_files.read_checkpoint(checkpoint)).keys() == dict(weight_files.read_checkpoint(sharded)).keys()
    assert torch.equal(logits(sharded), logits(checkpoint))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, shard_size="200KB")
    shard = sorted(path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        make_llm(ROW, path)


@pytest.mark.parametrize("tied", [True, False])
def test_a_stored_head_is_used_whatever_the_config_says(tmp_path: Path, tied: bool) -> None:
    """The model loads the head, as transformers does. `tied`: the top level of config.json; its text_config says true."""
    path = family.save(ROW, tmp_path, tie=True)
    config = json.loads((path / "config.json").read_text())
    config |= {"tie_word_embeddings": tied, "text_config": config["text_config"] | {"tie_word_embeddings": True}}
    (path / "config.json").write_text(json.dumps(config))
    stored = dict(weight_files.read_checkpoint(path))
    assert not any("lm_head" in name for name in stored)
    table = next(tensor for name, tensor in stored.items() if name.endswith("embed_tokens.weight"))
    if tied:
        expected = logits(path)
        save_file(stored | {"lm_head.weight": table.clone()}, path / "model.safetensors")
        assert torch.equal(logits(path), expected)
    other = torch.randn(table.shape, generator=torch.Generator().manual_seed(1)) * table.std()
    save_file(stored | {"lm_head.weight": other}, path / "model.safetensors", {"format": "pt"})
    model, processor = family.load(path)
    assert torch.equal(model.lm_head.weight, other)
    llm, question = make_llm(ROW, path), ask(ROW, "iv")
    theirs = ROW.run(model, question.theirs(processor), [], positions(llm, question, 0))
    torch.testing.assert_close(record(llm, question, 1)[1], theirs, atol=2e-4 * float(theirs.std()), rtol=0)


def test_a_checkpoint_without_a_head_embeds_and_refuses_to_generate(tmp_path: Path) -> None:
    path = family.save(ROW, tmp_path)
    question = ask(ROW, "iv").ours
    (expected,) = make_llm(ROW, path).embed([question], use_tqdm=False)
    config = EngineConfig(str(path), max_model_len=512, device="cpu")
    whole, tensors = explain(config).weights, dict(weight_files.read_checkpoint(path))
    head = next(tensors.pop(name) for name in list(tensors) if "lm_head" in name)
    save_file(tensors, path / "model.safetensors")
    llm = make_llm(ROW, path)
    assert whole - explain(config).weights >= head.nbytes
    (found,) = llm.embed([question], use_tqdm=False)
    assert torch.equal(found.vector, expected.vector)
    (output,) = llm.generate([question], SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.error is not None
    assert "has no head (lm_head.weight)" in output.error.message


def test_names_are_compared_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only an index of the shards is there."""
    path = build_checkpoint(tmp_path, shard_size="200KB")
    monkeypatch.setattr(weights, "read_checkpoint", lambda folder: pytest.fail("weights were read"))
    describe_checkpoint(path)
    index = path / "model.safetensors.index.json"
    written = json.loads(index.read_text())
    for change, text in (({"surplus.weight": "x"}, "holds unknown surplus"), ({}, "lacks .*norm1")):
        names = {name: shard for name, shard in written["weight_map"].items() if change or "norm1" not in name}
        index.write_text(json.dumps({"weight_map": names | change}))
        for shard in path.glob("model-*.safetensors"):
            shard.unlink()
        for call in (LLM, describe_checkpoint):
            with pytest.raises(CheckpointError, match=text):
                call(path)


Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def without(part: str) -> Change:
    return lambda stored: {name: tensor for name, tensor in stored.items() if part not in name}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without("blocks.0.norm1."), r"lacks visual\.\S+norm1\.weight; it does not fit"),
        (without(".mlp."), r"lacks .* and \d+ more"),
        (lambda stored: stored | {"surplus.weight": torch.zeros(2)}, "holds unknown surplus"),
        (lambda stored: stored | {name: torch.zeros(3) for name in stored if "blocks.0.norm1." in name}, "has shape"),
    ],
)
def test_what_does_not_fit_is_named(checkpoint: Path, tmp_path: Path, change: Change, text: str) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    save_file(change(load_file(checkpoint / "model.safetensors")), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=text):
        make_llm(ROW, tmp_path)


def test_files_that_cannot_be_read_are_named(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(CheckpointError, match="not readable"):
        make_llm(ROW, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        make_llm(ROW, tmp_path)


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 1\n")
    with pytest.raises(CheckpointError, match="it is a Git LFS pointer: run `git lfs pull` in its folder"):
        weight_files.read_headers(tmp_path)


@pytest.mark.parametrize(
    ("part", "change", "text"),
    [
        ("vision_config", {"window_size": "x"}, r"the model cannot be built from the checkpoint's JSON files \(TypeError"),
        (
            "vision_config",
            {"rope_parameters": 5},
            r"the model cannot be built from the checkpoint's JSON files \(AttributeError",
        ),
        (
            "text_config",
            {"intermediate_size": 1 << 60},
            r"the model cannot be built from the checkpoint's JSON files \(RuntimeError",
        ),
        ("vision_config", {"num_heads": 3}, r"a tower of width 64 \(vision_config\) cannot have 3 heads"),
    ],
)
def test_a_config_that_describes_no_model_is_refused(
    checkpoint: Path, tmp_path: Path, part: str, change: dict[str, object], text: str
) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text())
    config[part] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=text):
        LLM(tmp_path, max_model_len=128)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "shard"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_folder_in_place_of_a_file_is_refused_without_waiting(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    if name == "shard":
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "shard"}}')
    make(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name} is not a regular file; replace it"):
        list(weight_files.read_checkpoint(tmp_path))


NAMES = ("../b", "/etc/passwd", "..", ".", "", "a\0b")


@pytest.mark.parametrize(
    "index",
    ["[1]", '{"weight_map": 5}', '{"weight_map": {"a": [1]}}', *(json.dumps({"weight_map": {"a": name}}) for name in NAMES)],
)
def test_an_index_that_names_no_shards_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"not an index of shards|plain file names"):
        list(weight_files.read_checkpoint(tmp_path))


def test_experts_in_one_tensor_of_another_shape_are_named() -> None:
    spec = MoeSpec(experts=2, top_k=1, inner=(8,))
    model = torch.nn.ModuleDict({"mlp": Mixture(4, spec, torch.float32, torch.device("cpu"))})
    with pytest.raises(CheckpointError, match=r"mlp.experts.down_proj has shape \[8\]"):
        weights.fill(model, [("mlp.experts.down_proj", torch.zeros(8))], ())


def test_layers_for_multi_token_prediction_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tensors are in layers after the decoder's, or under `mtp.`. The memory plan does not count them."""
    folder = save(load_rows()["text-deepseek_v3"], tmp_path / "model")
    before = explain(EngineConfig(str(folder), max_model_len=64, device="cpu")).weights
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    layers, extra = config["num_hidden_layers"], torch.zeros(4)
    unused = {f"model.layers.{layers}.eh_proj.weight", f"model.layers.{layers}.self_attn.o_proj.weight", "mtp.norm.weight"}
    save_file(tensors | {name: extra.clone() for name in unused}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    read, fill = list[str](), decoder_model.fill

    def spy(root: Any, stored: Any, *more: Any) -> None:
        kept = list(stored)
        read.extend(name for name, _ in kept)
        fill(root, kept, *more)

    monkeypatch.setattr(decoder_model, "fill", spy)
    with LLM(folder, device="cpu", max_model_len=64) as llm:
        assert llm.explain().weights == before
    assert set(read) == set(tensors)
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(CheckpointError, match=rf"holds unknown model\.layers\.{layers}"):
        LLM(folder, device="cpu", max_model_len=64)


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4096), "b": torch.ones(4096)}, file)
    tensors = weight_files.read_file(file)
    next(tensors)
    os.truncate(file, 200)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was cut from \d+ to 200 bytes while it was read"):
        next(tensors)
