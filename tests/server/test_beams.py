"""Several answers over HTTP: beam search, `best_of`, and copies of greedy answers."""

from __future__ import annotations

import base64
import io
import itertools
import json
import logging

import pytest
from http_server import CASES, IMAGE, MEDIA, error, image_url
from sensorium import BeamSearchParams
from sensorium.server.logs import FIELDS
from waiting import assert_idle, wait_until

PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
MESSAGES = [{"role": "user", "content": "hello"}]
BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 5, "ignore_eos": True}
PLAIN = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}


def complete(http, prompt=PROMPT, **fields):
    return http.post("/v1/completions", json={"prompt": prompt, **fields})


def chat(http, messages=MESSAGES, **fields):
    return http.post("/v1/chat/completions", json={"messages": messages, **fields})


def found(response):
    assert response.status_code == 200, response.text
    return response.json()


def new_tokens(sequence, prompt_length):
    return sequence.tokens[prompt_length:]


@pytest.mark.parametrize("penalty", [1.0, -2.0])
def test_beams_of_completions_are_those_of_the_engine(http, tiny, penalty):
    llm = tiny[1].llm.llm
    params = BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=penalty)
    fields = {**BEAMS, "ignore_eos": False, "length_penalty": penalty, "return_token_ids": True, "logprobs": 0}
    body = found(complete(http, [PROMPT, "def"], **fields))
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    for output, prompt, choices in zip(
        llm.beam_search([PROMPT, "def"], params), (PROMPT, "def"), (body["choices"][:3], body["choices"][3:]), strict=True
    ):
        length = len(llm.get_tokenizer().encode(prompt))
        assert [choice["token_ids"] for choice in choices] == [new_tokens(one, length) for one in output.sequences]
        assert [choice["finish_reason"] for choice in choices] == [one.finish_reason for one in output.sequences]
        totals = [sum(choice["logprobs"]["token_logprobs"]) for choice in choices]
        assert totals == pytest.approx([one.cum_logprob for one in output.sequences], abs=1e-4)
    usage = body["usage"]
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in body["choices"])
    assert usage["prompt_tokens"] == sum(len(llm.get_tokenizer().encode(prompt)) for prompt in (PROMPT, "def"))


def test_one_beam_is_the_greedy_answer(http):
    """Text, log probabilities, elements and usage are those of an answer without beams."""
    part = {"type": "image_url", "image_url": {"url": image_url()}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": CASES[IMAGE]["prompt"]}]}]
    fields = {"max_tokens": 96, "temperature": 0.0, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    greedy = found(chat(http, messages, **fields))
    beams = found(chat(http, messages, use_beam_search=True, **fields))
    assert beams["choices"][0]["message"]["content"].strip() == CASES[IMAGE]["answer"]
    for body in (greedy, beams):
        for entry in body["choices"][0]["logprobs"]["content"]:
            entry["logprob"] = round(entry["logprob"], 3)
            for one in entry["top_logprobs"]:
                one["logprob"] = round(one["logprob"], 3)
    assert beams["choices"] == greedy["choices"]
    assert beams["usage"]["completion_tokens"] == greedy["usage"]["completion_tokens"]
    assert beams["usage"]["prompt_tokens"] == greedy["usage"]["prompt_tokens"]
    plain = complete(http, use_beam_search=True, echo=True, **PLAIN), complete(http, echo=True, **PLAIN)
    assert found(plain[0])["choices"] == found(plain[1])["choices"]


def test_beams_about_an_image_share_its_prompt(http, tiny):
    from PIL import Image

    data = base64.b64encode((MEDIA / IMAGE).read_bytes()).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "hello"}]}]
    body = found(chat(http, messages, **BEAMS, return_token_ids=True))
    image = Image.open(io.BytesIO((MEDIA / IMAGE).read_bytes()))
    engine = tiny[1].engine
    prompt = {"prompt_token_ids": body["prompt_token_ids"], "multi_modal_data": {"image": image}}
    (output,) = tiny[1].llm.llm.beam_search(prompt, BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True))
    length = len(body["prompt_token_ids"])
    assert [choice["token_ids"] for choice in body["choices"]] == [new_tokens(one, length) for one in output.sequences]
    assert body["usage"]["prompt_tokens_details"]["image_tokens"] > 0
    assert_idle(tiny[1].llm)
    assert engine.inputs.media.budget.num_bytes == 0


def test_best_of_keeps_the_best_beams(http):
    every = found(complete(http, **{**BEAMS, "n": 4}))
    best = found(complete(http, **{**BEAMS, "n": 2, "best_of": 4}))
    assert best["choices"] == every["choices"][:2]


def test_tools_of_the_models_choice_are_read_in_beams(tools):
    client, _ = tools
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    fields = {"model": "tiny-vl", "messages": MESSAGES, "tools": [tool], "max_tokens": 4, "extra_body": {"ignore_eos": True}}
    greedy = client.chat.completions.create(temperature=0, **fields)
    fields["extra_body"] = {"ignore_eos": True, "use_beam_search": True}
    assert client.chat.completions.create(**fields).choices[0].message.content == greedy.choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 11}, "n"),
        ({"n": 2, "best_of": 11}, "best_of"),
        ({"n": 0}, "n"),
        ({"n": 0, "best_of": 2}, "n"),
        ({"n": -1, "best_of": 3, "use_beam_search": False}, "n"),
        ({"best_of": 0}, "best_of"),
        ({"n": 1, "best_of": -1, "use_beam_search": False}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ({"top_p": 0.5}, "top_p"),
        ({"stop": "x"}, "stop"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"vllm_xargs": {"ngram_size": 3}}, "vllm_xargs"),
        ({"repetition_detection": {}}, "repetition_detection"),
    ],
)
def test_what_beams_cannot_do_is_refused_by_name(http, tiny, fields, param):
    for ask in (complete, chat):
        refused = ask(http, **{**BEAMS, **fields})
        assert refused.status_code == 400, refused.text
        assert error(refused)["param"] == param
    assert_idle(tiny[1].llm)


def test_further_limits_of_beams(http, tools, tiny):
    assert error(complete(http, ["a", "b" * 9000], **BEAMS))["param"] == "prompt[1]"
    assert error(complete(http, **{**BEAMS, "n": 11}))["message"].startswith("n=11 is over the limit of 10")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required", **BEAMS}
    assert error(http.post("/v1/chat/completions", json=body))["param"] == "tool_choice"
    for accepted in ({"top_p": 1.0, "top_k": -1, "stop": [], "seed": 3}, {"response_format": {"type": "text"}}):
        assert len(found(chat(http, **{**BEAMS, **accepted}))["choices"]) == 3
    assert len(found(complete(http, max_tokens=None, use_beam_search=True))["choices"]) == 1
    long = "a" * 1015  # the answer ends with the context
    (choice,) = found(complete(http, long, use_beam_search=True, max_tokens=9999, ignore_eos=True, return_token_ids=True))[
        "choices"
    ]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", tiny[1].engine.max_model_len - 1015)
    for path, fields in (("/v1/responses", {"input": "a"}), ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3})):
        for name, value in {"use_beam_search": True, "length_penalty": 2.0, "best_of": 2}.items():
            refused = http.post(path, json={**fields, name: value})
            assert (refused.status_code, name in refused.text) == (400, True), refused.text


def test_the_access_log_counts_the_tokens_of_the_answers(http, caplog):
    caplog.set_level(logging.INFO, "sensorium.server.access_log")
    usage = found(chat(http, **BEAMS))["usage"]
    wait_until(lambda: [record for record in caplog.records if record.message == "request"])
    fields = getattr(caplog.records[-1], FIELDS)
    assert (fields["prompt_tokens"], fields["completion_tokens"]) == (usage["prompt_tokens"], 3 * 5)


@pytest.mark.parametrize("ask", [complete, chat])
def test_greedy_answers_are_computed_once(http, tiny, ask):
    one = found(ask(http, **PLAIN, logprobs=2 if ask is complete else True))
    before = tiny[1].registry.get_sample_value("sensorium_generated_tokens_total")
    fields = {**PLAIN, "n": 3, "logprobs": 2 if ask is complete else True}
    several = found(ask(http, **fields))
    assert tiny[1].registry.get_sample_value("sensorium_generated_tokens_total") == before + PLAIN["max_tokens"]
    assert several["choices"] == [{**one["choices"][0], "index": index} for index in range(3)]
    assert several["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    assert several["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert found(ask(http, **{**fields, "best_of": 5}))["choices"] == several["choices"]
    lines = ask(http, **fields, stream=True, stream_options={"include_usage": True}).text.split("\n\n")
    texts = ["", "", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["text"] if ask is complete else choice["delta"].get("content", "")
    answer = one["choices"][0]
    assert texts == [answer["text"] if ask is complete else answer["message"]["content"]] * 3
    assert chunks[-1]["usage"]["completion_tokens"] == several["usage"]["completion_tokens"]
    assert error(ask(http, **{**fields, "n": 2000}))["param"] == "n"
    most = {"logprobs": 20} if ask is complete else {"logprobs": True, "top_logprobs": 20}
    assert "64 times as many for all answers" in error(ask(http, **{**fields, "n": 200, **most}))["message"]
    assert_idle(tiny[1].llm)


def test_best_of_of_a_conversation(http):
    fields = {"temperature": 1.5, "seed": 3, "max_tokens": 5, "ignore_eos": True}
    every = found(chat(http, n=6, logprobs=True, **fields))["choices"]
    means = [sum(entry["logprob"] for entry in choice["logprobs"]["content"]) / 5 for choice in every]
    ranked = sorted(range(6), key=lambda index: -means[index])
    assert ranked[:2] != [0, 1]
    body = found(chat(http, n=2, best_of=6, **fields))
    assert [choice["message"] for choice in body["choices"]] == [every[index]["message"] for index in ranked[:2]]
    assert [choice["logprobs"] for choice in body["choices"]] == [None, None]
    assert body["usage"]["completion_tokens"] == 6 * 5
    assert error(chat(http, n=2, best_of=6, stream=True, **fields))["param"] == "best_of"


def test_arguments_of_vllms_processor_against_repeated_ngrams(http):
    """DeepSeek-OCR's recipe for vLLM gives them."""
    fields = {**PLAIN, "max_tokens": 24, "return_token_ids": True}
    extra = {"ngram_size": 2, "window_size": 90, "whitelist_token_ids": []}
    for ask in (complete, chat):
        plain, tokens = (found(ask(http, **fields, **one))["choices"][0]["token_ids"] for one in ({}, {"vllm_xargs": extra}))
        pairs = [*itertools.pairwise(tokens)]
        assert len(set(pairs)) == len(pairs), tokens
        assert plain != tokens
        for wrong in ({"a": 1}, {"ngram_size": 0}, {"window_size": 3}, {"ngram_size": "x"}):
            refused = error(ask(http, **fields, vllm_xargs=wrong))
            assert (refused["param"], "vllm_xargs" in refused["message"]) == ("vllm_xargs", True)
