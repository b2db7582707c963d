"""Values of wrong types in every field of every body: each is answered or refused with a typed error, never with a 500."""

from __future__ import annotations

import json
import random

import pytest
from sensorium.server.protocol.chat import ChatBody
from sensorium.server.protocol.completions import CompletionBody
from sensorium.server.protocol.pooling import ClassifyBody, EmbeddingBody, RerankBody, ScoreBody
from sensorium.server.protocol.responses import ResponsesBody
from sensorium.server.protocol.tokens import DetokenizeBody, PlanBody, TokenizeBody
from waiting import assert_idle

MESSAGES = [{"role": "user", "content": "a"}]
BODIES = {
    "/v1/chat/completions": (ChatBody, {"messages": MESSAGES, "max_tokens": 2}),
    "/v1/responses": (ResponsesBody, {"input": "a", "max_output_tokens": 2}),
    "/v1/completions": (CompletionBody, {"prompt": "a", "max_tokens": 2}),
    "/v1/embeddings": (EmbeddingBody, {"input": "a"}),
    "/score": (ScoreBody, {"queries": "a", "documents": ["a"]}),
    "/rerank": (RerankBody, {"query": "a", "documents": ["a"]}),
    "/classify": (ClassifyBody, {"input": "a"}),
    "/tokenize": (TokenizeBody, {"prompt": "a"}),
    "/detokenize": (DetokenizeBody, {"tokens": [5]}),
    "/v1/media/plan": (PlanBody, {"messages": MESSAGES}),
}
DEEP = json.loads("[" * 90 + "]" * 90)
VALUES = [
    *(None, True, 0, -1, 3, 2**70, 1.5, float("inf"), float("nan"), "", "a", "\ud800", "\x00"),
    *([], [[]], [None], [True], [2**70], {}, {"a": 1}, {"": None}, {"type": "text"}, {"type": []}, {"url": 3}, {"content": []}),
    *({"content": [{"type": "image_url"}]}, [{"role": "user"}], [{"role": [], "content": {}}]),
    [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
    *({"json": {"$ref": "#"}}, {"regex": "("}, {"choice": []}),
    {"type": "json_schema", "json_schema": {"schema": {"type": 3}}},
    *(DEEP, {"a": DEEP}, [{"role": "user", "content": DEEP}]),
    [{"type": "function", "function": {"name": "a", "parameters": {"": DEEP}}}],
]
CASES = [(path, name, value) for path, (kind, _) in BODIES.items() for name in kind.model_fields for value in VALUES]


@pytest.mark.parametrize("part", range(4))
def test_wrong_values(http, tiny, part):
    seen = set()
    for path, name, value in random.Random(part).sample(CASES, 120):
        body = json.dumps({**BODIES[path][1], name: value})
        response = http.post(path, content=body, headers={"Content-Type": "application/json"})
        seen.add(response.status_code)
        assert response.status_code in (200, 400, 404), (path, name, value, response.text)
        if response.status_code != 200:
            assert set(response.json()["error"]) >= {"message", "type", "param", "code"}
    assert seen >= {200, 400}
    assert_idle(tiny[1].engine.llm)
