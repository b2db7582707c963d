"""Files and batches over HTTP: OpenAI's wire format, owners and wrong requests."""

from __future__ import annotations

import json
from contextlib import closing

import httpx
import openai
import pytest
from batch_files import BATCH, CHAT, ended, line, results, upload
from http_server import listening
from sensorium.engine.frontend.input_queue import InputQueue
from sensorium.server.config import ServerConfig
from sensorium.server.state import Server
from sensorium.server.store import Store
from waiting import LONG


@pytest.fixture(scope="module")
def stored(tiny, tmp_path_factory):
    """Two clients with different keys of a server with a folder."""
    config = ServerConfig(data_dir=str(tmp_path_factory.mktemp("data")), api_key=["one", "two"], max_file_bytes=100_000)
    with closing(Store(config)) as store:
        server = Server(tiny[1].engine, config, "tiny-vl", store=store)
        with listening(server) as url:
            options = {"base_url": f"{url}/v1", "max_retries": 0, "timeout": LONG}
            with openai.OpenAI(api_key="one", **options) as one, openai.OpenAI(api_key="two", **options) as two:
                yield one, two


def test_a_batch_is_answered(stored):
    client = stored[0]
    lines = [line("b"), line("a", max_tokens=-1), line("c", seed=1, temperature=1.0), b"", line("d", model="other")]
    file = upload(client, *lines)
    assert (file.purpose, file.filename, file.bytes) == ("batch", "in.jsonl", len(b"\n".join(lines)))
    assert client.files.content(file.id).content == b"\n".join(lines)
    batch = client.batches.create(input_file_id=file.id, metadata={"k": "v"}, **BATCH)
    assert (batch.object, batch.endpoint, batch.metadata) == ("batch", CHAT, {"k": "v"})
    batch = ended(client, batch)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 4, 2, 2)
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
    answers = results(client, batch.output_file_id)
    assert [one["custom_id"] for one in answers] == ["b", "c"]
    assert {one["response"]["status_code"] for one in answers} == {200}
    assert answers[0]["response"]["body"]["object"] == "chat.completion"
    failed = results(client, batch.error_file_id)
    assert [(one["custom_id"], one["response"]["status_code"]) for one in failed] == [("a", 400), ("d", 404)]
    assert failed[0]["response"]["body"]["error"]["param"] == "max_tokens"
    assert len({one["id"] for one in answers + failed}) == 4
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"


@pytest.mark.parametrize(
    ("url", "body"),
    [("/v1/completions", {"prompt": "a"}), ("/v1/embeddings", {"input": "a"}), ("/v1/responses", {"input": "a"})],
)
def test_other_endpoints(stored, url, body, monkeypatch):
    """A line has the same response as a request of a client, and a lower priority."""
    client, priorities, add = stored[0], [], InputQueue.add

    def noted(queue, entries, *rest):
        priorities.extend(entry.priority for entry in entries)
        return add(queue, entries, *rest)

    monkeypatch.setattr(InputQueue, "add", noted)
    file = upload(client, line("a", url, **body))
    batch = ended(client, client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h"))
    (found,) = results(client, batch.output_file_id or batch.error_file_id)
    with httpx.Client(base_url=str(client.base_url).removesuffix("/v1/"), timeout=LONG) as http:
        same = http.post(url, json=body, headers={"Authorization": "Bearer one"})
    assert found["response"]["status_code"] == same.status_code
    assert found["response"]["body"].keys() == same.json().keys()
    assert priorities == [1, 0]


def test_lists_have_pages(stored):
    client = stored[0]
    made = [upload(client, line("a")).id for _ in range(3)]
    assert [one.id for one in client.files.list(limit=2)][:3] == made[::-1]
    assert [one.id for one in client.files.list(order="asc", after=made[0])][:2] == made[1:]
    assert {one.purpose for one in client.files.list(purpose="batch_output")} <= {"batch_output"}
    batches = [client.batches.create(input_file_id=made[0], **BATCH).id for _ in range(3)]
    assert [one.id for one in client.batches.list(limit=1)][:3] == batches[::-1]
    for one in batches:
        ended(client, client.batches.retrieve(one))
    assert client.files.delete(made[0]).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(made[0])
    with pytest.raises(openai.NotFoundError, match="after"):
        client.files.list(after=made[0])


def test_files_belong_to_a_key(stored):
    client, other = stored
    file = upload(client, line("a"))
    batch = client.batches.create(input_file_id=file.id, **BATCH)
    assert not {file.id, batch.id} & {one.id for one in (*other.files.list(), *other.batches.list())}
    calls = [other.files.retrieve, other.files.content, other.files.delete, other.batches.retrieve, other.batches.cancel]
    for call, name in zip(calls, [file.id] * 3 + [batch.id] * 2, strict=True):
        with pytest.raises(openai.NotFoundError):
            call(name)
    with pytest.raises(openai.NotFoundError):
        other.batches.create(input_file_id=file.id, **BATCH)
    ended(client, batch)


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([line("a"), line("a")], "duplicate_custom_id", 2), ([line("")], "invalid_custom_id", 1),
        ([line("\ud800")], "invalid_custom_id", 1), ([line("x" * 513)], "invalid_custom_id", 1),
        ([line("a"), b"{"], "invalid_json_line", 2), ([b"[" * 10**4], "invalid_json_line", 1),
        ([line("a", x=0).replace(b": 0", b": " + b"[" * 127 + b"]" * 127)], "invalid_json_line", 1),
        ([b"[]"], "invalid_request", 1), ([line("a", "/v1/embeddings")], "mismatched_endpoint", 1),
        ([line("a", stream=True)], "invalid_request", 1),
        ([line("a").replace(b"POST", b"GET")], "invalid_method", 1), ([b" ", b""], "empty_file", None),
    ],
)  # fmt: skip
def test_wrong_lines_fail_a_batch(stored, lines, code, number):
    client = stored[0]
    batch = ended(client, client.batches.create(input_file_id=upload(client, *lines).id, **BATCH))
    assert batch.status == "failed"
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, number)
    assert batch.output_file_id is batch.error_file_id is None
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_wrong_requests(stored):
    client = stored[0]
    file = upload(client, line("a"))
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=b"x", purpose="vision")
    with pytest.raises(openai.BadRequestError, match="seconds"):
        client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 1})
    with pytest.raises(openai.APIStatusError, match="max_file_bytes"):
        upload(client, b"x" * 100_001)
    with pytest.raises(openai.APIStatusError, match="lines"):
        upload(client, b"\n" * 50_001)
    for wrong in (
        {"endpoint": "/score"},
        {"completion_window": "1h"},
        {"metadata": {"k": "v" * 513}},
    ):
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            client.batches.create(**{"input_file_id": file.id, **BATCH, **wrong})
    wrong = json.dumps({**BATCH, "input_file_id": "\ud800"})
    headers = {"Authorization": "Bearer one", "Content-Type": "application/json"}
    response = httpx.post(f"{client.base_url}batches", content=wrong, headers=headers, timeout=LONG)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input_file_id")
    kept = client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert kept.expires_at - kept.created_at == 3600


def test_without_a_folder_the_option_is_named(client):
    with pytest.raises(openai.NotFoundError, match="--data-dir"):
        client.files.list()
    with pytest.raises(openai.NotFoundError, match="--data-dir"):
        client.batches.create(input_file_id="file-1", **BATCH)


def test_a_download_says_its_size(stored):
    client = stored[0]
    file = upload(client, line("a"), line("b"))
    with httpx.Client(headers={"Authorization": "Bearer one"}, timeout=LONG) as http:
        url = f"{client.base_url}files/{file.id}/content"
        for response in http.get(url), http.head(url):
            assert response.headers["content-length"] == str(file.bytes)
