"""Adapters as model names over HTTP: answers are those of the engine with `adapter=`."""

from __future__ import annotations

import argparse
import io
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from http_server import TINY, error, listening, make_server, openai_client, serving_models
from lora import write
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sensorium.callers.errors import CheckpointError, ConfigError, InputError
from sensorium.cli import serve
from sensorium.cli.wording import message_of
from sensorium.engine.sampling_params import SamplingParams
from sensorium.pipelines import ocr
from sensorium.pipelines.documents.options import ReadOptions
from sensorium.pipelines.documents.readers import ModelReader
from sensorium.server.adapter_entries import read_adapters
from sensorium.server.config import ServerConfig, split_options
from sensorium.server.run import load_one_model

OPTIONS = {"max_num_seqs": 4, "max_model_len": 256, "warm_up": False}
ADMIN = {"Authorization": "Bearer admin"}
MESSAGES = [{"role": "user", "content": "g h"}]
ANSWER = {"max_tokens": 6, "temperature": 0.0}


def make_adapter(folder: Path, seed: int, scale: float = 1.0) -> Path:
    """Write an adapter of all q_proj and down_proj of the shipped model."""
    gen = torch.Generator().manual_seed(seed)
    with safe_open(TINY / "model.safetensors", "pt") as tensors:
        adapted = [name for name in [*tensors.keys()] if name.endswith(("q_proj.weight", "down_proj.weight"))]
        names = [name for name in adapted if name.startswith("model.layers")]
        shapes = {name.removesuffix(".weight"): tensors.get_slice(name).get_shape() for name in names}
    assert shapes
    pairs = {
        name: (torch.randn(4, inputs, generator=gen) * scale, torch.randn(outputs, 4, generator=gen) * scale)
        for name, (outputs, inputs) in shapes.items()
    }
    return write(folder, str(TINY), pairs)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {name: str(make_adapter(root / name, seed)) for seed, name in enumerate(("red", "blue"))}


@pytest.fixture(scope="module")
def served(folders):
    """A server with the adapter red: (URL, Server)."""
    server = make_server(
        TINY, "tiny-vl", ServerConfig(adapters={"red": folders["red"]}, admin_key="admin"), enable_lora=True, **OPTIONS
    )
    with server.llm.llm:
        server.load_adapters(server.services.pool.models[0].adapters)
        with listening(server) as url:
            yield url, server


@pytest.fixture(scope="module")
def expected(served, folders):
    """Answers of the engine itself, by adapter."""
    llm, params = served[1].llm.llm, SamplingParams(temperature=0.0, max_tokens=6)
    llm.load_adapter("only for the engine".replace(" ", "-"), folders["blue"])
    chosen = {None: None, "red": "red", "blue": "only-for-the-engine"}
    answers = {
        name: llm.chat(MESSAGES, params, use_tqdm=False, adapter=adapter)[0].outputs[0].text for name, adapter in chosen.items()
    }
    llm.unload_adapter("only-for-the-engine")
    assert len({*answers.values()}) == 3
    return answers


def text_of(url, model):
    body = {"model": model, "messages": MESSAGES, **ANSWER}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    return response.json()["choices"][0]["message"]["content"]


def test_every_endpoint_of_answers_takes_the_name_of_an_adapter(served, expected):
    url, server = served
    assert text_of(url, "tiny-vl") == expected[None]
    assert text_of(url, "red") == expected["red"]
    client = openai_client(url)
    stream = client.chat.completions.create(model="red", messages=MESSAGES, stream=True, **ANSWER)
    chunks = [chunk for chunk in stream if chunk.choices]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected["red"]
    assert {chunk.model for chunk in chunks} == {"red"}
    response = client.responses.create(
        model="red", input="g h", temperature=0.0, max_output_tokens=16, extra_body={"ignore_eos": False}
    )
    assert response.model == "red"
    assert response.output_text.startswith(expected["red"])
    body = {"model": "red", "messages": MESSAGES, **ANSWER}
    message = httpx.post(f"{url}/v1/messages", json=body, timeout=60).json()
    assert (message["model"], message["content"][0]["text"]) == ("red", expected["red"])
    params = SamplingParams(temperature=0.0, max_tokens=6)
    (plain,) = server.llm.llm.generate("g h", params, use_tqdm=False, adapter="red")
    completion = client.completions.create(model="red", prompt="g h", **ANSWER)
    assert (completion.model, completion.choices[0].text) == ("red", plain.outputs[0].text)
    ollama = {"model": "red", "messages": MESSAGES, "stream": False, "options": {"temperature": 0, "num_predict": 6}}
    assert httpx.post(f"{url}/api/chat", json=ollama, timeout=60).json()["message"]["content"] == expected["red"]


def test_endpoints_of_vectors_take_the_name_of_an_adapter(served):
    url, server = served
    for model, adapter in (("red", "red"), ("tiny-vl", None)):
        response = httpx.post(f"{url}/v1/embeddings", json={"model": model, "input": "a b"}, timeout=60).json()
        (expected,) = server.llm.llm.embed("a b", use_tqdm=False, adapter=adapter)
        assert response["model"] == model
        assert response["data"][0]["embedding"] == expected.vector.tolist()
        body = {"model": model, "text_1": "a", "text_2": ["b", "c"]}
        response = httpx.post(f"{url}/score", json=body, timeout=60).json()
        scores = server.llm.llm.score("a", ["b", "c"], use_tqdm=False, adapter=adapter)
        assert response["model"] == model
        assert [entry["score"] for entry in response["data"]] == [one.score for one in scores]
    changed = [server.llm.llm.score("a", "b", use_tqdm=False, adapter=one)[0].score for one in ("red", None)]
    assert changed[0] != changed[1]


def png():
    """Return a picture of noise."""
    with io.BytesIO() as file:
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(file, "PNG")
        return file.getvalue()


def test_documents_are_read_with_an_adapter(served):
    url, server = served
    picture, pages = png(), {}
    for model, adapter in (("red", "red"), ("tiny-vl", None)):
        data, files = {"model": model, "max_tokens": "6"}, {"file": ("a.png", picture, "image/png")}
        read = httpx.post(f"{url}/v1/documents", data=data, files=files, timeout=60).json()
        assert read["model"] == model
        (document,) = server.llm.llm.read([picture], max_tokens=6, use_tqdm=False, adapter=adapter)
        pages[model] = [(block["text"], page["way"]) for page in read["pages"] for block in page["blocks"]]
        assert pages[model] == [(block.text, page.way) for page in document.pages for block in page.blocks]
        assert read["failed_pages"] == [page.number for page in document.failed]
    assert pages["red"] != pages["tiny-vl"]
    options = ReadOptions(question="Read.", max_tokens=6)
    digests = {ModelReader(server.engine, options, adapter=adapter).digest for adapter in (None, "red")}
    assert len(digests) == 2


def test_a_document_is_read_with_the_content_that_a_name_had_at_the_beginning(served, folders, monkeypatch):
    llm, real = served[1].llm.llm, ocr.ocr_tasks

    def loading_again(*arguments):
        llm.load_adapter("page", folders["blue"])
        return real(*arguments)

    def read(adapter):
        (document,) = llm.read([picture], max_tokens=6, use_tqdm=False, adapter=adapter)
        assert not document.failed
        return [block.text for page in document.pages for block in page.blocks]

    picture = png()
    llm.load_adapter("page", folders["red"])
    try:
        before = read("page")
        monkeypatch.setattr(ocr, "ocr_tasks", loading_again)
        assert read("page") == before
        assert read("page") != before
    finally:
        llm.unload_adapter("page")


def test_names_that_resolvers_find(folders, expected, tmp_path):
    """A name that none of them finds is an unknown model."""
    shutil.copytree(folders["blue"], tmp_path / "found")
    server = make_server(TINY, "tiny-vl", enable_lora=True, lora_resolvers=[str(tmp_path)], **OPTIONS)
    with server.llm.llm, listening(server) as url:
        body = {"messages": MESSAGES, **ANSWER}
        answer = httpx.post(f"{url}/v1/chat/completions", json={**body, "model": "found"}, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == expected["blue"]
        for stream in (False, True):
            response = httpx.post(f"{url}/v1/chat/completions", json={**body, "model": "lost", "stream": stream}, timeout=60)
            found = error(response, 404)
            assert (found["code"], found["param"]) == ("model_not_found", "model")


def test_weights_are_replaced_by_an_administrator(served, expected, tmp_path):
    url, server = served
    stored = load_file(TINY / "model.safetensors")
    name = next(name for name in stored if name.endswith("layers.0.self_attn.q_proj.weight"))
    save_file({name: stored[name] * -1}, tmp_path / "new.safetensors")
    save_file({name: stored[name]}, tmp_path / "old.safetensors")

    def post(file, headers=ADMIN, mode="wait"):
        body = {"path": str(tmp_path / file), "mode": mode}
        return httpx.post(f"{url}/update_weights", json=body, headers=headers, timeout=60)

    def vector():
        return httpx.post(f"{url}/v1/embeddings", json={"input": "a b"}, timeout=60).json()["data"][0]["embedding"]

    before = vector()
    assert post("new.safetensors", {}).status_code == 401
    version = server.engine.weights_version
    assert post("new.safetensors").json() == {"weights_version": version + 1}
    assert vector() != before
    assert error(post("absent.safetensors"))["param"] == "path"
    assert post("old.safetensors").json() == {"weights_version": version + 2}
    assert vector() == before
    assert text_of(url, "red") == expected["red"]
    assert post("new.safetensors", mode="later").status_code == 400
    body = {"messages": MESSAGES, "max_tokens": 150, "temperature": 0.0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        assert post("new.safetensors", mode="pause").json() == {"weights_version": version + 3}
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert post("old.safetensors", mode="restart").json() == {"weights_version": version + 4}


def test_the_list_of_models_has_the_adapters(served):
    cards = {card["id"]: card for card in httpx.get(f"{served[0]}/v1/models").json()["data"]}
    assert cards["red"]["parent"] == "tiny-vl"
    assert "parent" not in cards["tiny-vl"]
    assert httpx.get(f"{served[0]}/v1/models/red").json()["id"] == "red"


def test_adapters_are_loaded_replaced_and_unloaded(served, folders, expected):
    url = served[0]

    def post(action, **body):
        return httpx.post(f"{url}/v1/{action}_lora_adapter", json=body, headers=ADMIN, timeout=60)

    assert post("load", lora_name="x", lora_path=folders["red"]).status_code == 200
    assert text_of(url, "x") == expected["red"]
    assert error(post("load", lora_name="x", lora_path=folders["blue"]))["param"] == "lora_name"
    assert post("load", lora_name="x", lora_path=folders["blue"], load_inplace=True).status_code == 200
    assert text_of(url, "x") == expected["blue"]
    assert post("unload", lora_name="x").status_code == 200
    assert error(post("unload", lora_name="x"), 404)["param"] == "lora_name"
    asked = httpx.post(f"{url}/v1/chat/completions", json={"model": "x", "messages": MESSAGES})
    assert error(asked, 404)["code"] == "model_not_found"


@pytest.mark.parametrize("name", ["tiny-vl", "../red", ""])
def test_names_that_no_adapter_may_have(served, folders, name):
    response = httpx.post(
        f"{served[0]}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": folders["red"]}, headers=ADMIN
    )
    assert response.status_code == 400
    assert "red" in {card["id"] for card in httpx.get(f"{served[0]}/v1/models").json()["data"]}


def test_a_folder_without_an_adapter_is_refused_and_its_name_stays_unknown(served, tmp_path):
    body = {"lora_name": "empty", "lora_path": str(tmp_path)}
    assert httpx.post(f"{served[0]}/v1/load_lora_adapter", json=body, headers=ADMIN).status_code == 400
    assert "empty" not in {card["id"] for card in httpx.get(f"{served[0]}/v1/models").json()["data"]}


def test_only_an_administrator_loads_adapters(served, folders):
    body = {"lora_name": "y", "lora_path": folders["red"]}
    assert httpx.post(f"{served[0]}/v1/load_lora_adapter", json=body).status_code == 401


def test_adapters_of_several_models(folders, expected):
    """An adapter's name loads its model; one that was added comes back when its model is loaded again."""
    models = [{"name": "one", "path": str(TINY), "adapters": folders}, {"name": "two", "path": str(TINY)}]
    config = ServerConfig(models=models, admin_key="admin")
    with serving_models(config) as (url, services):
        assert text_of(url, "blue") == expected["blue"]
        body = {"lora_name": "late", "lora_path": folders["red"], "model": "one"}
        assert httpx.post(f"{url}/v1/load_lora_adapter", json=body, headers=ADMIN, timeout=60).status_code == 200
        one = services.pool.find("late")
        one.model.engine.close()
        one.model, one.state = None, "not_loaded"
        assert text_of(url, "late") == expected["red"]
        body = {"lora_name": "late", "lora_path": folders["red"], "model": "two", "load_inplace": True}
        assert error(httpx.post(f"{url}/v1/load_lora_adapter", json=body, headers=ADMIN))["param"] == "lora_name"
        body = {"lora_name": "no", "lora_path": folders["red"], "model": "two"}
        assert httpx.post(f"{url}/v1/load_lora_adapter", json=body, headers=ADMIN, timeout=60).status_code == 400


def test_an_added_adapter_that_is_gone_does_not_stop_its_model(folders, expected, tmp_path):
    gone = shutil.copytree(folders["red"], tmp_path / "gone")
    config = ServerConfig(models=[{"name": "one", "path": str(TINY), "adapters": {"blue": folders["blue"]}}], admin_key="admin")
    with serving_models(config) as (url, services):
        for name, folder in ("gone", gone), ("kept", folders["red"]):
            body = {"lora_name": name, "lora_path": str(folder), "is_pinned": True}
            assert httpx.post(f"{url}/v1/load_lora_adapter", json=body, headers=ADMIN, timeout=60).status_code == 200
        shutil.rmtree(gone)
        one = services.pool.find("one")
        one.model.engine.close()
        one.model, one.state = None, "not_loaded"
        assert [text_of(url, name) for name in ("one", "blue", "kept")] == [expected[name] for name in (None, "blue", "red")]
        assert error(httpx.post(f"{url}/v1/chat/completions", json={"model": "gone", "messages": MESSAGES}), 404)
        assert {one.name: one.pinned for one in one.model.engine.adapters.list()} == {"blue": False, "kept": True}


def test_of_two_loads_at_once_one_gets_the_name(served, folders):
    def load(color):
        body = {"lora_name": "both", "lora_path": folders[color]}
        return httpx.post(f"{served[0]}/v1/load_lora_adapter", json=body, headers=ADMIN, timeout=60).status_code

    with ThreadPoolExecutor(4) as threads:
        assert sorted(threads.map(load, ["red", "blue", "red", "blue"])) == [200, 400, 400, 400]
    httpx.post(f"{served[0]}/v1/unload_lora_adapter", json={"lora_name": "both"}, headers=ADMIN, timeout=60)


def test_an_adapter_with_the_name_of_the_model_is_refused(folders):
    config, options = split_options(
        {"adapters": {"a": folders["red"]}, "served_model_name": "a", **OPTIONS, "engine_process": False}
    )
    with pytest.raises(ConfigError) as raised:
        load_one_model(TINY, config, options, None)
    assert raised.value.info.param == "adapters"


def test_a_server_starts_with_its_adapters(folders, expected):
    config, options = split_options({"adapters": [f"red={folders['red']}"], **OPTIONS, "engine_process": False})
    assert options["enable_lora"] is True
    services = load_one_model(TINY, config, options, None)
    with services.pool.models[0].model.llm.llm, listening(services) as url:
        assert text_of(url, "red") == expected["red"]


def test_a_server_does_not_start_with_an_adapter_that_does_not_fit(folders, tmp_path):
    folder = make_adapter(tmp_path / "wide", 3)
    config_file = folder / "adapter_config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"use_dora": True}))
    config, options = split_options({"adapters": {"wide": str(folder)}, **OPTIONS, "engine_process": False})
    with pytest.raises((ConfigError, CheckpointError, InputError)):
        load_one_model(TINY, config, options, None)


@pytest.mark.parametrize(
    "value",
    ["a", ["a=b", "a=c"], {"a": ""}, {"a": 1}, {"../a": "b"}, [{"name": "a"}], 3, [["a", "b"]]],
    ids=["no-folder", "twice", "empty", "number", "name", "no-path", "integer", "pair"],
)
def test_wrong_values_of_the_option(value):
    with pytest.raises(ConfigError) as raised:
        read_adapters(value)
    assert raised.value.info.param == "adapters"


def test_the_spellings_of_the_option():
    for value in {"a": "b"}, "a=b", ["a=b"], [{"name": "a", "path": "b"}]:
        assert read_adapters(value) == {"a": "b"}
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(["model", "--lora-modules", "a=b", "c=d", "--adapters", '{"name": "e", "path": "f"}'])
    assert ServerConfig(adapters=args.adapters).adapters == {"a": "b", "c": "d", "e": "f"}


@pytest.mark.parametrize("flag", ["--adapters", "--lora-modules"])
def test_errors_name_the_flag_that_was_given(flag):
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(["model", flag, "no folder"])
    with pytest.raises(ConfigError) as raised:
        ServerConfig(adapters=args.adapters)
    assert message_of(raised.value.info, args).startswith(f"{flag} 'no folder'")


def test_names_of_models_and_adapters_are_different():
    models = [{"name": "one", "path": "a", "adapters": {"two": "x"}}, {"name": "two", "path": "b"}]
    with pytest.raises(ConfigError):
        ServerConfig(models=models)
    with pytest.raises(ConfigError):
        ServerConfig(adapters={"two": "x"}, models=[{"name": "one", "path": "a"}])
