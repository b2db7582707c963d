"""Files and batches over HTTP: OpenAI's wire format, owners and wrong requests."""

from __future__ import annotations

import base64
import errno
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import openai
import pytest
from batch_files import BATCH, CHAT, ended, line, results, upload
from http_server import TINY, listening, make_server, openai_client
from sensorium.engine.frontend.input_queue import InputQueue
from sensorium.mm.media.policy import MediaPolicy
from sensorium.server.config import ServerConfig
from sensorium.server.state import Server
from sensorium.server.store import Store
from waiting import LONG, wait_until

SOUND = min((TINY.parent / "speech").glob("*.flac"))


@pytest.fixture(scope="module")
def stored(tiny, tmp_path_factory):
    """Two clients with different keys of a server with a folder."""
    config = ServerConfig(data_dir=str(tmp_path_factory.mktemp("data")), api_key=["one", "two"], max_file_bytes=100_000)
    with closing(Store(config)) as store:
        server = Server(tiny[1].llm, config, "tiny-vl", store=store)
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
    usages = [one["response"]["body"]["usage"] for one in answers]
    assert batch.model == "tiny-vl"
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in usages)
    assert batch.usage.output_tokens > 0
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    assert batch.usage.output_tokens_details.reasoning_tokens == 0


def noted_priorities(monkeypatch):
    """Return the list of priorities of the requests that the engine gets from now on."""
    priorities, add = [], InputQueue.add

    def noted(queue, entries, *rest):
        priorities.extend(entry.priority for entry in entries)
        return add(queue, entries, *rest)

    monkeypatch.setattr(InputQueue, "add", noted)
    return priorities


def test_recordings_are_transcribed(tiny_asr, tmp_path, monkeypatch):
    """Lines name an uploaded file or a URL; texts that are no JSON become strings; the tenant's own files only."""
    sound, llm = SOUND.read_bytes(), tiny_asr[1].llm
    priorities, budget, counted, transcribe = noted_priorities(monkeypatch), llm.engine.inputs.media.budget, [], llm.transcribe

    async def noted(audio, *arguments, **options):
        counted.append((audio, budget.num_bytes, [holder.background for holder in budget.holders]))
        bodies.append(server.services.body_bytes.count)
        return await transcribe(audio, *arguments, **options)

    monkeypatch.setattr(llm, "transcribe", noted)
    bodies = list[int]()
    url, data = "/v1/audio/transcriptions", f"data:audio/flac;base64,{base64.b64encode(sound).decode()}"
    config = ServerConfig(data_dir=str(tmp_path), api_key=["one", "two"])
    with closing(Store(config)) as store:
        server = Server(llm, config, "tiny-asr", store=store)
        with listening(server) as address:
            options = {"base_url": f"{address}/v1", "max_retries": 0, "timeout": LONG}
            with openai.OpenAI(api_key="one", **options) as client, openai.OpenAI(api_key="two", **options) as other:
                file = client.files.create(file=("a.flac", sound), purpose="user_data").id
                foreign = other.files.create(file=("a.flac", sound), purpose="user_data").id
                lines = [
                    line("file", url, file_id=file, language="en", response_format="verbose_json"),
                    line("url", url, file_url=data, response_format="text"),
                    line("none", url),
                    line("both", url, file_id=file, file_url=data),
                    line("foreign", url, file_id=foreign),
                    line("field", url, file_id=file, temperature="x"),
                    line("path", url, file_url=str(SOUND)),
                ]
                batch = client.batches.create(input_file_id=upload(client, *lines).id, **{**BATCH, "endpoint": url})
                batch = ended(client, batch)
                assert {*priorities} == {1}
                priorities.clear()
                plain = client.audio.transcriptions.create(model="tiny-asr", file=("a.flac", sound))
                assert {*priorities} == {0}
                answers = results(client, batch.output_file_id)
                failed = results(client, batch.error_file_id)
    whole, text = (one["response"]["body"] for one in answers)
    assert whole["text"] == plain.text
    assert whole["segments"]
    assert text == f"{plain.text}\n"
    assert (batch.model, batch.usage) == ("tiny-asr", None)  # it is counted in seconds
    found = {one["custom_id"]: one["response"] for one in failed}
    assert {name: one["status_code"] for name, one in found.items()} == {
        "none": 400, "both": 400, "foreign": 404, "field": 400, "path": 400,
    }  # fmt: skip
    assert found["foreign"]["body"]["error"]["param"] == "file_id"
    assert found["field"]["body"]["error"]["param"] == "temperature"
    assert found["path"]["body"]["error"]["param"] == "file_url"
    assert found["path"]["body"]["error"]["message"].startswith("file_url: ")
    assert [audio for audio, _, _ in counted] == [sound] * 3
    padding = 2  # a data: URL is counted before it is decoded
    assert any(size >= len(sound) - padding and background == [True] for _, size, background in counted)
    wait_until(lambda: not budget.holders)
    assert max(bodies) > len(sound)  # an uploaded file counts as a body
    assert server.services.body_bytes.count == 0


def test_slow_urls_of_a_batch_delay_no_transcription_and_end_with_it(tmp_path):
    url, config = "/v1/audio/transcriptions", ServerConfig(data_dir=str(tmp_path), batch_requests=2)
    limits = {"timeout": LONG, "max_seconds": LONG, "max_request_seconds": LONG}
    media = MediaPolicy(allow_private_hosts=True, allowed_media_ports=None, **limits)
    server = make_server(TINY.parent / "tiny-asr", "tiny-asr", config, media=media, max_num_seqs=4, warm_up=False)
    server.llm._readers = ThreadPoolExecutor(2)
    with server.llm.llm, closing(Store(config)) as server.services.store, socket.create_server(("127.0.0.1", 0)) as slow:
        slow.settimeout(LONG)
        with listening(server) as address, openai_client(address) as client:
            lines = [line(name, url, file_url=f"http://127.0.0.1:{slow.getsockname()[1]}/{name}") for name in "ab"]
            batch = client.batches.create(input_file_id=upload(client, *lines).id, **{**BATCH, "endpoint": url})
            connections = [slow.accept()[0] for _ in lines]
            files = {"file": ("a.flac", SOUND.read_bytes())}
            assert httpx.post(f"{address}{url}", files=files, data={"language": "en"}, timeout=60).status_code == 200
            client.batches.cancel(batch.id)
            assert ended(client, batch).status == "cancelled"
            for connection in connections:
                with connection:
                    connection.settimeout(60)
                    while connection.recv(4096):
                        pass
            wait_until(lambda: not server.engine.inputs.media.budget.holders)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_other_endpoints(stored, url, body, monkeypatch):
    """A line has the same response as a request of a client, and a lower priority."""
    client, priorities = stored[0], noted_priorities(monkeypatch)
    file = upload(client, line("a", url, **body))
    batch = ended(client, client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h"))
    (found,) = results(client, batch.output_file_id or batch.error_file_id)
    with httpx.Client(base_url=str(client.base_url).removesuffix("/v1/"), timeout=LONG) as http:
        same = http.post(url, json=body, headers={"Authorization": "Bearer one"})
    assert found["response"]["status_code"] == same.status_code
    assert found["response"]["body"].keys() == same.json().keys()
    assert priorities == [1, 0]
    if url != "/v1/embeddings":
        with httpx.Client(base_url=str(client.base_url).removesuffix("/v1/"), timeout=LONG) as http:
            http.post(url, json={**body, "priority": 7}, headers={"Authorization": "Bearer one"})
            null = http.post(url, json={**body, "priority": None}, headers={"Authorization": "Bearer one"})
        assert (null.status_code, priorities) == (200, [1, 0, 7, 0])


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
        ([line("a", background=True)], "invalid_request", 1),
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
        client.files.create(file=b"x", purpose="fine-tune")
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
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["content-disposition"] == f"attachment; filename*=UTF-8''{file.filename}"


def test_a_full_disk_is_named(stored, monkeypatch, caplog):
    client = stored[0]
    file = upload(client, line("a"))

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sensorium.server.batch_runner._RETRY_SECONDS", 0.01)
    monkeypatch.setattr(Store, "add_file", full)
    with pytest.raises(openai.InternalServerError, match="the disk is full") as error:
        upload(client, line("a"))
    assert (error.value.status_code, error.value.code) == (507, "disk_full")
    monkeypatch.setattr(Store, "end_batch", full)
    batch = client.batches.create(input_file_id=file.id, **BATCH)
    wait_until(lambda: client.batches.retrieve(batch.id).errors)
    (entry,) = client.batches.retrieve(batch.id).errors.data
    assert (entry.code, "the disk is full" in entry.message) == ("disk_full", True)
    assert f"the batch {batch.id} is interrupted (the disk is full" in caplog.text
    monkeypatch.undo()
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    assert client.batches.retrieve(batch.id).errors is None
