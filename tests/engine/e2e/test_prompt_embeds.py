"""Prompts as token embeddings: the answer equals that of the token ids, rows are cached by content, other forms are refused."""

from __future__ import annotations

import re

import pytest
import torch
from family import load_rows, save
from safetensors.torch import load_file
from sensorium import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
IDS = [5 + 7 * i % 600 for i in range(300)]  # more than one piece of PROMPT_EMBEDS_ROWS
ROWS = {
    "text-llama": 1.0,
    "qwen3_vl": 1.0,  # deepstack levels
    "gemma3": 8.0,  # scaled embeddings, bidirectional items, windows; 64 ** 0.5
}


@pytest.fixture(scope="module", params=ROWS)
def loaded(request, tmp_path_factory):
    """Return a checkpoint's folder and its table of token embeddings, as the decoder reads it."""
    folder = save(load_rows()[request.param], tmp_path_factory.mktemp(request.param) / "model")
    weights = load_file(folder / "model.safetensors")
    (name,) = [name for name in weights if name.endswith("embed_tokens.weight")]
    return folder, weights[name] * ROWS[request.param]


def make(folder, **options):
    return LLM(folder, **{"device": "cpu", "max_model_len": 512, "enable_prompt_embeds": True} | options)


def ask(llm, prompt, params=GREEDY):
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output


@pytest.mark.parametrize("chunk", [2048, 48])
def test_embeddings_of_the_table_give_the_answer_of_the_ids(loaded, chunk):
    folder, table = loaded
    with make(folder, max_num_batched_tokens=chunk) as llm:
        want = ask(llm, {"prompt_token_ids": IDS})
        got = ask(llm, {"prompt_embeds": table[IDS]})
        assert got.error is None
        assert got.outputs == want.outputs
        assert got.prompt_token_ids == [0] * len(IDS)
        assert got.num_cached_tokens == 0
        again = ask(llm, {"prompt_embeds": table[IDS][None].clone()})
        assert again.outputs == want.outputs
        assert again.num_cached_tokens == 288
        other = table[IDS].clone()
        other[260] += 1.0
        assert ask(llm, {"prompt_embeds": other}).num_cached_tokens == 256
        assert ask(llm, {"prompt_embeds": table[IDS], "cache_salt": "other"}).num_cached_tokens == 0


def test_with_a_core_in_a_separate_process(loaded):
    folder, table = loaded
    with make(folder, engine_process=True) as llm:
        prompts = [{"prompt_token_ids": IDS[:40]}, {"prompt_embeds": table[IDS[:40]]}]
        want, got = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert got.error is None
        assert got.outputs == want.outputs


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = save(load_rows()["text-llama"], tmp_path_factory.mktemp("text") / "model")
    with make(folder) as llm:
        yield llm


def test_penalties_count_no_token_of_the_prompt(text):
    rows, params = torch.ones(20, 64), SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    (before,), (after,) = (
        ask(text, {"prompt_embeds": rows}, one).outputs
        for one in (params, SamplingParams(temperature=0.0, max_tokens=1, logprobs=20, repetition_penalty=5.0))
    )
    assert before.logprobs == after.logprobs


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.ones(3, 63), r"prompt_embeds: embeddings must have the shape \[n, 64\]"),
        (torch.ones(0, 64), r"not \[0, 64\]"),
        (torch.ones(2, 3, 64), r"not \[2, 3, 64\]"),
        (torch.ones(64), r"not \[64\]"),
        (torch.full((3, 64), torch.nan), "NaN or infinite"),
        (torch.full((3, 64), 1e300, dtype=torch.float64), "too large for float32"),
        (torch.ones(3, 64, dtype=torch.int64), "must be floating point, not int64"),
        (torch.ones(3, 64).to_sparse(), "dense tensor"),
        (torch.ones(512, 64), "max_model_len is 512"),
        ([[1.0] * 64], "dense tensor, not list"),
        ("text", "dense tensor, not str"),
    ],
)
def test_other_forms_are_refused(text, value, reason):
    error = ask(text, {"prompt_embeds": value}).error
    assert error is not None
    assert error.param == "prompt_embeds"
    assert re.search(reason, error.message)


def test_options_that_need_token_ids_are_refused(text):
    rows = torch.ones(3, 64)
    for more in ({"prompt": "x"}, {"prompt_token_ids": [1]}, {"multi_modal_data": {"image": None}}, {"fit": "context"}):
        assert "leave out" in ask(text, {"prompt_embeds": rows, **more}).error.message
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    assert "prompt_logprobs need" in ask(text, {"prompt_embeds": rows}, params).error.message


def test_an_engine_without_the_option_refuses_them(text):
    with LLM(text.config.model, device="cpu", max_model_len=64) as llm:
        assert "enable_prompt_embeds=True" in ask(llm, {"prompt_embeds": torch.ones(3, 64)}).error.message
        assert llm.explain().encoder_cache == 0
    assert text.explain().encoder_cache > 0
