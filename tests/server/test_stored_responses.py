"""Stored responses of /v1/responses with the `openai` package."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import closing

import httpx
import openai
import pytest
from http_server import CASES, IMAGE, MEDIA, error, image_url, listening, openai_client
from openai.types.responses import ResponseItem, ResponseStreamEvent
from pydantic import TypeAdapter
from sensorium.server.background import STOPPED, Background
from sensorium.server.config import ServerConfig
from sensorium.server.drain import Draining
from sensorium.server.errors import HttpError
from sensorium.server.guard import BodyBytes
from sensorium.server.response_store import KEPT_SECONDS
from sensorium.server.state import Server
from sensorium.server.store import Store
from waiting import LONG, hold_steps, wait_until

ITEM = TypeAdapter(ResponseItem)
IMAGE_BYTES = (MEDIA / IMAGE).read_bytes()
PART = {"type": "input_image", "image_url": image_url(), "detail": "auto"}
FIRST = [{"role": "user", "content": [PART, {"type": "input_text", "text": CASES[IMAGE]["prompt"]}]}]
FIELDS = {"model": "tiny-vl", "temperature": 0.0, "max_output_tokens": 16}


@pytest.fixture(scope="module")
def stored(tiny, tmp_path_factory):
    """Two clients with different keys of a server with a folder."""
    config = ServerConfig(data_dir=str(tmp_path_factory.mktemp("data")), api_key=["one", "two"], max_stored_bytes=200_000)
    with closing(Store(config)) as store:
        server = Server(tiny[1].llm, config, "tiny-vl", store=store)
        with listening(server) as url:
            options = {"base_url": f"{url}/v1", "max_retries": 0, "timeout": LONG}
            with openai.OpenAI(api_key="one", **options) as one, openai.OpenAI(api_key="two", **options) as two:
                yield one, two


def test_a_conversation_goes_on_after_a_stored_response(stored):
    client = stored[0]
    first = client.responses.create(**FIELDS, input=FIRST, store=True, instructions="Be brief.")
    assert first.output_text.strip() == CASES[IMAGE]["answer"]
    assert first.to_dict()["store"] is True
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    second = client.responses.create(**FIELDS, input="hello", previous_response_id=first.id)
    assert (second.previous_response_id, second.to_dict()["store"]) == (first.id, True)
    third = client.responses.create(**FIELDS, input=[{"role": "user", "content": "and?"}], previous_response_id=second.id)
    said = [{"role": "assistant", "content": one.output_text} for one in (first, second)]
    user = [{"role": "user", "content": text} for text in ("hello", "and?")]
    whole = client.responses.create(**FIELDS, input=[*FIRST, said[0], user[0], said[1], user[1]])
    assert (third.usage.input_tokens, third.output_text) == (whole.usage.input_tokens, whole.output_text)
    assert third.usage.input_tokens > second.usage.input_tokens
    count = client.responses.input_tokens.count(model="tiny-vl", input="and?", previous_response_id=second.id)
    assert (count.input_tokens, count.object) == (third.usage.input_tokens, "response.input_tokens")


def test_streams_are_stored(stored):
    client = stored[0]
    *_, last = client.responses.create(**FIELDS, input="hello", store=True, stream=True)
    assert last.type in ("response.completed", "response.incomplete")
    assert client.responses.retrieve(last.response.id).to_dict() == last.response.to_dict()
    *_, last = client.responses.create(**FIELDS, input="hello", stream=True)
    assert last.response.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(last.response.id)
    assert (caught.value.code, caught.value.param) == ("not_found", "response_id")


def test_input_items_are_listed_and_responses_deleted(stored):
    client, other = stored
    items = [*FIRST, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    found = client.responses.create(**FIELDS, input=items, store=True)
    listed = [*client.responses.input_items.list(found.id, order="asc", limit=2)]
    assert [item.role for item in listed] == ["user", "assistant", "user"]
    assert [item.id for item in client.responses.input_items.list(found.id)] == [item.id for item in reversed(listed)]
    for item in listed:
        ITEM.validate_python(item.to_dict())
    assert listed[0].content[0].image_url == image_url()
    for call in (
        lambda: other.responses.retrieve(found.id),
        lambda: other.responses.input_items.list(found.id),
        lambda: other.responses.delete(found.id),
        lambda: other.responses.create(**FIELDS, input="a", previous_response_id=found.id),
        lambda: client.responses.retrieve("resp_1"),
        lambda: client.responses.input_items.list(found.id, after="msg_1"),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    client.responses.delete(found.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(found.id)


def test_bytes_and_age_are_limited(stored, tmp_path):
    other = stored[1]
    with pytest.raises(openai.PermissionDeniedError, match="max_stored_bytes"):
        other.responses.create(**FIELDS, input="hello " * 40_000, store=True)
    now = [1000.0]
    config = ServerConfig(data_dir=str(tmp_path), max_stored_bytes=300)
    with closing(Store(config, lambda: now[0])) as aged:
        aged.add_response("", {"id": "resp_1", "previous_response_id": None, "output": [{"a": 1}]}, [{"b": 2}])
        aged.add_response("", {"id": "resp_2", "previous_response_id": "resp_1", "output": []}, [{"c": 3}])
        assert aged.turns("", "resp_2", 1000) == [{"b": 2}, {"a": 1}, {"c": 3}]
        with pytest.raises(Exception, match="begin a new one"):
            aged.turns("", "resp_2", 100)
        with pytest.raises(Exception, match="max_stored_bytes"):
            aged.add_response("", {"id": "resp_3", "previous_response_id": None, "output": ["x" * 200]}, [])
        now[0] += KEPT_SECONDS
        with pytest.raises(Exception, match="there is no response"):
            aged.response("", "resp_1")
        aged.remove_expired()
        assert aged._rows("SELECT count(*) FROM responses") == [(0,)]


def test_errors_name_the_fields_of_the_request(stored, tiny):
    client = stored[0]
    first = client.responses.create(**FIELDS, input="hello", store=True)
    broken = [{"role": "user", "content": "a"}, {"role": "user", "content": [{**PART, "image_url": "data:,x"}]}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**FIELDS, input=broken, previous_response_id=first.id)
    assert caught.value.param == "input[1].content[0]"
    for fields in ({"store": True}, {"previous_response_id": first.id}):
        with pytest.raises(openai.BadRequestError, match="not of token ids"):
            client.responses.create(**FIELDS, input=[1, 2], **fields)
    with httpx.Client(base_url=tiny[0], timeout=LONG) as http:  # of a server without a folder
        assert error(http.post("/v1/responses", json={"input": "a", "previous_response_id": "b"}))["code"] == "unsupported"
        assert error(http.get("/v1/responses/a"), 404)["code"] == "not_configured"
        assert http.post("/v1/responses", json={"input": "a", "store": True, "max_output_tokens": 1}).json()["store"] is False
        count = http.post("/v1/responses/input_tokens", json={"input": [1, 2, 3]}).json()
        assert count["input_tokens"] == 3


EVENT = TypeAdapter(ResponseStreamEvent)
LONG_ANSWER = {**FIELDS, "input": "hello", "background": True, "max_output_tokens": 300, "extra_body": {"ignore_eos": True}}


def finished(client, response):
    wait_until(lambda: client.responses.retrieve(response.id).status not in ("queued", "in_progress"))
    return client.responses.retrieve(response.id)


def test_a_response_in_the_background_is_polled(stored):
    client, other = stored
    queued = client.responses.create(**FIELDS, input=FIRST, background=True)
    assert (queued.status, queued.background, queued.to_dict()["store"], queued.output) == ("queued", True, True, [])
    ended = finished(client, queued)
    plain = client.responses.create(**FIELDS, input=FIRST)
    assert (ended.status, ended.output_text) == (plain.status, plain.output_text)
    assert ended.usage.total_tokens == plain.usage.total_tokens
    assert (ended.id, ended.background, ended.completed_at is None) == (queued.id, True, plain.completed_at is None)
    following = client.responses.create(**FIELDS, input="and?", previous_response_id=queued.id)
    assert following.usage.input_tokens > ended.usage.input_tokens
    assert client.responses.cancel(queued.id).to_dict() == ended.to_dict()  # it has ended
    with pytest.raises(openai.NotFoundError):
        other.responses.cancel(queued.id)
    with pytest.raises(openai.BadRequestError, match="background=true can be cancelled"):
        client.responses.cancel(following.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.retrieve(queued.id, stream=True)
    assert (caught.value.code, caught.value.param) == ("unsupported", "stream")


def test_the_log_has_a_line_with_the_tokens_of_a_response_in_the_background(stored, caplog):
    """The line of its request, which ends before, has none."""
    caplog.set_level(logging.INFO, "sensorium.server.access_log")
    ended = finished(stored[0], stored[0].responses.create(**FIELDS, input=FIRST, background=True))
    running = stored[0].responses.create(**LONG_ANSWER)
    stored[0].responses.cancel(running.id)
    with stored[0].responses.create(**FIELDS, input=FIRST, background=True, stream=True) as stream:
        *_, last = stream

    def lines(name):
        return [record.fields for record in caplog.records if record.fields.get("response_id") == name]

    wait_until(lambda: lines(ended.id) and lines(running.id) and lines(last.response.id))
    (line,), (cancelled,), (streamed,) = lines(ended.id), lines(running.id), lines(last.response.id)
    assert (line["outcome"], cancelled["outcome"], streamed["outcome"]) == ("ok", "cancelled", "ok")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (ended.usage.input_tokens, ended.usage.output_tokens)
    assert streamed["completion_tokens"] == last.response.usage.output_tokens
    posts = [record.fields for record in caplog.records if record.message == "request" and record.fields["method"] == "POST"]
    assert {post["completion_tokens"] for post in posts} == {0}
    post = next(post for post in posts if post["request_id"] == line["request_id"])
    assert (post["tenant"], post["model"], post["path"]) == (line["tenant"], line["model"], line["path"])
    assert line["tenant"] is not None


def test_a_response_in_the_background_is_cancelled_and_deleted(stored, tiny):
    client = stored[0]
    running = client.responses.create(**LONG_ANSWER)
    with pytest.raises(openai.BadRequestError, match="wait until it is completed"):
        client.responses.create(**FIELDS, input="and?", previous_response_id=running.id)
    cancelled = client.responses.cancel(running.id)
    assert (cancelled.status, cancelled.output, cancelled.completed_at) == ("cancelled", [], None)
    assert client.responses.retrieve(running.id).status == "cancelled"
    with client.responses.create(**LONG_ANSWER, stream=True) as stream:
        name = next(stream).response.id
        client.responses.cancel(name)
        *_, last = stream
    EVENT.validate_python(last.to_dict())
    assert (last.type, last.response.status, last.response.incomplete_details) == ("response.incomplete", "cancelled", None)
    assert [*client.responses.retrieve(name, stream=True)][-1] == last
    running = client.responses.create(**LONG_ANSWER)
    client.responses.delete(running.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(running.id)
    wait_until(lambda: not tiny[1].engine.loop._names)


def test_a_stream_in_the_background_is_resumed(stored):
    client, other = stored
    with client.responses.create(**LONG_ANSWER, stream=True) as stream:
        begun = [event for _, event in zip(range(6), stream, strict=False)]  # and the connection is closed
    assert [event.type for event in begun[:3]] == [f"response.{name}" for name in ("created", "queued", "in_progress")]
    name = begun[0].response.id
    rest = [*client.responses.retrieve(name, stream=True, starting_after=begun[-1].sequence_number)]
    assert [event.sequence_number for event in (*begun, *rest)] == list(range(len(begun) + len(rest)))
    for event in (*begun, *rest):
        EVENT.validate_python(event.to_dict())
    assert rest[-1].type == "response.incomplete"
    assert client.responses.retrieve(name).to_dict() == rest[-1].response.to_dict()
    text = "".join(event.delta for event in (*begun, *rest) if event.type == "response.output_text.delta")
    assert text == rest[-1].response.output_text
    assert [*client.responses.retrieve(name, stream=True)] == [*begun, *rest]
    with pytest.raises(openai.NotFoundError):
        [*other.responses.retrieve(name, stream=True)]


def test_responses_in_the_background_fail_as_responses_do(stored, tiny):
    client = stored[0]
    broken = [{"role": "user", "content": [{**PART, "image_url": "data:,x"}]}]
    failed = finished(client, client.responses.create(**FIELDS, input=broken, background=True))
    assert (failed.status, failed.error.code, failed.completed_at) == ("failed", "invalid_prompt", None)
    assert "image 0" in failed.error.message
    *_, last = client.responses.create(**FIELDS, input=broken, background=True, stream=True)
    assert (last.type, last.response.error) == ("response.failed", failed.error)
    for fields in ({"temperature": -1}, {"store": False}, {"include": ["x"]}):
        with pytest.raises(openai.BadRequestError):
            client.responses.create(**{**FIELDS, **fields}, input="a", background=True)
    with pytest.raises(openai.BadRequestError, match="--data-dir"), openai_client(tiny[0]) as without:
        without.responses.create(**FIELDS, input="a", background=True)
    long = [{"role": "user", "content": "hello " * 1000}, {"role": "user", "content": "hello"}]
    cut = client.responses.create(**FIELDS, input=long, background=True, truncation="auto")
    assert finished(client, cut).usage.input_tokens < 100


def test_a_stop_of_the_server_ends_responses_in_the_background(tiny, tmp_path, monkeypatch):
    """At the end of the time limit they fail; those of a process that was killed fail at the next start."""
    core = tiny[1].llm.engine.loop.core
    monkeypatch.setattr(core, "step", core.step)  # for its end
    config = ServerConfig(data_dir=str(tmp_path), drain_seconds=0.01)
    with closing(Store(config)) as store:
        server = Server(tiny[1].llm, config, "tiny-vl", store=store)
        tasks = server.services.draining.tasks
        hold_steps(core, lambda: all(task.cancelling() for task in tasks.copy()))  # the answer does not end before the server
        with listening(server) as url, openai_client(url) as client:
            first = client.responses.create(**LONG_ANSWER)
        found = store.response("", first.id)
        assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
        assert store._rows("SELECT * FROM unfinished_responses") == []
        killed = {**found, "id": "resp_killed", "status": "in_progress", "error": None}
        store.add_response("", killed, [], finished=False)
    with closing(Store(config)) as store:
        server = Server(tiny[1].llm, config, "tiny-vl", store=store)
        with listening(server) as url, openai_client(url) as client:
            assert client.responses.retrieve("resp_killed").error.message == found["error"]["message"]


def in_progress(name, **fields):
    return {"id": name, "previous_response_id": None, "status": "in_progress", "error": None, "output": [], **fields}


def test_responses_end_early_without_room(tmp_path):
    """A key without room has no room for an error, but its unfinished responses end nevertheless, each on its own."""
    names = ["resp_1", "resp_2", "resp_3"]
    size = sum(len(json.dumps(in_progress(name))) + len("[]") for name in names)
    with closing(Store(ServerConfig(data_dir=str(tmp_path), max_stored_bytes=size))) as store:
        for name in names:
            store.add_response("", in_progress(name), [], finished=False)
        assert store._room("") == 0
        with pytest.raises(HttpError, match="max_stored_bytes"):
            store.update_response("", in_progress("resp_1", status="completed", output=["x"]), True)
        store.update_response("", in_progress("resp_1", status="cancelled", error=STOPPED), True)
        store._database.execute("UPDATE responses SET response = '{' WHERE id = 'resp_2'")
        store.fail_unfinished(STOPPED)
        assert [store.response("", name)["status"] for name in ("resp_1", "resp_3")] == ["cancelled", "failed"]
        assert store.response("", "resp_3")["error"] == STOPPED
        assert store._rows("SELECT id FROM unfinished_responses") == [("resp_2",)]
        store.delete_response("", "resp_2")
        store.fail_unfinished(STOPPED)
        assert store._rows("SELECT id FROM unfinished_responses") == []


class BrokenKeeper:
    async def add(self, response, finished=True):
        pass

    async def update(self, response):
        raise HttpError(507, "the disk is full", "disk_full")


@pytest.mark.parametrize("end", ["error", "cancel", "stop"])
def test_a_stream_has_a_last_event_if_its_end_cannot_be_stored(end):
    async def events():
        if end != "error":
            await asyncio.Event().wait()
        yield {"type": "response.in_progress", "response": in_progress("resp_1")}

    async def run():
        background = Background(1, Draining(), BodyBytes())
        running = await background.start(in_progress("resp_1", status="queued"), events(), BrokenKeeper(), True)
        follow = asyncio.ensure_future(_all(running.follow(-1)))
        await asyncio.sleep(0)
        if end == "cancel":
            await background.cancel("resp_1")
        await background.close(0.01)
        return await asyncio.wait_for(follow, LONG)

    *_, last = asyncio.run(run())
    event = json.loads(last.decode().partition("data: ")[2])
    status = "cancelled" if end == "cancel" else "failed"
    assert (event["type"], event["response"]["status"]) == (f"response.{'incomplete' if end == 'cancel' else 'failed'}", status)
    assert event["sequence_number"] == 2


async def _all(events):
    return [event async for event in events]


def test_the_body_of_a_response_in_the_background_counts_until_it_ends(tiny, tmp_path):
    config = ServerConfig(data_dir=str(tmp_path), max_total_body_bytes=150_000)
    with closing(Store(config)) as store:
        server = Server(tiny[1].llm, config, "tiny-vl", store=store)
        with listening(server) as url, openai_client(url) as client:
            image = {**PART, "file_id": client.files.create(file=("a.png", IMAGE_BYTES), purpose="vision").id}
            del image["image_url"]
            wait_until(lambda: server.services.body_bytes.count == 0)
            for streams in (False, True):
                items = [{"role": "user", "content": [image, {"type": "input_text", "text": "hello"}]}]
                running = client.responses.create(**{**LONG_ANSWER, "input": items}, metadata={"a": "b" * 500}, stream=streams)
                if streams:
                    with running as stream:
                        running = next(stream).response
                held = server.services.body_bytes.count
                assert 500 + len(IMAGE_BYTES) < held < 2000 + len(IMAGE_BYTES)
                time.sleep(0.05)  # the request has ended
                assert client.responses.retrieve(running.id).status in ("queued", "in_progress")
                assert server.services.body_bytes.count == held
                with pytest.raises(openai.RateLimitError, match="max_total_body_bytes"):
                    client.responses.create(**FIELDS, input="hello " * 25_000)
                client.responses.cancel(running.id)
                wait_until(lambda: server.services.body_bytes.count == 0)


@pytest.mark.parametrize("limit", ["_KEPT_EVENTS", "_KEPT_BYTES"])
def test_few_events_are_kept_after_the_end(monkeypatch, limit):
    async def events(name):
        yield {"type": "response.completed", "response": in_progress(name, status="completed")}

    async def run():
        background = Background(3, Draining(), BodyBytes())
        kept = []
        for name in ("resp_1", "resp_2", "resp_3"):
            running = await background.start(in_progress(name, status="queued"), events(name), SilentKeeper(), True)
            await background.close(LONG)
            await asyncio.sleep(0)
            if name == "resp_1":
                size = len(running.events) if limit == "_KEPT_EVENTS" else running.num_bytes
                monkeypatch.setattr(f"sensorium.server.background.{limit}", 2 * size)
            assert len(await _all(running.follow(-1))) == 3
            assert not hasattr(running, "_keep")
            kept.append([one for one in ("resp_1", "resp_2", "resp_3") if background.with_events(one)])
        return kept, background

    kept, background = asyncio.run(run())
    assert kept == [["resp_1"], ["resp_1", "resp_2"], ["resp_2", "resp_3"]]
    assert (background._kept_events, background._kept_bytes) == (6, sum(one.num_bytes for one in background._ended.values()))


class SilentKeeper(BrokenKeeper):
    async def update(self, response):
        pass
