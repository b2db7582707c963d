"""The files of examples/deploy: their options and metrics exist."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from sensorium.engine.config import make_config
from sensorium.server.config import environment_options, read_config, split_options, with_defaults
from sensorium.server.model_entries import PARSERS_OF_MODEL
from sensorium.server.ray_serve import app

FOLDER = Path(__file__).parents[2] / "examples" / "deploy"


def unit_lines():
    lines = (FOLDER / "sensorium.service").read_text().splitlines()
    return [line.partition("=")[::2] for line in lines if "=" in line and not line.startswith("#")]


def compose():
    return yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]["sensorium"]


@pytest.mark.parametrize("kind", ["unit", "compose"])
def test_variables_are_options(kind):
    settings = [value for name, value in unit_lines() if name == "Environment"]
    variables = dict(setting.split("=", 1) for setting in settings) if kind == "unit" else compose()["environment"]
    given = {name: value for name, value in variables.items() if name.startswith("SENSORIUM_")}
    options = environment_options(given)
    assert options.keys() == {name.removeprefix("SENSORIUM_").lower() for name in given}
    config, engine = split_options(options)
    assert engine["model"]
    stop = dict(unit_lines())["TimeoutStopSec"] if kind == "unit" else compose()["stop_grace_period"].removesuffix("s")
    assert int(stop) > config.drain_seconds
    restart = dict(unit_lines())["Restart"] if kind == "unit" else compose()["restart"]
    assert restart == "on-failure"


def test_several_models_are_read():
    config, engine = split_options(read_config(FOLDER / "models.yaml"))
    assert [entry.names[0] for entry in config.models if entry.preload] == ["whisper"]
    for entry in config.models:
        own = {name: value for name, value in entry.options.items() if name not in PARSERS_OF_MODEL}
        assert make_config(entry.path, with_defaults(own, engine)).max_num_seqs == 16


@pytest.mark.parametrize("name", ["serve.yaml", "rayservice.yaml"])
def test_files_for_ray_are_read(name, monkeypatch):
    bound = []
    monkeypatch.setattr(app, "_check_packages", lambda: None)
    monkeypatch.setattr(app, "_bind", lambda *arguments: bound.append(arguments))
    file = yaml.safe_load((FOLDER / "ray" / name).read_text())
    file = yaml.safe_load(file["spec"]["serveConfigV2"]) if "spec" in file else file
    (application,) = file["applications"]
    module, _, function = application["import_path"].partition(":")
    getattr(import_module(module), function)(application["args"])
    ((deployments, options, configs, _, _),) = bound
    assert deployments[0].replicas == (1, 8)
    assert all(config.drain_seconds == 120 for config in configs)
    for deployment, own in zip(deployments, options, strict=True):
        assert make_config(deployment.entry.path, split_options(own)[1]).max_num_seqs == 64


def test_the_metrics_of_the_dashboard_exist(http):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    known = {re.split(r"[{ ]", line)[0] for line in http.get("/metrics").text.splitlines() if not line.startswith("#")}
    panels = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    names = {name for one in expressions for name in re.findall(r"sensorium_\w+", one)}
    assert len(names) > 10
    assert names <= known
