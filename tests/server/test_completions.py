"""/v1/completions with the `openai` package and with plain HTTP."""

from __future__ import annotations

import json

import pytest
from sensorium import SamplingParams
from waiting import assert_idle

PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
FIELDS = {"model": "tiny-vl", "temperature": 0.0, "max_tokens": 5, "seed": 1, "ignore_eos": True}


def ask(http, prompt=PROMPT, **fields):
    return http.post("/v1/completions", json={**FIELDS, "prompt": prompt, **fields})


def choices(http, prompt=PROMPT, **fields):
    response = ask(http, prompt, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def streamed(http, prompt=PROMPT, **fields):
    """Return the chunks of a stream, and the choices that they add up to."""
    lines = ask(http, prompt, stream=True, **fields).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks, found = [json.loads(line[6:]) for line in lines[:-2]], {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        whole = found.setdefault(choice["index"], {"text": "", "logprobs": None, "finish_reason": None})
        assert whole["finish_reason"] is None
        whole["text"] += choice["text"]
        whole["finish_reason"] = choice["finish_reason"]
        if choice["logprobs"] is not None:
            whole["logprobs"] = whole["logprobs"] or {name: [] for name in choice["logprobs"]}
            for name, values in choice["logprobs"].items():
                whole["logprobs"][name] += values or []
    return chunks, [found[index] for index in sorted(found)]


def same(choice):
    return {name: choice[name] for name in ("text", "logprobs", "finish_reason")}


def test_the_engines_answers(http, tiny):
    params = SamplingParams(temperature=0.0, max_tokens=5, seed=1, ignore_eos=True)
    expected = tiny[1].llm.llm.generate([PROMPT, "abc"], params, use_tqdm=False)
    found = choices(http, [PROMPT, "abc"])
    assert [choice["text"] for choice in found] == [output.outputs[0].text for output in expected]
    assert [choice["index"] for choice in found] == [0, 1]
    assert choices(http, expected[0].prompt_token_ids)[0] == found[0]
    assert [same(one) for one in choices(http, [output.prompt_token_ids for output in expected])] == [
        same(one) for one in found
    ]


def test_the_package(client):
    found = client.completions.create(model="tiny-vl", prompt=[PROMPT, "b"], max_tokens=4, temperature=0, logprobs=2, echo=True)
    assert found.choices[0].text.startswith(PROMPT)
    assert found.object == "text_completion"
    assert found.usage.completion_tokens <= 8
    chunks = list(client.completions.create(model="tiny-vl", prompt="b", max_tokens=4, temperature=0, stream=True))
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 2},
        {"logprobs": 0, "echo": True},
        {"logprobs": 3, "echo": True, "n": 2, "temperature": 1.0},
        {"stop": ["e"], "max_tokens": 20},
    ],
)
def test_streams_add_up(http, fields):
    prompts = [PROMPT, "abc"]
    found = choices(http, prompts, **fields)
    chunks, whole = streamed(http, prompts, **fields)
    for ours, expected in zip(whole, map(same, found), strict=True):
        for choice in (ours, expected):
            if choice["logprobs"] is not None:
                choice["logprobs"].pop("text_offset")  # a chunk cannot know the text of special tokens before it
                choice["logprobs"]["top_logprobs"] = choice["logprobs"]["top_logprobs"] or []
        assert ours == expected
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_prompt_is_scored_without_an_answer(http):
    (whole,) = choices(http, "abc", echo=True, logprobs=1, max_tokens=1)
    body = {"model": "tiny-vl", "prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}
    found = http.post("/v1/completions", json=body).json()
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"], found["usage"]["completion_tokens"]) == ("abc", "length", 0)
    count = found["usage"]["prompt_tokens"]
    assert count == len(choice["logprobs"]["tokens"]) == len(whole["logprobs"]["tokens"]) - 1
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert choice["logprobs"][name] == whole["logprobs"][name][:count]
    lines = http.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [("abc", "length")]
    refused = http.post("/v1/completions", json={**body, "echo": False})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def test_echo_has_the_log_probabilities_of_the_prompt(http, tiny):
    (choice,) = choices(http, "abc", echo=True, logprobs=1)
    found = choice["logprobs"]
    ids = tiny[1].engine.tokenizer.encode("abc")
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["text_offset"]) == len(ids) + 5
    assert found["token_logprobs"][0] is None
    assert all(value <= 0 for value in found["token_logprobs"][1:])
    assert found["top_logprobs"][0] is None
    assert all(len(entry) == 1 for entry in found["top_logprobs"][1:])
    assert found["text_offset"][0] == 0


def test_usage(http):
    usage = ask(http, ["abc", "abcd"]).json()["usage"]
    assert usage["completion_tokens"] == 10
    chunks, _ = streamed(http, ["abc", "abcd"], stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert {**chunks[-1]["usage"], "prompt_tokens_details": None} == {**usage, "prompt_tokens_details": None}
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [""] * 3000}, "prompt"),
        ({"prompt": None}, None),
        ({"prompt": ["a", 3]}, None),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2, "temperature": 1.0, "n": 3}, "best_of"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 99}, None),
        ({"messages": []}, "messages"),
        ({"prompt": "hello " * 4000}, "prompt"),
        ({"prompt": ["abc", "hello " * 4000]}, "prompt[1]"),
    ],
)
def test_wrong_fields(http, tiny, fields, param):
    for stream in (False, True):
        response = ask(http, **{"prompt": PROMPT, "stream": stream, **fields})
        if stream and response.status_code == 200:  # the first prompt's output came first
            assert '"error"' in response.text
            continue
        assert response.status_code == 400, response.text
        assert param is None or response.json()["error"]["param"] == param
    assert_idle(tiny[1].llm)


def test_best_of_returns_the_likeliest_answers(http):
    fields = {"temperature": 1.5, "seed": 3}
    every = ask(http, n=6, logprobs=0, **fields).json()
    means = [sum(choice["logprobs"]["token_logprobs"]) / 5 for choice in every["choices"]]
    ranked = sorted(range(6), key=lambda index: -means[index])
    assert ranked[:2] != [0, 1]
    found = ask(http, ["a", PROMPT], n=2, best_of=6, **fields).json()
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in found["choices"][2:]] == [every["choices"][index]["text"] for index in ranked[:2]]
    assert found["choices"][2]["logprobs"] is None
    assert found["usage"]["completion_tokens"] == 2 * 6 * 5
    assert choices(http, best_of=1) == choices(http)
    for wrong in ({"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}, {"best_of": 10**6}):
        error = ask(http, **{**fields, **wrong}).json()["error"]
        assert error["param"] == "best_of", error
        assert "best_of" in error["message"]
