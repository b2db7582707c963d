"""Files that messages name by their id, with the `openai` package and in Anthropic's form."""

from __future__ import annotations

import base64
import io
from contextlib import closing

import httpx
import openai
import pytest
from http_server import CASES, IMAGE, MEDIA, error, listening
from PIL import Image
from sensorium.server.config import ServerConfig
from sensorium.server.state import Server
from sensorium.server.store import Store
from waiting import LONG, wait_until

PROMPT, ANSWER = CASES[IMAGE]["prompt"], CASES[IMAGE]["answer"]
FIELDS = {"model": "tiny-vl", "temperature": 0.0}
DATA = (MEDIA / IMAGE).read_bytes()


@pytest.fixture(scope="module")
def stored(tiny, tmp_path_factory):
    """Two clients with different keys of a server with a folder, and the server."""
    folder = str(tmp_path_factory.mktemp("data"))
    config = ServerConfig(data_dir=folder, api_key=["one", "two"], max_body_bytes=100_000)
    with closing(Store(config)) as store:
        server = Server(tiny[1].llm, config, "tiny-vl", store=store)
        with listening(server) as url:
            options = {"base_url": f"{url}/v1", "max_retries": 0, "timeout": LONG}
            with openai.OpenAI(api_key="one", **options) as one, openai.OpenAI(api_key="two", **options) as two:
                yield one, two, server


def upload(client, data=DATA, name=IMAGE, purpose="user_data"):
    return client.files.create(file=(name, data), purpose=purpose)


def chat(client, file, **fields):
    content = [{"type": "file", "file": {"file_id": file}}, {"type": "text", "text": PROMPT}]
    messages = [{"role": "user", "content": content}]
    found = client.chat.completions.create(**FIELDS, max_tokens=96, messages=messages, **fields)
    return found.choices[0].message.content.strip()


def test_every_api_takes_uploaded_files(stored):
    client, server = stored[0], stored[2]
    file = upload(client, purpose="vision")
    assert (file.purpose, file.bytes, client.files.content(file.id).content) == ("vision", len(DATA), DATA)
    assert chat(client, file.id) == ANSWER
    parts = [{"type": "input_image", "file_id": file.id, "detail": "auto"}, {"type": "input_file", "file_id": file.id}]
    for part in parts:
        items = [{"role": "user", "content": [part, {"type": "input_text", "text": PROMPT}]}]
        found = client.responses.create(**FIELDS, max_output_tokens=96, input=items, store=True)
        assert found.output_text.strip() == ANSWER
        assert client.responses.input_items.list(found.id).data[0].content[0].file_id == file.id
    later = client.responses.create(**FIELDS, max_output_tokens=2, input="and?", previous_response_id=found.id)
    assert later.usage.input_tokens > found.usage.input_tokens
    block = {"type": "image", "source": {"type": "file", "file_id": file.id}}
    plain = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(DATA).decode()}}
    result = {"type": "tool_result", "tool_use_id": "a"}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]}
    with httpx.Client(base_url=str(client.base_url).removesuffix("/v1/"), headers={"x-api-key": "one"}, timeout=LONG) as http:
        body = {**FIELDS, "max_tokens": 96}
        messages = [{"role": "user", "content": [block, {"type": "text", "text": PROMPT}]}]
        found = http.post("/v1/messages", json={**body, "messages": messages}).json()
        assert found["content"][0]["text"].strip() == ANSWER
        counts = [
            http.post("/v1/messages/count_tokens", json={"messages": [call, {"role": "user", "content": [one]}]}).json()
            for one in ({**result, "content": [block]}, {**result, "content": [plain]})
        ]
        assert counts[0]["error"] == counts[1]["error"]  # the template has no tools
    wait_until(lambda: server.services.body_bytes.count == 0)


def test_pages_of_an_uploaded_pdf(stored):
    pytest.importorskip("pypdfium2")
    buffer = io.BytesIO()
    Image.open(io.BytesIO(DATA)).convert("RGB").save(buffer, "PDF", resolution=144.0, quality=95)
    file = upload(stored[0], buffer.getvalue(), "scan")  # without an extension
    assert chat(stored[0], file.id) == ANSWER


def test_wrong_files(stored):
    client, other, server = stored
    file = upload(client)
    requests = upload(client, b"{}", "in.jsonl", "batch")
    large = [upload(client, DATA + bytes(60_000)) for _ in range(2)]
    with pytest.raises(openai.NotFoundError, match="there is no file") as caught:
        chat(other, file.id)
    assert caught.value.param == "messages[0].content[0]"
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, requests.id)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "messages[0].content[0]")
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert (caught.value.code, caught.value.param) == ("invalid_value", "input_file_id")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        upload(client, purpose="fine-tune")
    parts = [{"type": "file", "file": {"file_id": one.id}} for one in large]
    with pytest.raises(openai.APIStatusError, match="max_body_bytes") as caught:
        client.chat.completions.create(**FIELDS, messages=[{"role": "user", "content": parts}])
    assert caught.value.status_code == 413
    client.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
        chat(client, file.id)
    wait_until(lambda: server.services.body_bytes.count == 0)


def test_a_server_without_a_folder_refuses_ids(http):
    content = [{"type": "file", "file": {"file_id": "file-1"}}]
    found = http.post("/v1/chat/completions", json={**FIELDS, "messages": [{"role": "user", "content": content}]})
    assert "file_id" in error(found)["message"]
