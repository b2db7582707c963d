"""/invocations: the fields of a body say which endpoint answers."""

from __future__ import annotations

import httpx
import pytest
from http_server import TINY, error, image_url, listening, serving_models
from sensorium.engine.frontend.adapters import RequestAdapters
from sensorium.server.config import ServerConfig
from sensorium.server.state import Server
from waiting import LONG

MESSAGES = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image_url()}}]}]
CASES = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3, "temperature": 0},
    "/v1/completions": {"prompt": "a b", "max_tokens": 3, "temperature": 0},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/rerank": {"query": "a", "documents": ["b", "a"]},
    "/score": {"queries": "a", "documents": ["b", "a"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
}
NEW = ("id", "created", "usage")


@pytest.mark.parametrize("path", CASES)
def test_the_answer_is_that_of_the_endpoint(http, path):
    want, found = (http.post(where, json=CASES[path]) for where in (path, "/invocations"))
    assert want.status_code == found.status_code == 200
    assert set(want.json()) == set(found.json())
    for name in want.json().keys() - {*NEW}:
        assert found.json()[name] == want.json()[name]


def test_streams(http):
    body = {**CASES["/v1/completions"], "stream": True}
    response = http.post("/invocations", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"messages": None, "model": "tiny-vl"}, None),
        ({"messages": MESSAGES, "prompt": "a"}, "prompt"),
        ({"messages": 3}, "messages"),
        ({"query": "a"}, "documents"),
        ({"prompt": "a", "max_tokens": "3"}, "max_tokens"),
    ],
)
def test_bodies_of_no_endpoint_are_refused(http, body, param):
    assert error(http.post("/invocations", json=body))["param"] == param


def test_what_is_not_a_body_is_refused(http):
    assert error(http.post("/invocations", json=[1]))["code"] == "invalid_input"
    for content in b"{", b"":
        assert http.post("/invocations", content=content, headers={"Content-Type": "application/json"}).status_code == 400
    for body in {"input": "a"}, {"prompt": "a"}, {"messages": MESSAGES}:
        assert error(http.post("/invocations", json={**body, "model": "other"}), 404)["code"] == "model_not_found"


def test_names_that_are_looked_for_reach_the_engine(http, monkeypatch):
    """With lora_resolvers, an unknown name may be that of an adapter."""
    monkeypatch.setattr(RequestAdapters, "resolves_names", property(lambda _: True))
    body = {"input": "a", "model": "sql"}
    want, found = (error(http.post(where, json=body)) for where in ("/v1/embeddings", "/invocations"))
    assert (want["code"], want["param"]) == (found["code"], found["param"]) == ("unknown_name", "adapter")


def test_each_of_several_models_is_loaded_for_its_requests():
    models = [{"name": name, "path": str(TINY), "options": {"max_model_len": 128}} for name in ("one", "two")]
    with serving_models(ServerConfig(models=models)) as (url, services), httpx.Client(base_url=url, timeout=LONG) as http:
        assert [pooled.state for pooled in services.pool.models] == ["loaded", "not_loaded"]
        assert error(http.post("/invocations", json={"prompt": 3, "model": "two"}))["param"] == "prompt"
        assert services.pool.models[1].state == "not_loaded"
        for body in CASES["/v1/completions"], CASES["/v1/embeddings"]:
            assert http.post("/invocations", json={**body, "model": "two"}).json()["model"] == "two"
        assert services.pool.models[1].state == "loaded"


def test_sagemaker_asks_without_a_key_whether_it_works(tiny):
    server = Server(tiny[1].llm, ServerConfig(api_key="user"), "tiny-vl")
    with listening(server) as url:
        assert httpx.get(f"{url}/ping", timeout=LONG).status_code == 200
        assert httpx.post(f"{url}/ping", timeout=LONG).status_code == 200
        assert httpx.post(f"{url}/invocations", json=CASES["/v1/completions"], timeout=LONG).status_code == 401
