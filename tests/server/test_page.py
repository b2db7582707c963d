"""The page at `/` without a browser: what it may load, and what needs no key."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import httpx
import pytest
from http_server import listening
from sensorium.server.config import ServerConfig
from sensorium.server.endpoints.page import PAGE_FILES, SAMPLE_FILES
from sensorium.server.state import Server

FILES = PAGE_FILES | SAMPLE_FILES


@pytest.mark.parametrize("path", FILES)
def test_files_and_their_policy(http, path):
    response = http.get(path)
    assert (response.status_code, response.content) == (200, FILES[path].read_bytes())
    policy = dict(one.split(" ", 1) for one in response.headers["Content-Security-Policy"].split("; "))
    assert (policy["default-src"], policy["script-src"], policy["style-src"]) == ("'none'", "'self'", "'self'")
    assert "unsafe" not in response.headers["Content-Security-Policy"]
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert http.post(path).status_code == 405


def test_only_the_page_needs_no_key(tiny):
    guarded = Server(tiny[1].llm, ServerConfig(api_key="secret"), "tiny-vl")
    with listening(guarded) as url, httpx.Client(base_url=url) as client:
        for path in FILES:
            assert client.get(path).status_code == 200
        for path in ("/page", "/page/", "/page/other.js", "/page/../v1/models", "/v1/models", "/metrics", "/openapi.json"):
            assert client.get(path).status_code == 401


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_nothing_is_inline_or_from_elsewhere():
    elements = Elements()
    elements.feed(PAGE_FILES["/"].read_text("utf-8"))
    scripts = [attributes for tag, attributes in elements.found if tag == "script"]
    assert scripts
    assert all(f"/{attributes['src']}" in PAGE_FILES for attributes in scripts), "relative, so that a root_path works"
    assert not [tag for tag, attributes in elements.found if tag == "style" or "style" in attributes]
    assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
    for path in PAGE_FILES.values():
        text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), path.name
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert f"/page/{name}" in PAGE_FILES


def test_modules_are_small():
    assert sum(len(path.read_text("utf-8").splitlines()) for path in PAGE_FILES.values()) < 2200


def test_the_model_says_what_it_can_do(http):
    (card,) = http.get("/v1/models").json()["data"]
    assert card["capabilities"] == {
        "modalities": ["image", "video"],
        "tasks": ["chat"],
        "segment_times": False,
        "word_times": False,
        "architecture": "Qwen2_5_VLForConditionalGeneration",
        "patch_size": 8,
        "realtime": False,
        "documents": True,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_timings_on_request(http, stream):
    body = {"messages": [{"role": "user", "content": "Read the text."}], "max_tokens": 4, "stream": stream}
    assert '"timings"' not in http.post("/v1/chat/completions", json=body).text
    text = http.post("/v1/chat/completions", json={**body, "return_timings": True}).text
    assert text.count('"timings"') == 1
    timings = re.search(r'"timings":\{([^}]*)\}', text)[1]
    assert {"queue", "prefill", "decode_steps"} <= set(re.findall(r'"(\w+)":', timings))
