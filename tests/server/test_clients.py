"""Clients that other people wrote: openai with asyncio, curl, litellm and langchain-openai; those not installed are skipped."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess

import pytest
from http_server import MEDIA, image_url

MESSAGES = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": image_url("line1.png")}},
            {"type": "text", "text": "Read the text."},
        ],
    }
]
SCHEMA = {
    "title": "n",
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}
FIXED = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def expected(http):
    """The answer to MESSAGES: (text, number of tokens)."""
    found = http.post("/v1/chat/completions", json={"messages": MESSAGES, **FIXED}).json()
    return found["choices"][0]["message"]["content"], found["usage"]["completion_tokens"]


@pytest.fixture
def curl(tiny):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")

    def run(path, *words, data=None):
        body = [] if data is None else ["--json", "@-"]
        command = ["curl", "-sS", "--no-buffer", *body, *words, f"{tiny[0]}{path}"]
        given = None if data is None else json.dumps(data)
        return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout

    return run


def test_curl(curl, expected):
    found = json.loads(curl("/v1/chat/completions", data={"messages": MESSAGES, **FIXED}))
    assert found["choices"][0]["message"]["content"] == expected[0]
    lines = curl("/v1/chat/completions", data={"messages": MESSAGES, "stream": True, **FIXED}).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected[0]


def test_curl_sends_files_and_sees_errors(curl):
    status = ["--write-out", "\n%{http_code}"]
    found = curl("/v1/audio/transcriptions", "-F", f"file=@{MEDIA / 'line1.png'}", *status).split("\n")
    assert found[1] == "400"
    assert json.loads(found[0])["error"]["code"] == "invalid_config"  # tiny-vl transcribes nothing
    found = curl("/v1/chat/completions", "-d", "{}", *status).split("\n")
    assert found[1] == "415"  # curl's own content type of -d
    assert curl("/health", "--head", *status).split()[1] == "200"


def test_the_async_package(tiny, expected):
    openai = pytest.importorskip("openai")

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{tiny[0]}/v1", api_key="none", max_retries=0, timeout=240) as client:
            create = client.chat.completions.create
            whole, stream = await asyncio.gather(
                create(model="tiny-vl", messages=MESSAGES, **FIXED),
                create(model="tiny-vl", messages=MESSAGES, stream=True, **FIXED),
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            vectors = await client.embeddings.create(model="tiny-vl", input=["a house"])
            return whole.choices[0].message.content, text, len(vectors.data[0].embedding)

    assert asyncio.run(run()) == (expected[0], expected[0], 128)


def test_litellm(tiny, expected):
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    fields = {"model": "openai/tiny-vl", "api_base": f"{tiny[0]}/v1", "api_key": "none", "timeout": 240}
    found = litellm.completion(messages=MESSAGES, **fields, **FIXED)
    assert found.choices[0].message.content == expected[0]
    assert found.usage.completion_tokens == expected[1]
    chunks = list(litellm.completion(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **fields, **FIXED))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected[0]
    vectors = litellm.embedding(input=["a house", "b"], **fields).data
    assert [len(one["embedding"]) for one in vectors] == [128, 128]
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=MESSAGES, temperature=-1, max_retries=0, **fields)
    with pytest.raises(litellm.NotFoundError, match="other"):
        litellm.completion(messages=MESSAGES, max_retries=0, **{**fields, "model": "openai/other"})


def test_langchain(tiny, expected):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    place = {"model": "tiny-vl", "base_url": f"{tiny[0]}/v1", "api_key": "none", "max_retries": 0}
    chat = langchain.ChatOpenAI(**place, **FIXED)
    found = chat.invoke(MESSAGES)
    assert found.content == expected[0]
    assert found.usage_metadata["output_tokens"] == expected[1]
    assert "".join(chunk.content for chunk in chat.stream(MESSAGES)) == expected[0]
    assert [answer.content for answer in chat.batch([MESSAGES, MESSAGES])] == [expected[0]] * 2
    structured = langchain.ChatOpenAI(**place, temperature=0, max_tokens=40).with_structured_output(
        SCHEMA, method="json_schema"
    )
    assert structured.invoke(MESSAGES)["n"] in (1, 2)
    vectors = langchain.OpenAIEmbeddings(**place, check_embedding_ctx_length=False).embed_documents(["a house", "b"])
    assert [len(vector) for vector in vectors] == [128, 128]


def test_langchain_calls_tools(tools):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    place = {"model": "tiny-vl", "base_url": str(tools[0].base_url), "api_key": "none", "max_retries": 0}
    chat = langchain.ChatOpenAI(**place, temperature=0, max_tokens=40)
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    (call,) = chat.bind_tools([tool], tool_choice="look").invoke(MESSAGES).tool_calls
    assert (call["name"], call["args"]["n"] in (1, 2)) == ("look", True)
    chunks = list(chat.bind_tools([tool], tool_choice="look").stream(MESSAGES))
    assert sum(chunks[1:], chunks[0]).tool_calls[0]["args"] == call["args"]
