"""The parts of the load on the server, reduced."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec

import pytest

if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "httpx")):
    pytest.skip("the server's packages are missing", allow_module_level=True)

import httpx
from http_server import TINY, listening, make_server
from waiting import assert_idle

from benchmarks.serve_load import CHAT, JSON, KINDS, fair, health, image_body, killed, kills, malformed, mixed


def test_malformed_requests_are_refused():
    server = make_server(TINY, "tiny-vl", max_model_len=1024, warm_up=False)
    with server.llm.llm, listening(server) as url, httpx.Client(base_url=url, timeout=240) as http:
        for seed in range(10 * len(KINDS)):
            path, headers, body = malformed(seed)
            response = http.post(path, content=body, headers=headers)
            assert 400 <= response.status_code < 500, (seed, response.text)
            assert json.loads(response.text)["error"]["message"]
        assert http.post(CHAT, content=image_body(0, 2), headers=JSON).status_code == 200
        assert_idle(server.llm)


@pytest.mark.full
@pytest.mark.parametrize("part", ["fair", "killed", "kills", "mixed", "health"])
def test_the_parts(part):
    """Checks that compare times belong to the benchmark; the others hold on any machine."""
    run = {
        "fair": lambda: fair(20, 8),
        "killed": lambda: killed(30, 4),
        "kills": lambda: kills(30, 4, 2),
        "mixed": lambda: mixed(120, 8),
        "health": lambda: health(10, 8),
    }
    timed = {"some were in flight", "max/min <= 1.5", "flat memory", "served again in 5 s", "p99 < 50 ms"}
    found = asyncio.run(run[part]())
    assert {name for name, holds in found.holds.items() if not holds} <= timed, found
