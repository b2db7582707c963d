"""Endpoints for administrators: they need their own key, and do not exist without one."""

from __future__ import annotations

import itertools
import threading

import pytest
from http_server import TINY, listening, make_server
from sensorium.callers.errors import ConfigError
from sensorium.server.config import ServerConfig
from sensorium.server.endpoints.admin import ADMIN_PATHS
from sensorium.server.state import Server
from waiting import LONG, wait_until

httpx = pytest.importorskip("httpx")
ADMIN = {"Authorization": "Bearer admin"}
BODY = {"prompt": "a b c d e f g h", "max_tokens": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def served():
    server = make_server(TINY, "tiny-vl", ServerConfig(admin_key="admin", api_key="user"), max_model_len=256, warm_up=False)
    with listening(server) as url, httpx.Client(base_url=url, timeout=LONG) as http:
        yield http, server
    server.engine.close()


def answer(http):
    response = http.post("/v1/completions", json=BODY, headers={"x-api-key": "user"})
    return response.status_code, response.json()


@pytest.mark.parametrize("path", ADMIN_PATHS)
def test_the_admin_key_alone_opens_them(served, path):
    method = ADMIN_PATHS[path][0][0]
    for headers in {}, {"Authorization": "Bearer user"}, {"Authorization": "Bearer admi"}:
        response = served[0].request(method, path, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert served[0].post("/v1/completions", json=BODY, headers=ADMIN).status_code == 401
    assert path not in served[0].get("/openapi.json", headers={"x-api-key": "user"}).json()["paths"]


@pytest.mark.parametrize("path", ADMIN_PATHS)
def test_without_a_key_they_do_not_exist(http, path):
    assert http.request(ADMIN_PATHS[path][0][0], path, headers=ADMIN).status_code == 404


def test_the_engine_sleeps_and_wakes(served):
    http = served[0]
    before = answer(http)[1]["choices"]
    assert http.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": False}
    assert http.post("/sleep?level=1", headers=ADMIN).status_code == 200
    assert http.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": True}
    assert answer(http)[0] == 503
    assert http.get("/ping").status_code == 200
    assert http.post("/wake_up?tags=weights&tags=kv_cache", headers=ADMIN).status_code == 200
    assert http.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": False}
    assert answer(http)[1]["choices"] == before
    for wrong in "/sleep?level=3", "/wake_up?tags=other":
        assert http.post(wrong, headers=ADMIN).status_code == 400


def test_caches_are_emptied(served):
    http, server = served
    answer(http)
    assert http.post("/reset_prefix_cache", headers=ADMIN).json() == {"success": True}
    assert server.engine.loop.stats.blocks_cached == 0
    assert http.post("/reset_mm_cache", headers=ADMIN).status_code == 200
    assert server.engine.inputs.media.stats.bytes == 0


def test_load_counts_requests_in_progress(served):
    assert served[0].get("/load", headers=ADMIN).json() == {"server_load": 0}


def test_a_full_server_answers_administrators(served, monkeypatch):
    engine = served[1].llm
    server = Server(engine, ServerConfig(admin_key="admin", api_key="user", max_requests=1), "tiny-vl")
    long, user = {**BODY, "max_tokens": 200, "stream": True}, {"x-api-key": "user"}
    core, refused, steps = engine.engine.loop.core, threading.Event(), itertools.count()

    def step(*, work=core.step):
        if next(steps) >= 2:  # the stream has begun; with drafts a step may have many tokens
            wait_until(refused.is_set)
        return work()

    monkeypatch.setattr(core, "step", step)
    with listening(server) as url, httpx.Client(base_url=url, timeout=LONG) as http:
        with http.stream("POST", "/v1/completions", json=long, headers=user) as stream:
            next(stream.iter_lines())
            assert http.post("/v1/completions", json=BODY, headers=user).status_code == 429
            refused.set()
            assert http.post("/sleep", headers=ADMIN).status_code in (200, 400)  # 400: while the answer goes on
            for path in "/reset_prefix_cache", "/reset_mm_cache", "/wake_up":
                assert http.post(path, headers=ADMIN).status_code == 200
            assert http.post("/sleep").status_code == 401
        wait_until(lambda: not engine.engine.loop._names)


def test_an_empty_key_and_one_of_the_api_are_refused():
    with pytest.raises(ConfigError, match="admin_key"):
        ServerConfig(admin_key="")
    with pytest.raises(ConfigError) as caught:
        ServerConfig(admin_key="secret", api_key=["user", "secret"])
    assert caught.value.info.param == "admin_key"
    assert "secret" not in str(caught.value)
