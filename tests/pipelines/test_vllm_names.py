"""Methods, parameters and outputs with vLLM's names behave as in vLLM."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
import torch
from oracle import CHAT_TEMPLATE
from PIL import Image
from sensorium import LLM, AsyncLLM, BeamSearchParams, EngineArgs, PoolingParams, RequestOutputKind, SamplingParams
from sensorium.callers.errors import ConfigError, EngineDeadError, InputError
from sensorium.engine.core.codec import decode, encode
from sensorium.engine.model_files import call_overrides, load_model_files
from tqdm import tqdm
from transformers import AutoTokenizer

PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def args(checkpoint):
    return EngineArgs(model=str(checkpoint), max_model_len=256, max_num_seqs=4, warm_up=False)


@pytest.fixture(scope="module")
def llm(args):
    return LLM.from_engine_args(args)


def test_later_changes_of_parameters_affect_later_requests(llm):
    params = SamplingParams(**GREEDY)
    handle = llm.request("import os", params)
    params.max_tokens = 2
    ((_, output),) = llm.serve([handle], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 6
    (output,) = llm.generate("import os", params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
    params.temperature = -1
    with pytest.raises(InputError, match="temperature"):
        llm.generate("import os", params, use_tqdm=False)


def test_allowed_tokens_and_no_text(llm):
    (output,) = llm.generate(
        "import os", SamplingParams(**GREEDY, allowed_token_ids=[40, 41], detokenize=False), use_tqdm=False
    )
    assert set(output.outputs[0].token_ids) <= {40, 41}
    assert output.outputs[0].text == ""


def test_kinds_of_outputs(args, llm):
    async def collect(engine, kind):
        params = SamplingParams(**GREEDY, output_kind=kind)
        return [output.outputs[0].text async for output in engine.generate("import os", params, "id")]

    async def run():
        engine = AsyncLLM(llm)
        kinds = (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY)
        deltas, cumulative, final = [await collect(engine, kind) for kind in kinds]
        assert len(final) == 1
        assert cumulative[-1] == "".join(deltas) == final[0]
        other = AsyncLLM.from_engine_args(args)
        assert other.output_kind == "cumulative"
        assert (await collect(other, None))[-1] == final[0]
        other.close()

    asyncio.run(run())


def test_outputs_hold_lists(llm):
    params = SamplingParams(**GREEDY, logprobs=0, prompt_logprobs=0)
    (output,) = llm.generate("import os", params, use_tqdm=False)
    answer = output.outputs[0]
    assert [type(one) for one in (output.prompt_token_ids, output.outputs, answer.token_ids)] == [list] * 3
    assert [type(one) for one in (output.prompt_logprobs, answer.logprobs)] == [list] * 2
    assert (output.encoder_prompt, output.encoder_prompt_token_ids, output.metrics, output.lora_request) == (None,) * 4
    assert answer.finished()


def test_encode(llm):
    (whole,) = llm.encode("import os", use_tqdm=False)
    short, logits = llm.encode(
        ["import os", "import os"], [PoolingParams(dimensions=8), PoolingParams(token_ids=(5, 6))], use_tqdm=False
    )
    torch.testing.assert_close(short.outputs.data, whole.outputs.data[:8] / whole.outputs.data[:8].norm())
    assert logits.outputs.data.shape == (2,)
    assert (whole.finished, whole.prompt_token_ids) == (True, llm.get_tokenizer().encode("import os"))
    (failed,) = llm.encode({"prompt_token_ids": []}, use_tqdm=False)
    with pytest.raises(InputError, match="prompt"):
        _ = failed.outputs
    for call in (lambda: llm.encode("a", pooling_task="classify"), lambda: llm.classify("a")):
        with pytest.raises(ConfigError, match=r"PoolingParams\(token_ids="):
            call()
    with pytest.raises(InputError, match="one per prompt"):
        llm.encode(["a", "b"], [PoolingParams()])


def exhaustive(llm, prompt, length, width):
    """Return the best answers by asking for all continuations of all kept candidates."""
    beams = [(0.0, list(llm.get_tokenizer().encode(prompt)))]
    for _ in range(length):
        grown = []
        for total, tokens in beams:
            params = SamplingParams(max_tokens=1, logprobs=2 * width, temperature=0.0)
            (output,) = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
            grown += [(total + entry.logprob, [*tokens, token]) for token, entry in output.outputs[0].logprobs[0].items()]
        beams = sorted(grown, key=lambda beam: -beam[0])[:width]
    return beams


def test_beam_search(llm):
    one, two = llm.beam_search(["import os", "def"], BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True))
    for found, prompt in ((one, "import os"), (two, "def")):
        expected = exhaustive(llm, prompt, 4, 3)
        assert [sequence.tokens for sequence in found.sequences] == [tokens for _, tokens in expected]
        assert all(math.isclose(a.cum_logprob, b[0], abs_tol=1e-5) for a, b in zip(found.sequences, expected, strict=True))
        assert found.sequences[0].text.startswith(prompt)
        assert found.sequences[0].finish_reason == "length"
    with pytest.raises(InputError, match="raise max_logprobs"):
        llm.beam_search("def", BeamSearchParams(beam_width=11, max_tokens=2))
    for penalty in (float("nan"), 1e308, "1"):
        with pytest.raises(InputError, match="must be a number, at most 10 from 0"):
            BeamSearchParams(beam_width=2, max_tokens=2, length_penalty=penalty)


def test_one_beam_is_the_greedy_answer_about_an_image(llm):
    image = Image.new("RGB", (56, 84), (90, 20, 200))
    prompt = {"prompt": PLACEHOLDER + "a", "multi_modal_data": {"image": image}}
    (output,) = llm.generate(prompt, SamplingParams(**GREEDY), use_tqdm=False)
    (found,) = llm.beam_search(prompt, BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True))
    assert found.sequences[0].tokens == output.prompt_token_ids + output.outputs[0].token_ids
    assert "tensor(" not in repr(llm.encode(prompt, use_tqdm=False)[0])


def test_caches_can_be_reset(llm):
    prompt = list(range(40, 100))
    llm.generate([prompt], SamplingParams(**GREEDY), use_tqdm=False)
    assert llm.generate([prompt], SamplingParams(**GREEDY), use_tqdm=False)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache()
    assert llm.generate([prompt], SamplingParams(**GREEDY), use_tqdm=False)[0].num_cached_tokens == 0
    image = {"prompt": PLACEHOLDER, "multi_modal_data": {"image": Image.new("RGB", (56, 56))}}
    llm.generate(image, SamplingParams(**GREEDY), use_tqdm=False)
    assert llm.mm_cache_stats.entries >= 1  # earlier tests used the cache, too
    llm.reset_mm_cache()
    assert (llm.mm_cache_stats.entries, llm.mm_cache_stats.bytes) == (0, 0)


def test_defaults_and_counters(llm):
    params = llm.get_default_sampling_params()
    params.max_tokens = 99
    assert llm.get_default_sampling_params().max_tokens != 99
    assert {metric.name for metric in llm.get_metrics()} >= {"sensorium:running", "sensorium:preemptions"}
    with pytest.raises(InputError, match="level=5 must be 1 or 2"):
        llm.sleep(level=5)
    llm.sleep(level=2)
    for tags in ["weight"], "weights", [1]:
        with pytest.raises(InputError) as caught:
            llm.wake_up(tags=tags)
        assert (caught.value.info.code, caught.value.info.param) == ("invalid_value", "tags")
    llm.wake_up(tags=["weights"])
    assert not llm.asleep


def test_health(args, monkeypatch):
    engine = AsyncLLM.from_engine_args(args)
    asyncio.run(engine.check_health())
    assert (engine.errored, engine.is_running) == (False, True)
    with monkeypatch.context() as patch:
        patch.setattr(engine.engine.loop, "_dead", EngineDeadError("killed"))
        assert (engine.errored, engine.is_running) == (True, False)
        with pytest.raises(EngineDeadError, match="killed"):
            asyncio.run(engine.check_health())
    engine.close()
    assert (engine.errored, engine.is_running) == (False, False)
    with pytest.raises(InputError, match="the engine was closed"):
        asyncio.run(engine.check_health())


def test_tokenizer_has_the_names_of_transformers(llm, checkpoint):
    ours, theirs = llm.get_tokenizer(), AutoTokenizer.from_pretrained(checkpoint)
    text, messages = "import os<|im_end|>", [{"role": "user", "content": "say: hi"}]
    assert ours(text).input_ids == ours(text)["input_ids"] == theirs(text).input_ids
    assert ours([text, "a"]).attention_mask == theirs([text, "a"]).attention_mask
    for name in ("bos_token", "eos_token", "pad_token", "bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs)
    assert ours.convert_tokens_to_ids(["<|im_end|>", "a"]) == theirs.convert_tokens_to_ids(["<|im_end|>", "a"])
    assert ours.batch_decode([[40, 41], [42]]) == theirs.batch_decode([[40, 41], [42]])
    assert set(ours.all_special_tokens) >= set(theirs.all_special_tokens)
    options = {"add_generation_prompt": True, "chat_template": CHAT_TEMPLATE}
    rendered = ours.apply_chat_template(messages, tokenize=False, **options)
    assert rendered == theirs.apply_chat_template(messages, tokenize=False, **options)
    ids = theirs(rendered, add_special_tokens=False).input_ids
    assert ours.apply_chat_template(messages, **options) == ids
    assert ours.apply_chat_template(messages, return_dict=True, **options).input_ids == ids
    assert ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == rendered  # the checkpoint's own


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "options",
    [
        {"return_tensors": "pt", "padding": True},
        {"return_tensors": "np", "padding": "max_length", "max_length": 9},
        {"truncation": True, "max_length": 3},
        {"return_tensors": "pt", "padding": "longest", "truncation": True, "max_length": 4, "add_special_tokens": False},
    ],
)
def test_options_of_the_tokenizer_equal_those_of_transformers(llm, checkpoint, options, side, monkeypatch):
    ours, theirs = llm.get_tokenizer(), AutoTokenizer.from_pretrained(checkpoint, padding_side=side)
    monkeypatch.setattr(ours, "padding_side", side)
    for text in ("import os and more", ["import os and more", "a"]):
        found, want = ours(text, **options), theirs(text, **options)
        for name in ("input_ids", "attention_mask"):
            assert type(found[name]) is type(want[name])
            assert np.asarray(found[name], object).tolist() == np.asarray(want[name], object).tolist()


def test_tensors_of_the_tokenizer(llm):
    ours, messages = llm.get_tokenizer(), [{"role": "user", "content": "hi"}]
    rendered = ours.apply_chat_template(messages, return_tensors="pt", return_dict=True)
    assert rendered.to("cpu").input_ids.tolist() == [ours.apply_chat_template(messages)]
    for wrong, said in (
        ({"return_tensors": "tf"}, "return_tensors='tf' must be one of None, 'pt', 'np'"),
        ({"return_tensors": "pt"}, "different numbers of tokens; give padding=True"),
        ({"truncation": True}, "max_length=None must be a number of tokens"),
        ({"padding": "all"}, "padding='all' must be one of"),
    ):
        with pytest.raises(InputError, match=said):
            ours(["a b c", "a"], **wrong)
    with pytest.raises(InputError, match="return_tensors"):
        ours.apply_chat_template(messages, return_tensors="tf")


def test_hf_overrides_as_a_function(args, llm):
    def shorten(config):
        config.update({"max_position_embeddings": 96})
        config.text_config.max_position_embeddings = 96
        return config

    def change(config):
        config.pop("architectures")

    options = {"max_num_seqs": 2, "warm_up": False}
    with LLM(args.model, hf_overrides=shorten, **options) as other:
        assert other.max_model_len == 96
        assert other.config.hf_overrides["text_config"]["max_position_embeddings"] == 96
        assert other.generate("a", SamplingParams(**GREEDY), use_tqdm=False)[0].error is None
        assert "MemoryPlan" in repr(other.explain())
    for wrong, said in ((lambda config: 3, "must return the config or None, not an int"), (change, "without architectures")):
        with pytest.raises(ConfigError, match=said):
            LLM(args.model, hf_overrides=wrong, **options)


def test_the_config_of_a_function_replaces_config_json(args):
    stored = load_model_files(args.model).config

    def change(config):
        del config["text_config"]["max_position_embeddings"]
        return {**config, "vision_config": {"depth": 1}, "added": [1, {"b": [2]}]}

    found = decode(encode(call_overrides(args.model, change)))
    config = load_model_files(args.model, hf_overrides=found).config
    assert config["text_config"] == {k: v for k, v in stored["text_config"].items() if k != "max_position_embeddings"}
    assert (config["vision_config"], config["added"]) == ({"depth": 1}, [1, {"b": [2]}])
    assert config["architectures"] == stored["architectures"]


def test_arguments_of_generate_and_chat(llm):
    seen = []

    def bar(**options):
        seen.append(options["total"])
        return tqdm(disable=True, **options)

    params = SamplingParams(max_tokens=1)
    llm.generate(["a", "b"], params, use_tqdm=bar, lora_request=None, tokenization_kwargs=None)
    llm.chat([{"role": "user", "content": "a"}], params, use_tqdm=bar, lora_request=None, chat_template_content_format="auto")
    assert seen == [2, 1]
    for call in (llm.generate, llm.request):
        with pytest.raises(InputError) as caught:
            call("a", params, lora_request=5)
        assert (caught.value.info.code, caught.value.info.param) == ("invalid_value", "adapter")
    with pytest.raises(InputError, match="unknown argument 'fit'; give it as a key of the prompt"):
        llm.generate("a", params, fit="context")


def test_overrides_of_the_checkpoints_files(args):
    template, shorter = "[{{ messages[0].content }}]", {"max_position_embeddings": 100}
    options = {"hf_overrides": {"text_config": shorter, **shorter}, "override_generation_config": {"temperature": 0.5}}
    with LLM(args.model, generation_config="vllm", chat_template=template, warm_up=False, **options) as llm:
        assert llm.max_model_len == 100
        assert llm.get_default_sampling_params().temperature == 0.5
        (output,) = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1), use_tqdm=False)
        assert output.prompt == "[hi]"
        assert llm.get_tokenizer().chat_template == template
        assert llm.explain().rows()
    with pytest.raises(ConfigError, match="hf_overrides=5 must be a mapping"):
        LLM(args.model, hf_overrides=5)
