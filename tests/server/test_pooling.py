"""Embeddings, scores, ranks, classes, tokens and plans over HTTP: the same as in Python."""

from __future__ import annotations

import asyncio
import base64
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event, current_thread
from types import SimpleNamespace

import family
import httpx
import numpy as np
import openai
import pytest
from http_server import MEDIA, error, image_url, listening, make_server, serving
from parity import ROWS
from PIL import Image
from sensorium.callers.errors import InputError
from sensorium.engine.worker.sampler import NOT_FINITE
from sensorium.mm.media import pdf
from sensorium.mm.media.isolate import watching
from sensorium.mm.media.policy import MediaUrl
from sensorium.server.config import ServerConfig
from sensorium.server.endpoints import pooling as endpoint
from sensorium.server.protocol.pooling import EmbeddingBody
from waiting import LONG, assert_idle, wait_until

PNG = MEDIA / "line1.png"
URL = image_url(PNG.name)


def post(http, path, **body):
    return http.post(path, json=body)


def test_embeddings(http, client, tiny):
    parts = [{"type": "image_url", "image_url": {"url": URL}}]
    inputs = ["a house", {"text": "b", "image": URL}, [5, 6, 7], {"content": parts}]
    python = ["a house", {"text": "b", "image": MediaUrl(URL)}, {"prompt_token_ids": [5, 6, 7]}, PNG]
    expected = asyncio.run(tiny[1].llm.embed(python))
    found = post(http, "/v1/embeddings", input=inputs, model="tiny-vl").json()
    vectors = [np.array(one["embedding"], np.float32) for one in found["data"]]
    assert [one["index"] for one in found["data"]] == [0, 1, 2, 3]
    np.testing.assert_allclose(vectors, [one.vector.numpy() for one in expected], atol=1e-6)
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 0
    coded = client.embeddings.create(model="tiny-vl", input=["a house", "b"])  # the package asks for base64
    np.testing.assert_allclose(coded.data[0].embedding, vectors[0], atol=1e-6)
    small = client.embeddings.create(model="tiny-vl", input="a house", dimensions=8, encoding_format="float")
    assert len(small.data[0].embedding) == 8
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="tiny-vl", input="a", dimensions=0)


def test_prompts_are_cut(http):
    """All tokens are counted, and a result says that it was cut."""
    ids = list(range(5, 25))
    for body, kept in (
        ({"truncate_prompt_tokens": 4}, ids[:4]),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, ids[-4:]),
    ):
        found = post(http, "/v1/embeddings", input=[ids], **body).json()
        expected = post(http, "/v1/embeddings", input=[kept]).json()["data"][0]
        assert found["usage"]["prompt_tokens"] == 4
        assert found["data"] == [expected | {"truncated": True}]
    assert "truncated" not in post(http, "/v1/embeddings", input=[ids], truncate_prompt_tokens=-1).json()["data"][0]
    for wrong in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": 10**6}, {"truncation_side": "up"}):
        assert error(post(http, "/v1/embeddings", input=[ids], **wrong))["param"] == next(iter(wrong))
    for path, body in (("/v1/rerank", {"query": "a b c", "documents": ["d e f g " * 9]}),
                       ("/v1/score", {"text_1": "a b c", "text_2": "d e f g " * 9})):  # fmt: skip
        found = post(http, path, **body, truncate_prompt_tokens=16).json()
        assert found["usage"]["prompt_tokens"] == 16
        assert (found.get("results") or found["data"])[0]["truncated"] is True


def test_vectors_of_tokens_are_those_of_late_interaction(http, tiny, monkeypatch):
    """They are refused for other models, and limited by the numbers of a response."""
    core, body = tiny[1].engine.loop.core, {"input": [[5, 6, 7]], "pooling": "tokens"}
    refused = error(post(http, "/v1/embeddings", **body))
    assert refused["param"] == "pooling"
    assert refused["message"].startswith('pooling="tokens" is for late-interaction models')
    last = post(http, "/v1/embeddings", input=[[5, 6, 7]]).json()["data"][0]["embedding"]
    monkeypatch.setattr(core, "info", replace(core.info, pooling="tokens"))
    tokens = post(http, "/v1/embeddings", **body).json()["data"][0]["embedding"]
    np.testing.assert_allclose(tokens[-1], last, atol=1e-6)
    (coded,) = post(http, "/v1/embeddings", **body, encoding_format="base64").json()["data"]
    assert coded["shape"] == [3, len(last)]
    found = np.frombuffer(base64.b64decode(coded["embedding"]), "<f4").reshape(coded["shape"])
    np.testing.assert_allclose(found, tokens, atol=1e-6)


def test_a_response_has_a_limit_of_numbers(http, tiny, monkeypatch):
    core, size = tiny[1].engine.loop.core, tiny[1].engine.info.hidden_size
    monkeypatch.setattr(endpoint, "MAX_NUMBERS", 3 * size)
    threads = []
    monkeypatch.setattr(
        endpoint, "_serialise", lambda *args, real=endpoint._serialise: threads.append(current_thread()) or real(*args)
    )
    assert post(http, "/v1/embeddings", input=["a"] * 3).status_code == 200
    assert threads[0].name.startswith("asyncio_")
    computed = []
    monkeypatch.setattr(
        tiny[1].llm, "embed", lambda *args, real=tiny[1].llm.embed, **kw: computed.append(1) or real(*args, **kw)
    )
    many = error(post(http, "/v1/embeddings", input=["a"] * 4))
    assert many["message"].startswith(
        f"the vectors have {4 * size:,} numbers, above the limit of {3 * size:,} for one response"
    )
    assert post(http, "/v1/embeddings", input=["a"] * 4, dimensions=size // 2).status_code == 200
    assert len(computed) == 1
    with monkeypatch.context() as shortened:
        shortened.setattr(tiny[1].engine, "sentence_transformers", SimpleNamespace(truncate_dim=size // 2))
        full = error(post(http, "/v1/embeddings", input=["a"] * 4, dimensions=size))
        assert full["message"].startswith(f"the vectors have {4 * size:,} numbers")
        shortened.setattr(tiny[1].engine, "embedding_size", lambda pooling=None: size)
        endpoint._check_size(tiny[1], EmbeddingBody(input="a"), ["a"] * 6)
        with pytest.raises(InputError, match="above the limit"):
            endpoint._check_size(tiny[1], EmbeddingBody(input="a"), ["a"] * 7)
    monkeypatch.setattr(core, "info", replace(core.info, pooling="tokens"))
    assert "above the limit" in error(post(http, "/v1/embeddings", input=[[5, 6], [7, 8]]))["message"]
    assert len(computed) == 1  # the lengths were known before
    assert "above the limit" in error(post(http, "/v1/embeddings", input="a long text of many tokens"))["message"]
    assert len(computed) == 2


def test_scores(http, tiny):
    documents = ["a house", {"image": URL}, "b"]
    expected = asyncio.run(tiny[1].llm.score("what", ["a house", PNG, "b"]))
    found = post(http, "/score", queries="what", documents=documents).json()
    assert [one["score"] for one in found["data"]] == pytest.approx([one.score for one in expected], abs=1e-6)
    older = post(http, "/v1/score", text_1=["what", "what"], text_2=["a house", "b"]).json()["data"]
    assert [one["score"] for one in older] == pytest.approx([expected[0].score, expected[2].score], abs=1e-6)
    ranked = post(http, "/v1/rerank", query="what", documents=documents).json()["results"]
    assert [one["index"] for one in ranked] == sorted(range(3), key=lambda index: -expected[index].score)
    assert sorted(json.dumps(one["document"]) for one in ranked) == sorted(
        json.dumps({"text": one} if isinstance(one, str) else one) for one in documents
    )
    assert ranked[:1] == post(http, "/rerank", query="what", documents=documents, top_n=1).json()["results"]
    assert "document" not in post(http, "/rerank", query="a", documents=["b"], return_documents=False).json()["results"][0]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [3.5]}, "input[0]"),
        ("/v1/embeddings", {"input": {"pixels": 1}}, "input"),
        ("/v1/embeddings", {"input": {"image": "/etc/passwd"}}, "input[0]"),
        ("/v1/embeddings", {"input": ["a", {"image": "file:///etc/passwd"}]}, "input[1]"),
        ("/v1/embeddings", {"input": {"image": ["http://127.0.0.1/a.png"]}}, "input[0]"),
        ("/v1/embeddings", {"input": {"image": 3}}, "input"),
        ("/v1/embeddings", {"input": {"content": [{"type": "text"}]}}, "input"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/v1/embeddings", {"input": ["hello " * 4000]}, "input[0]"),
        ("/v1/embeddings", {"input": ["a"] * 3000}, "input"),
        ("/score", {"queries": "a"}, "documents"),
        ("/score", {"queries": "a", "text_1": "a", "documents": "a"}, "queries"),
        ("/score", {"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "query"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": {"image": "/etc/passwd"}, "documents": ["b"]}, "documents[0]"),
        ("/rerank", {"query": "a", "documents": [{"image": {"url": URL, "note": "NAN"}}]}, "documents[0]"),
        ("/rerank", {"query": "a", "documents": [{"content": [{"type": "text", "text": "a", "note": "NAN"}]}]}, "documents[0]"),
        ("/classify", {"input": "a"}, None),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a" * (2 << 20)}, "prompt"),
        ("/tokenize", {"messages": [3]}, "messages[0]"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/v1/media/plan", {"messages": []}, "messages"),
        (
            "/v1/media/plan",
            {"messages": [{"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_wrong_fields(http, tiny, path, body, param):
    content = json.dumps(body).replace('"NAN"', "NaN")  # a response that repeated it would not be JSON
    found = error(http.post(path, content=content, headers={"Content-Type": "application/json"}))
    assert param is None or found["param"] == param, found
    assert "/etc/passwd" not in found["message"] or "No such" not in found["message"]
    assert_idle(tiny[1].llm)


def test_a_vector_that_is_not_finite_is_a_typed_error(http, tiny, monkeypatch):
    embed = tiny[1].llm.embed

    async def overflow(inputs, **options):
        good, bad = await embed(inputs, **options)
        return [good, replace(bad, vector=None, error=NOT_FINITE)]

    monkeypatch.setattr(tiny[1].llm, "embed", overflow)
    response = http.post("/v1/embeddings", json={"input": ["a", "b"]})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (500, "not_finite", "input[1]")
    assert error["message"].startswith("input[1]: the model's")


def test_tokens(http, tiny):
    tokenizer = tiny[1].engine.tokenizer
    found = post(http, "/tokenize", prompt="a house", return_token_strs=True).json()
    assert found["tokens"] == tokenizer.encode("a house")
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 1024)
    assert "".join(found["token_strs"]) == "a house"
    assert post(http, "/detokenize", tokens=found["tokens"]).json() == {"prompt": "a house"}
    messages = [{"role": "user", "content": "hello"}]
    usage = post(http, "/v1/chat/completions", messages=messages, max_tokens=1).json()["usage"]
    assert post(http, "/tokenize", messages=messages).json()["count"] == usage["prompt_tokens"]


def parts(*names):
    """Return a user's message with the shipped media of these names."""
    kinds = {".png": ("image_url", "image/png"), ".flac": ("audio_url", "audio/flac"), ".mp4": ("video_url", "video/mp4")}
    content = [{"type": "text", "text": "what?"}]
    for name in names:
        kind, media_type = kinds[Path(name).suffix]
        url = f"data:{media_type};base64,{base64.b64encode((MEDIA / name).read_bytes()).decode()}"
        content.append({"type": kind, kind: {"url": url}})
    return [{"role": "user", "content": content}]


def test_tokens_of_media(http, tiny):
    """The tokens are those of the prompt of the same chat, also if that is too long for the model."""
    longest = tiny[1].engine.max_model_len
    for names in (("line1.png",), ("line1.png", "line2.png")):
        sent = {"messages": parts(*names), "mm_processor_kwargs": {"max_pixels": 64 * 28 * 28}}
        chat = post(http, "/v1/chat/completions", **sent, max_tokens=1, return_token_ids=True).json()
        found = post(http, "/tokenize", **sent, return_token_strs=True).json()
        assert found["tokens"] == chat["prompt_token_ids"]
        assert found["count"] == chat["usage"]["prompt_tokens"]
        assert "".join(found["token_strs"]).count("<|image_pad|>") == chat["usage"]["prompt_tokens_details"]["image_tokens"] > 2
    one, two = (post(http, "/tokenize", messages=parts(*["line1.png"] * count)).json()["count"] for count in (1, 2))
    many = longest // (two - one) + 1
    assert post(http, "/tokenize", messages=parts(*["line1.png"] * many)).json()["count"] == one + (many - 1) * (two - one)
    assert error(post(http, "/v1/chat/completions", messages=parts(*["line1.png"] * many)))["code"] == "too_long"
    assert post(http, "/tokenize", messages=[{"role": "user", "content": "a " * 2 * longest}]).json()["count"] > longest


@pytest.mark.parametrize(
    ("name", "media"), [("qwen2_audio", "../speech/date.flac"), ("gemma3n", "line1.png"), ("qwen3_vl", "clip.mp4")]
)
def test_tokens_of_other_models(tmp_path, name, media):
    """Whose items are several tokens with text around them."""
    row = ROWS[name]
    written = "".join("{% elif part.type == '" + kind + "' %}" + text for kind, text in row.placeholders.items())
    template = (
        "{% for part in messages[0].content %}{% if part.type == 'text' %}{{ part.text }}" + written + "{% endif %}{% endfor %}"
    )
    options = {"chat_template": template, "max_model_len": 1024, "block_size": 4, **row.options}
    with serving(family.save(row, tmp_path), name, **options) as (url, _), httpx.Client(base_url=url, timeout=240) as http:
        chat = post(http, "/v1/chat/completions", messages=parts(media), max_tokens=1, return_token_ids=True).json()
        found = post(http, "/tokenize", messages=parts(media)).json()
    assert found["tokens"] == chat["prompt_token_ids"]
    assert found["count"] == chat["usage"]["prompt_tokens"] > 12


def test_plans(http):
    content = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "what?"}]
    messages = [{"role": "user", "content": content}]
    found = post(http, "/v1/media/plan", messages=messages).json()
    usage = post(http, "/v1/chat/completions", messages=messages, max_tokens=1).json()["usage"]
    assert found["num_tokens"] == usage["prompt_tokens_details"]["image_tokens"]
    assert (found["items"][0]["modality"], found["items"][0]["index"]) == ("image", 0)
    with Image.open(PNG) as image:
        assert found["items"][0]["size"] == list(image.size[::-1])


def test_pdfs_of_plans_and_tokens_are_opened_for_their_tenant(http, tiny, monkeypatch):
    opened, open_pdf = [], pdf.open_pdf
    monkeypatch.setattr(
        pdf,
        "open_pdf",
        lambda data, policy, tenant: opened.append((policy.max_bytes, tenant)) or open_pdf(data, policy, tenant),
    )
    part = {"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA"}}
    for path in ("/tokenize", "/v1/media/plan", "/v1/chat/completions"):
        assert post(http, path, messages=[{"role": "user", "content": [part]}], cache_salt="a").status_code >= 400
    assert opened == [(tiny[1].engine.config.media.max_bytes, "a")] * 3


def plan(url, key, text="fast", seconds=240):
    body = {"messages": [{"role": "user", "content": text}]}
    return httpx.post(f"{url}/v1/media/plan", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=seconds)


def test_slow_plans_of_a_key_delay_neither_other_keys_nor_tokens(tiny, monkeypatch):
    server, go_on, running = make_server(tiny[1].llm.llm, "tiny-vl", ServerConfig(api_key=["one", "two"])), Event(), []

    def slow(messages, *_, **options):
        if messages[0]["content"] == "slow":
            running.append(current_thread())
            go_on.wait(LONG)
        return []

    monkeypatch.setattr(server.engine, "plan", slow)
    with listening(server) as url, ThreadPoolExecutor(8) as clients:
        try:
            plans = [clients.submit(plan, url, "one", "slow") for _ in range(8)]
            wait_until(lambda: len(running) == 4)
            assert plan(url, "two").status_code == 200
            headers = {"Authorization": "Bearer one"}
            for path, body in (("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [5]})):
                assert httpx.post(f"{url}/{path}", json=body, headers=headers, timeout=240).status_code == 200
            assert len(running) == 4
        finally:
            go_on.set()
        assert [one.result().status_code for one in plans] == [200] * 8


@pytest.mark.parametrize("path", ["tokenize", "detokenize"])
def test_slow_tokens_of_a_key_delay_no_other_key(tiny, monkeypatch, path):
    server, go_on, running = make_server(tiny[1].llm.llm, "tiny-vl", ServerConfig(api_key=["one", "two"])), Event(), []
    tokenizer, name = server.engine.tokenizer, {"tokenize": "encode", "detokenize": "decode"}[path]
    fast = getattr(tokenizer, name)

    def slow(given, **options):
        if given in ("slow", [6]):
            running.append(None)
            go_on.wait(LONG)
        return fast(given, **options)

    def post_as(key, given):
        body = {{"tokenize": "prompt", "detokenize": "tokens"}[path]: given}
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{url}/{path}", json=body, headers=headers, timeout=LONG).status_code

    monkeypatch.setattr(tokenizer, name, slow)
    with listening(server) as url, ThreadPoolExecutor(8) as clients:
        try:
            slow_ones = [clients.submit(post_as, "one", "slow" if path == "tokenize" else [6]) for _ in range(8)]
            wait_until(lambda: len(running) == 2)
            assert post_as("two", "a" if path == "tokenize" else [5]) == 200
            assert len(running) == 2
        finally:
            go_on.set()
        assert [one.result() for one in slow_ones] == [200] * 8


def test_a_plan_keeps_its_place_after_its_client_has_left(tiny, monkeypatch):
    server, go_on, running = make_server(tiny[1].llm.llm, "tiny-vl", ServerConfig(api_key=["one", "two"])), Event(), []
    monkeypatch.setattr(server.engine, "plan", lambda *_, **options: running.append(None) or (go_on.wait(LONG) and []))
    with listening(server) as url, ThreadPoolExecutor(8) as clients:
        try:
            for _ in range(2):
                leaving = [clients.submit(plan, url, "one", seconds=1.0) for _ in range(4)]
                assert all(isinstance(one.exception(), httpx.ReadTimeout) for one in leaving)
            assert len(running) == 4
            kept = clients.submit(plan, url, "two")
            wait_until(lambda: len(running) == 5)
        finally:
            go_on.set()
        assert kept.result().status_code == 200
        assert plan(url, "one").status_code == 200


def test_slow_plans_delay_no_tokens(http, tiny, monkeypatch):
    go_on, running = Event(), []
    monkeypatch.setattr(tiny[1].engine, "plan", lambda *_, **options: running.append(None) or (go_on.wait(LONG) and []))
    with ThreadPoolExecutor(8) as clients:
        try:
            plans = [clients.submit(plan, tiny[0], "none") for _ in range(8)]
            wait_until(lambda: len(running) == 8)
            assert post(http, "/tokenize", prompt="a house").status_code == 200
        finally:
            go_on.set()
        assert [one.result().status_code for one in plans] == [200] * 8


def test_a_plan_ends_when_its_client_leaves(tiny, monkeypatch):
    ended = Event()

    def downloading(*_, **options):
        with watching(ended.set):
            assert ended.wait(LONG)

    monkeypatch.setattr(tiny[1].engine, "plan", downloading)
    with pytest.raises(httpx.ReadTimeout):
        plan(tiny[0], "none", seconds=0.2)
    assert ended.wait(LONG)


def test_the_cache_of_a_key(tiny):
    """Vectors and scores of one key never use the prefix cache of another key."""
    server = make_server(tiny[1].llm.llm, "tiny-vl", ServerConfig(api_key=["one", "two"]))
    bodies = [
        ("/v1/embeddings", {"input": ["a long text of many tokens " * 8, list(range(5, 105))]}),
        ("/score", {"queries": "a long text of many tokens " * 8, "documents": ["b"]}),
    ]
    llm = tiny[1].llm.llm
    with listening(server) as url:
        for path, body in bodies:

            def hits(key, path=path, body=body):
                before = llm.stats.prefix_hits
                headers = {"Authorization": f"Bearer {key}"}
                assert httpx.post(url + path, json=body, headers=headers, timeout=240).status_code == 200
                assert_idle(llm)
                return llm.stats.prefix_hits - before

            hits("one")
            assert hits("one") > 0
            assert hits("two") == 0


def test_classes(tmp_path):
    transformers = pytest.importorskip("transformers")
    from oracle import ensure_torchvision, fast_tokenizer, text_config

    ensure_torchvision()

    words = fast_tokenizer(["<pad>"], pad_token="<pad>")
    names = {0: "code", 1: "prose", 2: "neither"}
    config = transformers.LlamaConfig(**text_config(words) | {"pad_token_id": 0}, num_labels=3, id2label=names)
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    server = make_server(tmp_path, "classes", warm_up=False)
    with server.llm.llm, listening(server) as url:
        expected = asyncio.run(server.llm.classify(["import os", "a house"]))
        found = httpx.post(f"{url}/classify", json={"input": ["import os", "a house"]}, timeout=240).json()
        routed = httpx.post(f"{url}/invocations", json={"input": ["import os", "a house"]}, timeout=240).json()
    assert routed["data"] == found["data"]
    for one, result in zip(found["data"], expected, strict=True):
        assert one["probs"] == pytest.approx(list(result.outputs.probs), abs=1e-5)
        assert one["label"] == names[max(range(3), key=one["probs"].__getitem__)]
        assert one["num_classes"] == 3


def test_advice_names_endpoints(http):
    for path, body, said in (
        ("/classify", {"input": "a"}, "no classification head; use /score or /v1/embeddings"),
        ("/v1/completions", {"prompt": "<|vision_start|><|image_pad|><|vision_end|>"}, "but the request holds 0"),
    ):
        message = error(http.post(path, json=body))["message"]
        assert said in message
        assert "PoolingParams" not in message
        assert "multi_modal_data" not in message
