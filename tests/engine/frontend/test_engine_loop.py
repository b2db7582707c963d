"""EngineLoop around the toy model: order of outputs, errors of single requests, seeds, and sampling parameters."""

import threading

import pytest
from sensorium.engine.frontend.request_handle import tokenize_bad_words
from sensorium.engine.frontend.serve import serve
from sensorium.engine.sampling_params import SamplingParams
from toy_engine import PROMPTS, Letters, ToyEngine, make_image
from waiting import LONG


@pytest.fixture
def engine(toy):
    return ToyEngine(toy)


def test_order_is_that_of_the_prompts(engine, toy):
    outputs = engine.answers(PROMPTS)
    assert [output.prompt for output in outputs] == ["hello", "see @ there", "@ and @", None]
    assert len(outputs[1].prompt_token_ids) == len("see  there") + 4
    alone = [ToyEngine(toy).answers([prompt])[0].outputs for prompt in PROMPTS]
    assert [output.outputs for output in outputs] == alone
    stages = {"plan", "decode", "process", "queue", "encode", "prefill", "decode_steps"}
    assert all(stages <= output.timings.keys() for output in outputs)
    assert all(seconds >= 0 for output in outputs for seconds in output.timings.values())


BAD = {
    "no item": ({"prompt": "a @"}, "image 0: the prompt has a placeholder"),
    "no placeholder": (
        {"prompt": "a", "multi_modal_data": {"image": make_image(1)}},
        "image 0: the prompt has no placeholder for it",
    ),
    "too many": ({"prompt": "@@@@", "multi_modal_data": {"image": [make_image(1)] * 4}}, "At most 3 image"),
    "too long": ("x" * 300, "300 tokens, but max_model_len is 200"),
    "black": ({"prompt": "@", "multi_modal_data": {"image": make_image(0)}}, "image 0: it is black"),
    "broken": ({"prompt": "@", "multi_modal_data": {"image": b"nonsense"}}, "image 0:"),
    "failing": ({"prompt": "@", "multi_modal_data": {"image": make_image(154)}}, "encoding failed"),
    "modality": ({"prompt": "a", "multi_modal_data": {"imagee": make_image(1)}}, "unknown modality 'imagee'"),
    "key": ({"prompt": "a", "images": []}, "unknown key 'images'"),
    "both": ({"prompt": "a", "prompt_token_ids": [5]}, "either"),
    "type": (7, "a prompt must be a string"),
    "ids": ({"prompt_token_ids": ["x"]}, "list of integers"),
    "vocabulary": ({"prompt_token_ids": [5, 101]}, "vocabulary"),
    "empty": ("", "no tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_prompt_fails_alone(engine, toy, name):
    if name == "failing":
        encode = engine.core.executor.runner.model.embed_multimodal

        def failing(modality, tensors):
            if any(int(seed) == 154 for seed in tensors["seed"]):
                raise RuntimeError("bad")
            return encode(modality, tensors)

        engine.core.executor.runner.model.embed_multimodal = failing
    prompt, message = BAD[name]
    outputs = engine.answers([PROMPTS[1], prompt, PROMPTS[0]])
    assert message in outputs[1].error.message
    assert "\n" not in outputs[1].error.message
    assert outputs[1].outputs[0].finish_reason == "error"
    good = ToyEngine(toy).answers([PROMPTS[1], PROMPTS[0]])
    assert [outputs[0].outputs, outputs[2].outputs] == [output.outputs for output in good]


def test_the_same_image_is_processed_once(engine):
    prompts = [{"prompt": "@ a" + "b" * i, "multi_modal_data": {"image": make_image(9)}} for i in range(6)]
    engine.answers(prompts)
    assert engine.info.processed == [9]


def test_answers_depend_on_seeds_only(engine, toy):
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=3, n=3)
    alone = ToyEngine(toy).texts(["hello"], params)[0]
    assert len(set(alone)) == 3
    assert engine.texts([*PROMPTS, "hello"], params)[4] == alone
    assert engine.texts(["hello"], params)[0] == alone
    unseeded = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    one, two = ToyEngine(toy).texts(["hello", "hello"], unseeded)
    assert one != two
    assert ToyEngine(toy, budget=7).texts(["hello", "hello"], unseeded) == [one, two]


def test_stop_strings_end_the_sequence_in_the_engine(engine, toy):
    (full,) = engine.texts(["hello"], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))[0]
    stop = full[4:6]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop=[stop])
    output = ToyEngine(toy).answers(["hello"], params)[0].outputs[0]
    assert output.text == full[: full.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert len(output.token_ids) < 20


def test_stop_tokens_and_min_tokens(engine, toy):
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    free = list(engine.answers(["hello"], SamplingParams(**params))[0].outputs[0].token_ids)
    stop = free[3]
    stopped = ToyEngine(toy).answers(["hello"], SamplingParams(**params, stop_token_ids=[stop]))[0].outputs[0]
    assert list(stopped.token_ids) == free[: free.index(stop) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    later = ToyEngine(toy).answers(["hello"], SamplingParams(**params, stop_token_ids=[stop], min_tokens=6))[0].outputs[0]
    assert stop not in later.token_ids[:6]
    assert len(later.token_ids) >= 6


def test_bad_words_and_biases_change_the_answer(engine, toy):
    params = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}
    (free,) = engine.texts(["hello"], SamplingParams(**params))[0]
    pair = free[3:5]
    (without,) = ToyEngine(toy).texts(["hello"], SamplingParams(**params, bad_words=[pair]))[0]
    assert without[:4] == free[:4]
    assert pair not in without
    token = Letters().encode("~")[0]
    assert ToyEngine(toy).texts(["hello"], SamplingParams(**params, logit_bias={token: 100}))[0] == ["~" * 10]
    assert tokenize_bad_words(SamplingParams(bad_words=["ab"]), Letters()) == ((70, 71), (5, 70, 71))


def test_bad_words_are_tokenised_once_for_all_requests_of_a_call(monkeypatch):
    encode, encoded = Letters.encode, []
    monkeypatch.setattr(Letters, "encode", lambda self, text, **how: encoded.append(text) or encode(self, text, **how))
    params = SamplingParams(bad_words=["zz"])
    assert tokenize_bad_words(params, Letters()) is tokenize_bad_words(params, Letters())
    assert encoded == ["zz", " zz"]
    params.bad_words = ("yy",)
    tokenize_bad_words(params, Letters())
    assert encoded == ["zz", " zz", "yy", " yy"]


@pytest.mark.parametrize(
    ("params", "param", "option"),
    [
        ({"bad_words": ["x" * (4 << 20)]}, "bad_words", "max_sampling_chars"),
        ({"stop": ["ab" * 20] * 1000}, "stop", "max_sampling_chars"),
        ({"prompt_logprobs": 1000}, "prompt_logprobs", "max_logprobs"),
        ({"logprobs": 21}, "logprobs", "max_logprobs"),
        ({"logprobs": 20, "n": 65}, "logprobs", "max_logprobs"),
    ],
)
def test_requests_that_would_block_the_loop_are_refused(engine, params, param, option):
    (refused,) = engine.answers(["hello"], SamplingParams(**params))
    assert (refused.error.code, refused.error.param) == ("over_limit", param)
    assert option in refused.error.message
    assert len(refused.error.message) < 300
    assert engine.answers(["hello"], SamplingParams(temperature=0.0, max_tokens=3))[0].error is None


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompt_logprobs_do_not_depend_on_chunks(toy, chunk):
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=2, prompt_logprobs=2, n=2)
    outputs = ToyEngine(toy, budget=chunk).answers(PROMPTS, params)
    expected = ToyEngine(toy, budget=500).answers(PROMPTS, params)
    for output, reference in zip(outputs, expected, strict=True):
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        entries = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], reference.prompt_logprobs[1:], strict=True)
        for token, ours, theirs in entries:
            assert next(iter(ours)) == token
            assert {t: entry.rank for t, entry in ours.items()} == {t: entry.rank for t, entry in theirs.items()}
            assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-6)


def test_more_prompts_than_sequences_at_once(toy):
    prompts = [f"prompt {i}" for i in range(30)]
    engine = ToyEngine(toy, seqs=3)
    assert engine.texts(prompts) == [ToyEngine(toy).texts([prompt])[0] for prompt in prompts]


def test_a_slow_video_does_not_stop_the_others(engine):
    """Media are processed beside the steps."""
    gate, process = threading.Event(), engine.info.process

    def slow(item, dtype):
        if int(item.pixels[0, 0, 0]) == 7:
            assert gate.wait(LONG)
        return process(item, dtype)

    engine.info.process = slow
    prompts = [{"prompt": "@", "multi_modal_data": {"image": make_image(7)}}, *PROMPTS]
    order = []
    for index, _ in serve(engine.engine_loop, engine.requests(prompts)):
        order.append(index)
        if len(order) == len(PROMPTS):
            gate.set()
    assert sorted(order[:-1]) == [1, 2, 3, 4]
    assert order[-1] == 0
