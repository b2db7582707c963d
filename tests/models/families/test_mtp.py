"""Layers for multi-token prediction: their drafts are those of their publishers' forward; they are ignored unless asked for."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import fallbacks
import mtp
import pytest
import torch
from cpu import needs_int8
from family import Family, Question, ask
from measured import held
from mtp import STEMS, Drafter, add_mtp
from parity import ROWS, LoadedModels, greedy, make_llm, positions
from quantized import SCHEMES, write
from safetensors.torch import load_file, save_file
from sensorium import LLM
from sensorium.callers.errors import CheckpointError, ConfigError
from sensorium.engine.config import EngineConfig
from sensorium.engine.setup.doctor import describe_checkpoint, explain
from sensorium.kernels.linear.int4 import Int4Options
from sensorium.models.decoder_model import DecoderModel
from sensorium.models.interface import ForwardBatch
from sensorium.models.layers.linear import Linear
from torch import Tensor

each = pytest.mark.parametrize("name", STEMS)
TOKENS = 12
World = Callable[[str], tuple[Path, Drafter]]


def place(name: str) -> tuple[str, int, str]:
    """Return row, seed and variant, as LoadedModels takes them."""
    row, _, variant = name.partition("/")
    return row, 0, variant


def row_of(name: str) -> Family:
    return ROWS[place(name)[0]]


@pytest.fixture(scope="module")
def world(loaded: LoadedModels, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a function from a row's name to a checkpoint with a layer for multi-token prediction, and its oracle."""
    root = tmp_path_factory.mktemp("mtp")

    def build(name: str) -> tuple[Path, Drafter]:
        drafter = Drafter(loaded.oracle(*place(name))[0], STEMS[name])
        return add_mtp(loaded.folder(*place(name)), root / name.replace("/", "-"), drafter, STEMS[name]), drafter

    return cache(build)


def model_of(llm: LLM) -> DecoderModel:
    model = llm.engine.loop.core.executor.runner.model
    assert isinstance(model, DecoderModel)
    return model


def answer(llm: LLM, question: Question) -> tuple[Tensor, Tensor]:
    """Return the tokens of prompt and answer, and our hidden states of all but the last."""
    model, rows = model_of(llm), []
    real = model.compute_logits

    def spy(hidden: Tensor) -> Tensor:
        rows.append(hidden.clone())
        return real(hidden)

    model.compute_logits = spy  # type: ignore[method-assign]
    try:
        (output,) = llm.generate(question.ours, greedy(TOKENS, prompt_logprobs=0), use_tqdm=False)
    finally:
        del model.compute_logits
    assert output.error is None, output.error
    return torch.tensor([*output.prompt_token_ids, *output.outputs[0].token_ids]), torch.cat(rows)


def oracles_hidden(model: Any, question: Question, processor: Any, ids: Tensor, places: Tensor | None) -> Tensor:
    """Return the oracle's hidden states of all tokens but the last: the input of its head."""
    rows = list[Tensor]()
    hook = model.lm_head.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0][0].clone()))
    inputs = question.theirs(processor)
    try:
        question.family.run(model, inputs, ids[inputs["input_ids"].shape[1] :].tolist(), places)
    finally:
        hook.remove()
    return torch.cat(rows)


def check_close(name: str, ours: Tensor, theirs: Tensor) -> None:
    limit = row_of(name).tolerance * max(1.0, float(theirs.std()))
    assert theirs.std() > 0.3
    assert (ours - theirs).abs().max() < limit


@each
def test_drafts_are_the_publishers(name: str, world: World, loaded: LoadedModels) -> None:
    """From our hidden states, in several steps over the paged cache, and with an encoder row in place of an embedding."""
    (folder, drafter), (oracle, processor), row = world(name), loaded.oracle(*place(name)), row_of(name)
    with make_llm(row, folder, load_mtp=True) as llm:
        for case in row.default_cases():
            question = ask(row, case)
            ids, hidden = answer(llm, question)
            prompt = len(ids) - TOKENS
            all_axes = positions(llm, question, TOKENS)
            own = torch.arange(len(hidden))[None] if all_axes is None else all_axes[:, : len(hidden)]
            theirs = oracles_hidden(oracle, question, processor, ids, all_axes)
            rows = {prompt // 2: torch.randn(hidden.shape[1])}
            for given, cuts in (({}, ()), (rows, (1, prompt // 2, prompt + 3))):
                ours = mtp.draft(model_of(llm), ids[1:], own, hidden, cuts, given)
                check_close(name, ours, drafter(ids[1:], own, theirs, given))


@pytest.mark.parametrize("name", ["text-deepseek_v3", "text-qwen3_moe/glm4_moe"])
def test_drafts_are_those_of_transformers(
    name: str, world: World, loaded: LoadedModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second layer reads the hidden states of the first. transformers gives the second token of a sequence position 1."""
    from transformers.modeling_layers import MtpModel

    first, stem = world(name)[0], "model.layers.4."
    folder = add_mtp(
        first, tmp_path / "model", Drafter(loaded.oracle(*place(name))[0], stem, 8), stem, num_nextn_predict_layers=2
    )
    oracle, _ = row_of(name).load(folder)
    monkeypatch.setattr(oracle, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[34]\..*"])
    theirs = MtpModel.from_pretrained(oracle).eval()
    ids = torch.randint(600, (33,))
    places = torch.arange(1, len(ids))[None]
    with torch.inference_mode():
        hidden = oracle.model(ids[None, :-1]).last_hidden_state
        states = [theirs.forward_layer(0, hidden, places, None, input_ids=ids[None, 1:])]
        states.append(theirs.forward_layer(1, states[0][:, :-1], places[:, 1:], None, input_ids=ids[None, 2:]))
        logits = [oracle.lm_head(one)[0] for one in states]
    with make_llm(row_of(name), folder, load_mtp=True) as llm:
        model = model_of(llm)
        own = mtp.draft_states(model, ids[1:], places, hidden[0], (9,))
        check_close(name, model.compute_logits(own), logits[0])
        check_close(name, mtp.draft(model, ids[2:], places[:, 1:], own[:-1], (9,), layer=1), logits[1])


def test_names_of_a_text_model_are_read_too(world: World, loaded: LoadedModels, tmp_path: Path) -> None:
    stem = "model.layers.3."
    _, drafter = world("glm4v_moe")
    folder = add_mtp(loaded.folder("glm4v_moe"), tmp_path / "model", drafter, stem)
    ids, hidden, places = torch.randint(600, (9,)), torch.randn(9, 64), torch.arange(9).expand(3, -1)
    with make_llm(ROWS["glm4v_moe"], folder, load_mtp=True) as llm:
        check_close("glm4v_moe", mtp.draft(model_of(llm), ids, places, hidden), drafter(ids, places, hidden))
    with make_llm(ROWS["glm4v_moe"], folder) as llm:
        assert not hasattr(model_of(llm), "mtp_layers")


@pytest.mark.parametrize("name", ["qwen3_5", "text-qwen3_next"])
def test_several_layers_of_qwen_share_norms_and_projection(
    name: str, world: World, loaded: LoadedModels, tmp_path: Path
) -> None:
    """Compute the drafts as vLLM's qwen3_next_mtp.py and qwen3_5_mtp.py do."""
    first, drafter = world(name)
    second = Drafter(loaded.oracle(*place(name))[0], STEMS[name], 8)
    for part in ("enorm", "hnorm", "norm", "eh_proj"):
        setattr(second, part, getattr(drafter, part))
    folder = change(first, tmp_path / "model", mtp_num_hidden_layers=2)
    stored, own = load_file(folder / "model.safetensors"), "mtp.layers.0."
    more = {key.replace(own, "mtp.layers.1."): one for key, one in second.stored("mtp.").items() if key.startswith(own)}
    save_file(stored | more, folder / "model.safetensors", {"format": "pt"})
    axes = 3 if name == "qwen3_5" else 1
    ids, hidden, places = torch.randint(600, (19,)), torch.randn(19, 64), torch.arange(19).expand(axes, -1)
    with make_llm(row_of(name), folder, load_mtp=True) as llm:
        model = model_of(llm)
        for layer, oracle in enumerate((drafter, second)):
            ours = mtp.draft(model, ids, places, hidden, (7,), layer=layer)
            check_close(name, ours, oracle(ids, places, hidden))
    plan = [explain(EngineConfig(str(one), load_mtp=True, max_model_len=64, device="cpu")).weights for one in (first, folder)]
    assert plan[1] - plan[0] == held(model.mtp_layers) - held(model.mtp_layers[0])
    with pytest.raises(CheckpointError, match=r"lacks mtp_layers\.1\.layer\."):
        LLM(change(first, tmp_path / "one", mtp_num_hidden_layers=2), load_mtp=True, device="cpu")


def test_experts_may_be_in_one_tensor(world: World, loaded: LoadedModels, tmp_path: Path) -> None:
    """Qwen3.5's checkpoints store the experts of the decoder so."""
    name, (_, drafter) = "qwen3_5_moe", world("qwen3_5_moe")
    folder = add_mtp(loaded.folder(name), tmp_path / "model", drafter, STEMS[name], joined=True)
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in load_file(folder / "model.safetensors")
    ids, hidden, places = torch.randint(600, (9,)), torch.randn(9, 64), torch.arange(9).expand(3, -1)
    with make_llm(row_of(name), folder, load_mtp=True) as llm:
        check_close(name, mtp.draft(model_of(llm), ids, places, hidden), drafter(ids, places, hidden))


@pytest.mark.parametrize("name", ["glm_ocr", "qwen3_5"])
def test_drafts_in_16_bits_are_near(name: str, world: World) -> None:
    folder, drafter = world(name)
    ids, hidden, places = torch.randint(600, (19,)), torch.randn(19, 64), torch.arange(19).expand(3, -1)
    expected = drafter(ids, places, hidden)
    for dtype, most in zip((torch.bfloat16, torch.float16), row_of(name).half, strict=True):
        with make_llm(row_of(name), folder, load_mtp=True, dtype=str(dtype).removeprefix("torch.")) as llm:
            ours = mtp.draft(model_of(llm), ids, places, hidden.to(dtype))
        assert (ours - expected).std() < most * expected.std()


@each
def test_they_are_ignored_unless_asked_for(
    name: str, world: World, loaded: LoadedModels, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the option, no tensor of them is read, nothing is logged, and the plan is that of the plain checkpoint."""
    folder, drafter = world(name)
    plain, given = (EngineConfig(str(one), max_model_len=64, device="cpu") for one in (loaded.folder(*place(name)), folder))
    with caplog.at_level(logging.WARNING), make_llm(row_of(name), folder) as llm:
        model = model_of(llm)
        assert not hasattr(model, "mtp_layers")
        assert not model.mtp_cache_specs
        with pytest.raises(ConfigError, match=r"layer 0 .* 0 are loaded; load the model with load_mtp=True"):
            model.draft(ForwardBatch(torch.zeros(1, dtype=torch.long), torch.zeros(1, 1), [], []), torch.zeros(1, 64))
        assert all(model.is_unused(stored) for stored in drafter.stored(STEMS[name]))
    assert not caplog.records
    assert explain(given) == explain(plain)


@each
def test_the_plan_counts_their_weights(name: str, world: World) -> None:
    """Nothing else is planned for them, since no step runs them."""
    folder, _ = world(name)
    options: dict[str, Any] = {"max_model_len": 64, "device": "cpu"}
    before = explain(EngineConfig(str(folder), **options))
    after = explain(EngineConfig(str(folder), load_mtp=True, **options))
    with LLM(folder, load_mtp=True, **options) as llm:
        own = held(model_of(llm).mtp_layers)
        assert llm.explain() == after
    assert after.weights - before.weights == own
    assert after.total - before.total == own


PROJECTIONS = re.compile(r"(self_attn\..*_proj(_with_mqa)?|mlp\..*_proj|mtp\.fc)\.weight")


@pytest.mark.parametrize("name", ["text-deepseek_v3", "text-qwen3_next"])
def test_published_fp8_weights_are_read_as_those_of_the_decoder(name: str, world: World, tmp_path: Path) -> None:
    """DeepSeek's projections are in 8 bits with a scale per block, and `eh_proj` is not. Qwen3-Next's queries are split."""
    folder, _ = world(name)
    packed, wide = write(folder, tmp_path, SCHEMES["fp8 block"], lambda stored: bool(PROJECTIONS.search(stored)))
    ids, hidden, places = torch.randint(600, (19,)), torch.randn(19, 64), torch.arange(19)[None]
    drafts = list[Tensor]()
    for one in (packed, wide):
        with make_llm(row_of(name), one, load_mtp=True, dtype="float32") as llm:
            model = model_of(llm)
            quantised = [bool(layer.formats) for layer in linears(model) if not layer.exact]
            assert sum(quantised) == (one == packed) * (len(quantised) - 1)
            drafts.append(mtp.draft(model, ids, places, hidden))
    check_close(name, *drafts)


def linears(model: DecoderModel) -> list[Linear]:
    return [module for module in model.mtp_layers.modules() if isinstance(module, Linear)]


@pytest.mark.parametrize(("quantization", "form"), [pytest.param("int8", "int8", marks=needs_int8), ("int4", Int4Options())])
def test_their_weights_are_quantised_as_those_of_the_decoder(quantization: str, form: Any, world: World) -> None:
    folder, _ = world("glm_ocr")
    with make_llm(row_of("glm_ocr"), folder, load_mtp=True, quantization=quantization) as llm:
        assert {layer.quantization for layer in linears(model_of(llm))} == {form}
        ids, hidden, places = torch.randint(600, (9,)), torch.randn(9, 64), torch.arange(9).expand(3, -1)
        assert mtp.draft(model_of(llm), ids, places, hidden).isfinite().all()


def test_their_cache_may_be_in_8_bits_and_sleep_keeps_them(world: World) -> None:
    folder, drafter = world("qwen3_5")
    ids, hidden, places = torch.randint(600, (9,)), torch.randn(9, 64), torch.arange(9).expand(3, -1)
    with make_llm(row_of("qwen3_5"), folder, load_mtp=True, kv_cache_dtype="int8") as llm:
        assert [spec.quant_dtype for spec in model_of(llm).mtp_cache_specs] == [torch.int8]
        before = mtp.draft(model_of(llm), ids, places, hidden)
        error = (before - drafter(ids, places, hidden)).std() / before.std()
        assert 0 < error < 0.02
        llm.sleep()
        llm.wake_up()
        assert torch.equal(mtp.draft(model_of(llm), ids, places, hidden), before)


def change(folder: Path, target: Path, keep: Callable[[str], bool] = lambda name: True, **changes: Any) -> Path:
    """Copy a checkpoint with some of its tensors, and with changes of config.json."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if keep(name)}, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    config.get("text_config", config).update(changes)
    (target / "config.json").write_text(json.dumps(config))
    return target


REFUSED = {
    "a family without them": ("text-llama", {}, "states no layers for multi-token prediction"),
    "a config without them": ("text-deepseek_v3", {"num_nextn_predict_layers": 0}, "states no layers"),
    "a checkpoint without them": ("text-qwen3_next", {}, "has no tensors for multi-token prediction; give one that has"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_none_is_refused(case: str, loaded: LoadedModels, tmp_path: Path) -> None:
    name, changes, message = REFUSED[case]
    folder = change(loaded.folder(name), tmp_path / "model", **changes)
    for ask_for in (LLM, describe_checkpoint):
        with pytest.raises(ConfigError, match=f"^load_mtp=True, but .*{message}.*the method mtp out$") as caught:
            ask_for(folder, load_mtp=True, device="cpu")
        assert caught.value.info.param == "load_mtp"
    describe_checkpoint(folder, device="cpu")


@pytest.mark.parametrize(("name", "lost"), [("glm_ocr", "eh_proj"), ("qwen3_5", "mtp.pre_fc_norm_hidden")])
def test_tensors_that_are_missing_or_unknown_are_named(name: str, lost: str, world: World, tmp_path: Path) -> None:
    folder, _ = world(name)
    less = change(folder, tmp_path / "less", lambda stored: lost not in stored)
    own = "mtp_layers.0.eh_proj.weight" if lost == "eh_proj" else "mtp_layers.0.hnorm.weight"
    with pytest.raises(CheckpointError, match=rf"lacks {own};"):
        LLM(less, load_mtp=True, device="cpu")
    LLM(less, device="cpu", max_model_len=64)
    stored = load_file(folder / "model.safetensors") | {f"{STEMS[name]}odd.weight": torch.ones(2)}
    save_file(stored, less / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"holds unknown {STEMS[name]}odd\.weight"):
        LLM(less, load_mtp=True, device="cpu")


def test_they_need_a_decoder_of_ours(world: World, built: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs the decoder, not parts='encoder'; leave one of them out"):
        LLM(world("glm_ocr")[0], load_mtp=True, parts="encoder", device="cpu")
    fallbacks.hide_native(monkeypatch)
    with pytest.raises(ConfigError, match="needs a decoder-only model that does not run through transformers"):
        LLM(built("video_llama_3"), load_mtp=True, device="cpu")
