"""Drafted tokens over HTTP: `draft_text`, OpenAI's `prediction`, and the counts in `usage`. Answers are those without.

The answers are noise, whose text has other tokens than the answer had; so some of them are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from drafting import drafting, free_drafter
from sensorium.engine.speculative_config import DraftLimits

PROMPT = "one two three one two three"
FIELDS: dict[str, Any] = {"temperature": 0.8, "seed": 3, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24},
    "completions": {"prompt": PROMPT, "max_tokens": 24},
    "responses": {"input": PROMPT, "max_output_tokens": 24},
}


@pytest.fixture(autouse=True)
def drafter(tiny: Any) -> Iterator[None]:
    """Let the server verify every draft, however busy the machine is."""
    server = tiny[1]
    with drafting(server, free_drafter(server.engine.info.vocab_size, DraftLimits())):
        yield


def post(http: httpx.Client, path: str, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = http.post(f"/v1/{path}", json=BODIES[path] | FIELDS | more).json()
    return found


def text_of(path: str, found: dict[str, Any]) -> str:
    if path == "responses":
        return str(found["output"][0]["content"][0]["text"])
    choice = found["choices"][0]
    return str(choice["text"] if path == "completions" else choice["message"]["content"])


def details(found: dict[str, Any]) -> dict[str, int]:
    usage = found["usage"]
    return dict(usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {})


@pytest.mark.parametrize("path", BODIES)
def test_a_draft_changes_nothing_but_the_counts(http: httpx.Client, path: str) -> None:
    plain = post(http, path)
    assert "accepted_prediction_tokens" not in details(plain)
    text = text_of(path, plain)
    for draft, least in ((text, 1), ("nothing like it", 0), ("", 0)):
        drafted = post(http, path, draft_text=draft)
        assert text_of(path, drafted) == text
        counts = details(drafted)
        assert counts.get("accepted_prediction_tokens", 0) >= least
        assert counts.get("rejected_prediction_tokens", 0) >= 0
    assert counts.get("accepted_prediction_tokens", 0) == 0


def test_token_ids_are_a_draft_too(http: httpx.Client) -> None:
    plain = post(http, "completions", return_token_ids=True)
    drafted = post(http, "completions", return_token_ids=True, draft_text=plain["choices"][0]["token_ids"])
    assert drafted["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    assert details(drafted)["accepted_prediction_tokens"] > 10
    assert details(drafted)["rejected_prediction_tokens"] == 0


@pytest.mark.parametrize("as_parts", [False, True])
def test_predictions_of_openai(client: Any, http: httpx.Client, as_parts: bool) -> None:
    text = text_of("chat/completions", post(http, "chat/completions"))
    content = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}] if as_parts else text
    found = client.chat.completions.create(
        model="tiny-vl",
        messages=BODIES["chat/completions"]["messages"],
        max_tokens=24,
        temperature=0.8,
        seed=3,
        prediction={"type": "content", "content": content},
        extra_body={"ignore_eos": True},
    )
    assert found.choices[0].message.content == text
    assert found.usage.completion_tokens_details.accepted_prediction_tokens > 0
    assert found.usage.completion_tokens_details.rejected_prediction_tokens is not None


def test_streams_end_with_the_counts(http: httpx.Client) -> None:
    text = text_of("chat/completions", post(http, "chat/completions"))
    body = BODIES["chat/completions"] | FIELDS | {"stream": True, "stream_options": {"include_usage": True}}
    answer = http.post("/v1/chat/completions", json=body | {"prediction": {"type": "content", "content": text}})
    lines = [line for line in answer.text.split("\n\n") if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    said = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert said == text
    assert details(chunks[-1])["accepted_prediction_tokens"] > 0


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another type": ({"prediction": {"type": "text", "content": "a"}}, "prediction"),
    "no content": ({"prediction": {"type": "content"}}, "prediction"),
    "an image": ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction"),
    "an unknown key": ({"prediction": {"type": "content", "content": "a", "b": 1}}, "prediction"),
    "twice": ({"prediction": {"type": "content", "content": "a"}, "draft_text": "a"}, "prediction"),
    "too long": ({"prediction": {"type": "content", "content": "a" * 2_000_000}}, "prediction"),
    "too long a draft": ({"draft_text": "a" * 2_000_000}, "draft_text"),
    "a number": ({"draft_text": 5}, "draft_text"),
    "no token": ({"draft_text": [10**7]}, "draft_text"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_drafts_are_refused_by_name(http: httpx.Client, name: str) -> None:
    fields, param = WRONG[name]
    response = http.post("/v1/chat/completions", json=BODIES["chat/completions"] | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
