"""/v1/media/encode: encoder rows over HTTP, with which a decoder elsewhere gives the same answer."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import pytest
import torch
from http_server import CASES, MEDIA, TINY, error, image_url, listening, make_server
from sensorium import LLM, SamplingParams, encoded_item_from_json
from sensorium.callers.errors import InputError
from sensorium.mm.encoded_json import item_head, row_bytes
from sensorium.mm.rules import Rule
from sensorium.mm.types import EncodedItem, FramePlan, ItemGeometry
from sensorium.server.config import ServerConfig
from sensorium.server.endpoints import encode
from sensorium.server.state import Server
from waiting import LONG

httpx = pytest.importorskip("httpx")
ADMIN = {"Authorization": "Bearer admin"}
PATH = "/v1/media/encode"
FIRST, SECOND = sorted(CASES)[:2]


@pytest.fixture(scope="module")
def encoder():
    config = ServerConfig(admin_key="admin", api_key="user")
    server = make_server(TINY, "tiny-vl", config, parts="encoder", warm_up=False)
    with listening(server) as url, httpx.Client(base_url=url, timeout=LONG, headers=ADMIN) as http:
        yield http, server
    server.engine.close()


def test_a_decoder_answers_from_the_rows_as_the_whole_model_does(encoder, tiny):
    prompt = "<|vision_start|><|image_pad|><|vision_end|>" * 2 + "Read."
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    files = [MEDIA / FIRST, MEDIA / SECOND]
    (want,) = tiny[1].llm.llm.generate({"prompt": prompt, "multi_modal_data": {"image": files}}, params, use_tqdm=False)
    body = encoder[0].post(PATH, json={"input": {"image": [image_url(FIRST), image_url(SECOND)]}}).json()
    assert (body["object"], body["model"]) == ("media.encoding", "tiny-vl")
    items = [encoded_item_from_json(entry) for entry in body["items"]]
    assert [(entry["modality"], entry["index"]) for entry in body["items"]] == [("image", 0), ("image", 1)]
    for entry, item, plan in zip(body["items"], items, want.items, strict=True):
        assert entry["shape"] == [plan.num_embeds, encoder[1].engine.info.hidden_size] == [*item.rows.shape]
        assert tuple(entry["size"]) == plan.size
        assert entry["dtype"] == encoder[1].engine.info.dtype == str(item.rows.dtype).removeprefix("torch.")
    with LLM(TINY, max_model_len=1024, parts="decoder", warm_up=False) as decoder:
        (got,) = decoder.generate({"prompt": prompt, "multi_modal_data": {"image": items}}, params, use_tqdm=False)
    assert got.outputs == want.outputs


def test_inputs_are_those_of_embeddings(encoder, monkeypatch):
    monkeypatch.setattr(encode, "_PART", 3 * 8)
    part = {"type": "image_url", "image_url": {"url": image_url()}}
    bodies = {"image": image_url()}, {"image": {"url": image_url()}}, {"content": [part]}
    (first, *others) = [encoder[0].post(PATH, json={"input": body}).json()["items"] for body in bodies]
    assert others == [first, first]
    salted = encoder[0].post(PATH, json={"input": bodies[0], "cache_salt": "a"}).json()["items"]
    assert salted[0]["hash"] != first[0]["hash"]
    assert salted[0]["rows"] == first[0]["rows"]
    small = encoder[0].post(PATH, json={"input": bodies[0], "mm_processor_kwargs": {"max_pixels": 1024}}).json()["items"]
    assert small[0]["shape"][0] < first[0]["shape"][0]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "invalid_input"),
        ({"input": "a"}, "input", "invalid_value"),
        ({"input": [1, 2]}, "input", "invalid_value"),
        ({"input": {"text": "a", "image": image_url()}}, "input", "invalid_value"),
        ({"input": {"image": []}}, "input", "invalid_value"),
        ({"input": {"image": 3}}, "input", "invalid_input"),
        ({"input": {"image": "/etc/passwd"}}, None, "invalid_media"),
        ({"input": {"image": "http://127.0.0.1/a.png"}}, None, "invalid_media"),
        ({"input": {"image": "data:image/png;base64,AAAA"}}, None, "invalid_media"),
        ({"input": {"image": image_url()}, "colour": 1}, "colour", "unknown_name"),
        ({"input": {"image": image_url()}, "mm_processor_kwargs": {"colour": 1}}, "colour", "invalid_config"),
    ],
)
def test_what_cannot_be_encoded_is_refused(encoder, body, param, code):
    refused = error(encoder[0].post(PATH, json=body))
    assert (refused["param"], refused["code"]) == (param, code)


def test_rows_of_one_response_are_bounded(encoder, monkeypatch):
    monkeypatch.setattr(encode, "MAX_BYTES", 100)
    assert error(encoder[0].post(PATH, json={"input": {"image": image_url()}}))["code"] == "over_limit"


def test_a_server_of_the_whole_model_returns_no_rows(tiny):
    with listening(Server(tiny[1].llm, ServerConfig(admin_key="admin"), "tiny-vl")) as url:
        response = httpx.post(url + PATH, json={"input": {"image": image_url()}}, headers=ADMIN, timeout=LONG)
    assert error(response)["code"] == "unsupported"


def test_encoding_counts_as_a_request_in_progress(encoder, monkeypatch):
    server = Server(encoder[1].llm, ServerConfig(admin_key="admin", max_requests=1), "tiny-vl")
    monkeypatch.setattr(type(server.engine), "media_full", True)
    with listening(server) as url:
        response = httpx.post(url + PATH, json={"input": {"image": image_url()}}, headers=ADMIN, timeout=LONG)
        assert error(response, 429)["code"] == "overloaded"
        assert httpx.post(f"{url}/reset_mm_cache", headers=ADMIN, timeout=LONG).status_code == 200


def as_json(item):
    return json.loads(json.dumps({**item_head(item), "rows": base64.b64encode(row_bytes(item).numpy()).decode()}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_json_holds_every_field(dtype):
    geometries = (
        ItemGeometry(2, 3, 4, times=(0.1, 0.2), tiles=(1, 2)),
        ItemGeometry(1, 1, 1, positions=Rule("a:b", (1, (2, "c")))),
    )
    frames = FramePlan((0, 3), (0.0, 0.1), 9, 2.5, ((1, 2),), (4,))
    item = EncodedItem("video", torch.rand(25, 3).to(dtype).T.contiguous().T, geometries, "ab", (6, 8), frames)
    found = encoded_item_from_json(as_json(item))
    assert torch.equal(found.rows, item.rows)
    assert found.rows.dtype == dtype
    assert replace(found, rows=0).__dict__ == replace(item, rows=0).__dict__


WRONG = {
    "rows": ("AA=A", "AAAA", 3),
    "dtype": ("int8", []),
    "shape": ([12], [-3, -4], None),
    "geometries": ([{}], 3, [{"t": 1, "other": 2}]),
    "frames": ({},),
    "size": (3,),
}


@pytest.mark.parametrize("change", [{name: value} for name, values in WRONG.items() for value in values])
def test_what_is_no_item_is_refused(change):
    item = EncodedItem("image", torch.ones(3, 4), (ItemGeometry(1, 1, 3),))
    with pytest.raises(InputError) as caught:
        encoded_item_from_json({**as_json(item), **change})
    assert caught.value.info.code == "invalid_value"
    for value in None, [], {}, "a":
        with pytest.raises(InputError):
            encoded_item_from_json(value)
