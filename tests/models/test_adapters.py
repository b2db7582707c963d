"""Adapters that come with a checkpoint: configs read and refused; rows with and without an adapter share steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu import needs_int8
from family import Question, ask, make_media
from parity import ROWS, LoadedModels, make_llm, record
from safetensors.torch import load_file, save_file
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import CheckpointError, ConfigError
from sensorium.checkpoints.adapters import AdapterSpec, adapter_spec
from sensorium.engine.worker.decode_graphs import DecodeGraphs
from sensorium.engine.worker.model_runner import ModelRunner
from sensorium.kernels import native
from sensorium.kernels.graph import CallGraph
from sensorium.models.layers.adapter import AdapterMask, LowRank
from sensorium.models.layers.linear import Linear

ROW = ROWS["granite_speech_adapter"]
GIVEN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
NEAR = {"atol": 1e-5, "rtol": 1e-5}


def made(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def changed(folder: Path, target: Path, tensors: Callable[[dict[str, Any]], Any] | None = None, **config: Any) -> Path:
    """Copy the checkpoint with other tensors and settings of its adapter."""
    shutil.copytree(folder, target)
    said = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(said | config))
    if tensors is not None:
        save_file(tensors(load_file(target / "adapter_model.safetensors")), target / "adapter_model.safetensors")
    return target


def test_what_is_read_of_a_config() -> None:
    published = GIVEN | {"lora_dropout": 0.1, "use_dora": False, "megatron_core": "megatron.core", "rank_pattern": {}}
    assert adapter_spec(".", published | {"bias": "none", "modules_to_save": None}) == AdapterSpec(".", 4, 2.0, ("q_proj",))
    assert adapter_spec("speech", GIVEN | {"use_rslora": True}).scale == 4.0
    assert adapter_spec(".", {"target_modules": ["q_proj"]}).rank == 8


@pytest.mark.parametrize(
    "setting",
    [
        {"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}, {"peft_type": "LOHA"}, {"something_new": 1},
        {"rank_pattern": {"q_proj": 2}}, {"alpha_pattern": {"q_proj": 2}}, {"target_modules": "((a+)+)+b"}, {"lora_alpha": "8"},
        {"layers_to_transform": [0]}, {"exclude_modules": ["x"]}, {"fan_in_fan_out": True}, {"r": 0},
        {"init_lora_weights": "pissa"}, {"r": 10**400}, {"lora_alpha": 10**400}, {"lora_alpha": float("nan")},
        {"target_modules": []}, {"target_modules": [""]}, {"target_modules": None},
    ],
    ids=lambda setting: str(setting)[:40],
)  # fmt: skip
def test_a_setting_that_is_not_computed_is_refused_by_name(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"\b{next(iter(setting))}\b") as error:
        adapter_spec(".", GIVEN | setting)
    assert "adapter_config.json" in str(error.value)


def test_what_is_added_to_slices() -> None:
    """Two adapters apply to some shards of one Linear; each row has one of them, or none."""
    adapter_mask, parts = AdapterMask(), {"q_proj": 6, "k_proj": 4, "v_proj": 10}
    layer = Linear(12, parts, True, torch.float32, torch.device("cpu"))
    weight, bias = made(0, 20, 12), made(1, 20)
    for own, value in ((layer.weight, weight), (layer.bias, bias)):
        own.copy_(value)
    expected = [torch.nn.functional.linear(made(9, 7, 12), weight, bias) for _ in range(3)]
    for number, (name, start, rank) in enumerate((("q_proj", 0, 3), ("v_proj", 10, 5))):
        added = LowRank(f"x.{name}", layer, parts[name], AdapterSpec(f"a{number}", rank, 0.5, (name,)), number, adapter_mask)
        down, up = made(2 + number, rank, 12), made(4 + number, parts[name], rank)
        assert [key for key, _ in added.tensors("")] == [f"x.{name}.lora_{letter}.a{number}.weight" for letter in "AB"]
        for (_, own), value in zip(added.tensors(""), (down, up), strict=True):
            own.copy_(value)
        added.pack()
        layer.add_adapter(added, start)
        expected[number + 1][:, start : start + parts[name]] += made(9, 7, 12) @ down.T @ up.T * 0.5
    layer.pack()
    kinds = torch.tensor([0, 1, 2, 2, 0, 1, 0])
    adapter_mask.set(kinds, 2)
    torch.testing.assert_close(layer(made(9, 7, 12)), torch.stack([expected[kind][i] for i, kind in enumerate(kinds)]), **NEAR)
    adapter_mask.set(None, 2)
    torch.testing.assert_close(layer(made(9, 7, 12)), expected[0], **NEAR)


@pytest.mark.parametrize("letter", ["A", "B"])
def test_missing_and_surplus_tensors_are_named(loaded: LoadedModels, tmp_path: Path, letter: str) -> None:
    folder = loaded.folder(ROW.name)
    name = f"base_model.model.language_model.model.layers.1.self_attn.v_proj.lora_{letter}.weight"
    with pytest.raises(CheckpointError, match=rf"lacks language_model\.layers\.1\.self_attn\.v_proj\.lora_{letter}"):
        make_llm(ROW, changed(folder, tmp_path / "a", lambda t: {key: v for key, v in t.items() if key != name}))
    with pytest.raises(CheckpointError, match=r"unknown .*layers\.9\.self_attn\.v_proj\.lora"):
        make_llm(ROW, changed(folder, tmp_path / "b", lambda t: t | {name.replace("layers.1", "layers.9"): t[name].clone()}))
    with pytest.raises(CheckpointError, match=r"lora_[AB].*has shape"):
        make_llm(ROW, changed(folder, tmp_path / "c", r=4))


def test_an_adapter_that_does_not_fit_is_said(loaded: LoadedModels, tmp_path: Path) -> None:
    folder = loaded.folder(ROW.name)
    with pytest.raises(ConfigError, match=r"nowhere_proj.*no such layer"):
        make_llm(ROW, changed(folder, tmp_path / "a", target_modules=["nowhere_proj"]))
    whisper = shutil.copytree(loaded.folder("whisper"), tmp_path / "whisper")
    (whisper / "adapter_config.json").write_text(json.dumps(GIVEN))
    with pytest.raises(ConfigError, match=r"supports no adapters .*; merge"):
        make_llm(ROWS["whisper"], whisper, max_model_len=None)
    gone = changed(folder, tmp_path / "b")
    (gone / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is missing"):
        make_llm(ROW, gone)


QUESTIONS = ["", "a", "", "aa", "a"]


@pytest.fixture(params=[{}, {"dtype": "bfloat16"}, pytest.param({"quantization": "int8"}, marks=needs_int8)], ids=str)
def llm(request: pytest.FixtureRequest, loaded: LoadedModels) -> LLM:
    return make_llm(ROW, loaded.folder(ROW.name), batch_invariant=True, enable_prefix_caching=False, **request.param)


def bits(llm: LLM, questions: list[Question]) -> list[list[float]]:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
    outputs = llm.generate([question.ours for question in questions], params, use_tqdm=False)
    return [[entry.logprob for step in output.outputs[0].logprobs for entry in step.values()] for output in outputs]


def test_requests_in_a_mixed_batch_equal_themselves_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log probabilities are equal bit for bit, also in replayed steps that mix rows with and without the adapter."""
    questions = [ask(ROW, case, i) for i, case in enumerate(QUESTIONS)]
    replays, mixed = [], []
    replay, forward = CallGraph.replay, ModelRunner._forward
    monkeypatch.setattr(CallGraph, "replay", lambda graph: (replays.append(graph), replay(graph))[1])
    monkeypatch.setattr(
        ModelRunner,
        "_forward",
        lambda own, rows, after: (mixed.append({t.adapter for t, _ in rows}), forward(own, rows, after))[1],
    )
    alone = [bits(llm, [question])[0] for question in questions]
    llm.engine.loop.core.executor.runner.decode_graphs = lambda forward, batch: forward(batch)
    plain = [bits(llm, [question])[0] for question in questions]
    assert not any(len(names) > 1 for names in mixed)
    llm.engine.loop.core.executor.runner.decode_graphs = DecodeGraphs(torch.device("cpu"))
    assert alone == plain == bits(llm, questions)
    assert {"", "."} in mixed
    assert replays or native.library() is None


def test_prompts_that_begin_alike_share_nothing_across_adapters(loaded: LoadedModels) -> None:
    llm, text = make_llm(ROW, loaded.folder(ROW.name)), "def f(x): return x + x + x + x + x + x + x + x"
    audio = {"prompt": text + "<|audio|>", "multi_modal_data": {"audio": [(make_media("audio", (9001,), 1), 16_000)]}}
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    cached = [llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens for prompt in (text, audio, text, audio)]
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) > 0


def test_a_conversation_with_audio_is_the_prompt_that_reads_the_same(loaded: LoadedModels) -> None:
    llm, text = make_llm(ROW, loaded.folder(ROW.name)), "def f(x): return x + x"
    heard = {"prompt": "<|audio|> and", "multi_modal_data": {"audio": [(make_media("audio", (9001,), 1), 16_000)]}}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with llm.live(text, params) as session:
        session.answer()
        before = session.token_ids
        session.append(heard)
        second = session.answer()
        more = session.token_ids
        session.append(" then what")
        third = session.answer()
    placeholder = llm.engine.inputs._info.placeholder_ids["audio"]
    rest = [llm.engine.tokenizer.encode(words, add_special_tokens=False) for words in (" and", " then what")]
    whole = {"prompt_token_ids": [*before, placeholder, *rest[0]], "multi_modal_data": heard["multi_modal_data"]}
    assert second.outputs[0].token_ids == llm.generate(whole, params, use_tqdm=False)[0].outputs[0].token_ids
    whole["prompt_token_ids"] += [*more[len(second.prompt_token_ids) :], *rest[1]]
    assert third.outputs[0].token_ids == llm.generate(whole, params, use_tqdm=False)[0].outputs[0].token_ids


def test_a_conversation_whose_audio_is_truncated_is_the_prompt_that_reads_the_same(loaded: LoadedModels) -> None:
    llm = make_llm(ROW, loaded.folder(ROW.name))
    heard = {"prompt": "<|audio|> and", "multi_modal_data": {"audio": [(make_media("audio", (9001,), 1), 16_000)]}}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with llm.live("def f(x): return x + x", params) as session:
        session.answer()
        before = session.token_ids
        session.append(heard)
        session.answer()
        session.truncate(len(before))
        session.append(" then what")
        third = session.answer()
    (fresh,) = llm.generate({"prompt_token_ids": list(third.prompt_token_ids)}, params, use_tqdm=False)
    assert third.prompt_token_ids[: len(before)] == list(before)
    assert third.outputs[0].token_ids == fresh.outputs[0].token_ids


def test_on_every_product_of_any_family(loaded: LoadedModels, tmp_path: Path) -> None:
    """If a family does not choose prompts for an adapter, it applies to all of them, as if it were merged."""
    row, scale = ROWS["internvl"], 2.0
    folder, merged = (
        shutil.copytree(loaded.folder(row.name), tmp_path / "a"),
        shutil.copytree(loaded.folder(row.name), tmp_path / "b"),
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    weights, added = load_file(merged / "model.safetensors"), {}
    for seed, (name, weight) in enumerate(sorted(weights.items())):
        stem = name.removesuffix(".weight")
        if "language_model" in stem and stem.rpartition(".")[2] in targets:
            down, up = made(seed, 4, weight.shape[1]) / weight.shape[1] ** 0.5, made(seed + 999, len(weight), 4) / 4
            added |= {f"base_model.model.{stem}.lora_A.weight": down, f"base_model.model.{stem}.lora_B.weight": up}
            weights[name] = weight + up @ down * scale
    assert len(added) == 2 * len(targets) * 3
    save_file(weights, merged / "model.safetensors")
    save_file(added, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(GIVEN | {"target_modules": targets}))
    question = ask(row, "i", 1)
    plain, with_it, as_one = (record(make_llm(row, f), question, 8)[1] for f in (loaded.folder(row.name), folder, merged))
    assert (with_it[: len(as_one) // 2] - as_one[: len(as_one) // 2]).abs().max() < 2e-4 * float(as_one.std())
    assert (with_it[:4] - plain[:4]).abs().max() > 0.1
