"""Where the server listens, and the names that it answers to."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from sensorium.callers.errors import ConfigError
from sensorium.server.app import make_app
from sensorium.server.config import ServerConfig
from sensorium.server.listeners import bind
from sensorium.server.state import Server
from starlette.testclient import TestClient

TINY = Path(__file__).parents[2] / "assets" / "tiny-vl"


def test_a_unix_socket_is_only_for_its_user_and_replaces_an_abandoned_one(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    config = ServerConfig(uds=str(path))
    with bind(config):
        with pytest.raises(ConfigError) as caught:
            bind(config)
        assert caught.value.info.param == "uds", "also before the first one listens"
    with bind(config) as listener:
        listener.listen()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(ConfigError) as caught:
            bind(config)
        assert caught.value.info.param == "uds"
        path.rename(tmp_path / "moved")
        path.write_text("another server's")
    assert path.read_text() == "another server's", "only its own file is removed"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    bind(config).close()
    assert not path.exists()
    path.write_text("a file")
    for uds in (str(path), str(tmp_path / "none" / "x"), "a\0b"):
        with pytest.raises(ConfigError) as caught:
            bind(ServerConfig(uds=uds))
        assert caught.value.info.param == "uds"
    assert path.read_text() == "a file"


def test_a_server_on_a_unix_socket_answers_and_removes_it(tmp_path: Path) -> None:
    path = str(tmp_path / "server.sock")
    words = [sys.executable, "-m", "sensorium", "serve", str(TINY), "--uds", path, "--max-model-len", "256"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words += ["--metrics-port", str(port), "--api-key", "key"]
    with subprocess.Popen([*words, "--engine-process", "false"], stderr=subprocess.PIPE, text=True) as run:
        try:
            assert run.stderr is not None
            line = run.stderr.readline()
            assert line == f"tiny-vl is served on the Unix socket {path}\n"
            with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://localhost", timeout=240) as client:
                body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
                assert client.post("/v1/chat/completions", json=body).status_code == 401
                answer = client.post("/v1/chat/completions", json=body, headers={"Authorization": "Bearer key"})
                assert answer.status_code == 200
                assert client.get("/metrics").status_code == 401
            metrics = httpx.get(f"http://127.0.0.1:{port}/metrics")
            assert metrics.status_code == 200
            assert re.search(r'vllm:generation_tokens_total\{model_name="tiny-vl"\} [12]\.0', metrics.text)
            assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 404
        finally:
            run.terminate()
        assert run.wait(60) == 0
    assert not os.path.exists(path)


def test_a_server_below_a_path(tiny: tuple[TestClient, Server]) -> None:
    config = ServerConfig(root_path="/apps/vision", api_key="key")
    client = TestClient(make_app(Server(tiny[1].llm, config, "small").services), base_url="http://localhost")
    for path, status in (("/v1/models", 401), ("/apps/vision/v1/models", 401), ("/apps/vision", 200), ("/apps/visions", 401)):
        assert client.get(path).status_code == status
    key = {"Authorization": "Bearer key"}
    for path, status in (("/v1/models", 200), ("/apps/vision/v1/models", 200), ("/apps/visions/v1/models", 404)):
        assert client.get(path, headers=key).status_code == status
    for text in (client.get("/").text, client.get("/apps/vision/").text):
        assert 'src="page/main.js"' in text
    for wrong in ("vision", "/", "/a b", 3, "//x", "/v1", "/api/x"):
        with pytest.raises(ConfigError) as caught:
            ServerConfig(root_path=wrong)  # type: ignore[arg-type]
        assert caught.value.info.param == "root_path"


def test_a_model_may_have_several_names(tiny: tuple[TestClient, Server]) -> None:
    config = ServerConfig(served_model_name=["small", "other"])
    client = TestClient(make_app(Server(tiny[1].llm, config, "small").services), base_url="http://localhost")
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["small", "other"]
    assert client.get("/v1/models/other").json()["id"] == "other"
    messages = [{"role": "user", "content": "a"}]
    for name, status in (("small", 200), ("other", 200), ("tiny-vl", 404)):
        body = {"model": name, "messages": messages, "max_tokens": 1}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == status
        if status == 200:
            assert answer.json()["model"] == "small"
    for names in ([""], [1], ""):
        with pytest.raises(ConfigError) as caught:
            ServerConfig(served_model_name=names)
        assert caught.value.info.param == "served_model_name"
