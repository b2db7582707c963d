"""A smaller model that drafts: answers are those without, and what it proposes are its own greedy tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import drafting, free_drafter
from family import Family, ask, save
from parity import ROWS, LoadedModels, greedy, make_llm
from safetensors.torch import load_file, save_file
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import ConfigError
from sensorium.engine.drafts import drafter
from sensorium.engine.speculative_config import DraftLimits
from transformers import AutoModelForCausalLM

LIMITS = DraftLimits(3, predicted=3, method="draft_model", model="x")
PARAMS = SamplingParams(temperature=0.6, seed=5, max_tokens=24, ignore_eos=True, logprobs=2, n=2)


def config(model: Path, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"model": str(model), "num_speculative_tokens": 3, **more}}


def questions(row: Family) -> list[dict[str, Any]]:
    return [ask(row, case, number).ours for number, case in enumerate(row.default_cases())]


def with_encoder_of(source: Path, model: Path, target: Path, encoder: str) -> Path:
    """Copy a checkpoint with the encoder of another one."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    tensors, theirs = load_file(source / "model.safetensors"), load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if encoder not in name}
    save_file(
        kept | {name: tensor for name, tensor in theirs.items() if encoder in name},
        target / "model.safetensors",
        {"format": "pt"},
    )
    return target


@pytest.fixture(scope="module")
def smaller(loaded: LoadedModels, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a row's name to another checkpoint of it, with other weights."""
    root = tmp_path_factory.mktemp("smaller")
    return cache(lambda name: save(ROWS[name], root / name, 1))


@pytest.fixture(scope="module")
def distilled(loaded: LoadedModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Whisper with the encoder of the model and fewer layers in its decoder."""
    root = tmp_path_factory.mktemp("distilled")
    small = save(ROWS["whisper"], root / "small", 1, decoder_layers=2)
    return with_encoder_of(small, loaded.folder("whisper"), root / "distilled", "model.encoder.")


def check(llm: LLM, prompts: list[dict[str, Any]], params: SamplingParams = PARAMS) -> None:
    """Assert that answers are those without drafts, and that some were verified."""
    with drafting(llm, None):
        expected = [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]
    with drafting(llm, free_drafter(llm.engine.info.vocab_size, LIMITS)) as scheduler:
        scheduler.drafts.drafter.rates.rate = lambda name, matched: 0.9
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.error for output in outputs] == [None] * len(outputs)
        assert [output.outputs for output in outputs] == expected
        counts = {stats.proposer: stats for stats in llm.stats.drafts}
        assert counts["draft_model"].num_drafted > 0
        assert not any(stats.failed for stats in counts.values())
        assert all(sequence.predicts for sequence in llm.engine.loop.core.executor.runner.sequences.values())


@pytest.mark.parametrize("name", ["qwen2_vl", "text-llama", "gemma3", "qwen3_vl"])
def test_answers_are_those_without(name: str, loaded: LoadedModels, smaller: Callable[[str], Path]) -> None:
    row = ROWS[name]
    with make_llm(row, loaded.folder(name), **config(smaller(name))) as llm:
        assert not llm.engine.loop.core.executor.runner.predictor._options.shares_encoder
        check(llm, questions(row))
        llm.sleep()
        llm.wake_up()
        check(llm, questions(row))


@pytest.mark.parametrize("name", ["qwen2_vl", "text-llama", "qwen3_vl"])
def test_the_model_itself_is_always_right(name: str, loaded: LoadedModels) -> None:
    """It sees the same encoder rows, so that each greedy draft is accepted, also after preemption and prefix hits."""
    row = ROWS[name]
    with make_llm(row, loaded.folder(name), **config(loaded.folder(name)), enable_prefix_caching=False) as llm:
        assert llm.engine.loop.core.executor.runner.predictor._options.shares_encoder is (name != "text-llama")
        with drafting(llm, None):
            expected = [output.outputs for output in llm.generate(questions(row), greedy(33), use_tqdm=False)]
        with drafting(llm, free_drafter(llm.engine.info.vocab_size, LIMITS)) as scheduler:
            scheduler.drafts.drafter.rates.rate = lambda name, matched: 0.9
            outputs = llm.generate(questions(row), greedy(33), use_tqdm=False)
            (stats,) = llm.stats.drafts
        assert [output.outputs for output in outputs] == expected
        assert stats.num_accepted == stats.num_drafted > 0


def test_a_model_with_a_mask_token_drafts_in_one_pass(loaded: LoadedModels, tmp_path: Path) -> None:
    """Its proposals equal the tokens that transformers finds likeliest after the known tokens and after each mask token."""
    row, mask, count = ROWS["text-llama"], 7, 4
    folder = save(row, tmp_path / "draft", 1)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"pard_token": mask}))
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = config(folder, num_speculative_tokens=count, parallel_drafting=True)
    with make_llm(row, loaded.folder("text-llama"), **options, max_num_batched_tokens=16) as llm:
        predictor, seen, passes = llm.engine.loop.core.executor.runner.predictor, list[tuple[int, ...]](), list[int]()
        predict, run = predictor.predict, predictor._run
        predictor.predict = lambda model, parts: seen.extend(predict(model, parts)) or seen[-1:]
        predictor._run = lambda step: passes.append(len(step)) or run(step)
        with drafting(llm, None):
            (output,) = llm.generate(questions(row)[0], greedy(10), use_tqdm=False)
        predictor.predict, predictor._run = predict, run
        check(llm, questions(row))
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    sampled = [tokens for tokens in seen if tokens]
    assert len(sampled) == 10
    for number, tokens in enumerate(sampled):
        known = ids[: len(output.prompt_token_ids) + number + 1]
        with torch.inference_mode():
            logits = oracle(torch.tensor([[*known, *[mask] * (count - 1)]])).logits[0, -count:]
        assert list(tokens) == logits.argmax(-1).tolist()
    assert passes[-9:] == [1] * 9
    assert len(passes) <= 10 + -(-(len(output.prompt_token_ids) + count) // 16)


def test_whisper_with_a_distilled_decoder(loaded: LoadedModels, distilled: Path) -> None:
    row = ROWS["whisper"]
    with make_llm(row, loaded.folder("whisper"), **config(distilled)) as llm:
        runner = llm.engine.loop.core.executor.runner.predictor
        assert runner._options.shares_encoder
        assert not hasattr(runner.model, "encoder")
        plan = llm.explain()
        caches = [tensor for cache in (runner.cache, runner.cross) for tensor in cache.tensors]
        assert plan.draft_cache == sum(tensor.nbytes for tensor in caches)
        for _ in range(2):  # the second time, the prefix cache has the keys of the encoder rows
            check(llm, questions(row))
    with (
        make_llm(row, loaded.folder("whisper"), **config(loaded.folder("whisper"))) as llm,
        drafting(llm, free_drafter(llm.engine.info.vocab_size, LIMITS)) as scheduler,
    ):
        scheduler.drafts.drafter.rates.rate = lambda name, matched: 0.9
        llm.generate(questions(row), greedy(33), use_tqdm=False)
        (stats,) = llm.stats.drafts
        assert stats.num_accepted == stats.num_drafted > 0


def test_its_memory_is_planned(loaded: LoadedModels, smaller: Callable[[str], Path]) -> None:
    row = ROWS["qwen2_vl"]
    with make_llm(row, loaded.folder("qwen2_vl"), **config(smaller("qwen2_vl")), max_num_seqs=3) as llm:
        plan, runner = llm.explain(), llm.engine.loop.core.executor.runner
        assert plan.draft_cache == sum(tensor.nbytes for tensor in runner.predictor.cache.tensors) > 0
        assert plan.draft_model > sum(parameter.nbytes for parameter in runner.predictor.model.head.state_dict().values())
        assert "draft model" in str(plan)
        llm.sleep()
        assert runner.predictor.model is None
        assert not runner.predictor.cache.tensors


def test_preemption_and_little_room(loaded: LoadedModels, smaller: Callable[[str], Path]) -> None:
    row = ROWS["text-llama"]
    options = {"max_model_len": 96, "max_num_seqs": 5, "block_size": 4, "kv_cache_memory_bytes": 260_000}
    with make_llm(row, loaded.folder("text-llama"), **config(smaller("text-llama")), **options) as llm:
        prompts = [{"prompt": f"def f{number}(x): return x + x * " + "x + " * number} for number in range(8)]
        check(llm, prompts, SamplingParams(temperature=0.8, seed=2, max_tokens=60, ignore_eos=True, logprobs=1))
        assert llm.stats.preemptions > 0


def test_turns_of_a_session(loaded: LoadedModels, smaller: Callable[[str], Path]) -> None:
    row = ROWS["text-llama"]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=14, ignore_eos=True)

    def turns(llm: LLM) -> list[Any]:
        answers = []
        with llm.live("def f(x): return x", params) as session:
            for part in (" + x", " * x", " - x"):
                answers.append(session.answer().outputs)
                session.truncate(len(session.token_ids) - 5)
                session.append(part)
            answers.append(session.answer().outputs)
        return answers

    with make_llm(row, loaded.folder("text-llama"), **config(smaller("text-llama"))) as llm:
        with drafting(llm, None):
            expected = turns(llm)
        with drafting(llm, free_drafter(llm.engine.info.vocab_size, LIMITS)) as scheduler:
            scheduler.drafts.drafter.rates.rate = lambda name, matched: 0.9
            assert turns(llm) == expected
            assert llm.stats.drafts[0].num_drafted > 0


def test_an_engine_in_another_process(loaded: LoadedModels, smaller: Callable[[str], Path]) -> None:
    row, folder = ROWS["text-llama"], loaded.folder("text-llama")
    with make_llm(row, folder) as llm:
        expected = [output.outputs for output in llm.generate(questions(row), PARAMS, use_tqdm=False)]
    options = config(smaller("text-llama"), quantization="int8") | {"engine_process": True}
    with make_llm(row, folder, **options) as llm:
        assert [output.outputs for output in llm.generate(questions(row), PARAMS, use_tqdm=False)] == expected


def test_predictions_that_take_too_long_end(
    loaded: LoadedModels, smaller: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ROWS["text-llama"]
    with make_llm(row, loaded.folder("text-llama"), **config(smaller("text-llama"))) as llm:
        predictor, calls = llm.engine.loop.core.executor.runner.predictor, []
        real = predictor.predict
        monkeypatch.setattr(predictor, "predict", lambda *inputs: calls.append(1) or real(*inputs))
        with drafting(llm, free_drafter(llm.engine.info.vocab_size, LIMITS)) as scheduler:
            monkeypatch.setattr(drafter, "_TRIALS", 4)
            scheduler.drafts.drafter.rates.rate = lambda name, matched: 0.99
            scheduler.drafts.drafter._predict_seconds = 9.0  # steps take 1
            monkeypatch.setattr(scheduler.drafts.drafter, "end_step", lambda *measured: None)
            (output,) = llm.generate(questions(row)[:1], greedy(40), use_tqdm=False)
        (stats,) = output.drafts
        assert stats.switched_off == 1
        assert len(calls) < 12
        assert not predictor._drafted


def test_a_failure_touches_no_answer(
    loaded: LoadedModels, smaller: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ROWS["text-llama"]
    with make_llm(row, loaded.folder("text-llama"), **config(smaller("text-llama"))) as llm:
        with drafting(llm, None):
            expected = [output.outputs for output in llm.generate(questions(row), greedy(20), use_tqdm=False)]
        predictor = llm.engine.loop.core.executor.runner.predictor

        def broken(batch: Any) -> Any:
            raise RuntimeError("broken")

        monkeypatch.setattr(predictor.model, "forward", broken)
        with drafting(llm, free_drafter(llm.engine.info.vocab_size, LIMITS)):
            outputs = llm.generate(questions(row), greedy(20), use_tqdm=False)
        assert [output.outputs for output in outputs] == expected
        assert not predictor.cache._rows


@pytest.mark.parametrize(
    ("name", "other", "reason"),
    [
        ("text-llama", "whisper", "needs one of its kind"),
        ("whisper", "text-llama", "needs one of its kind"),
        ("text-llama", "text-qwen3_next", "it has layers of the kind 'state'"),
    ],
)
def test_models_that_cannot_draft_are_refused(name: str, other: str, reason: str, loaded: LoadedModels) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        make_llm(ROWS[name], loaded.folder(name), **config(loaded.folder(other)))
    assert caught.value.info.param == "speculative_config"
    assert loaded.folder(other).name in str(caught.value)


def test_other_vocabularies_and_encoders_are_refused(
    loaded: LoadedModels, smaller: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="another encoder"):
        make_llm(ROWS["whisper"], loaded.folder("whisper"), **config(smaller("whisper")))
    for path in loaded.folder("text-llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"another vocabulary: \d+ is b'"):
        make_llm(ROWS["text-llama"], loaded.folder("text-llama"), **config(tmp_path))
    with pytest.raises(ConfigError, match="has another vocabulary"):
        make_llm(ROWS["text-llama"], loaded.folder("text-llama"), **config(Path("tiny-vl")))
