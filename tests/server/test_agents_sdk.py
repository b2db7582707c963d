"""The openai-agents package: loops over tools, one of which returns an image, through /v1/responses and chat."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from http_server import image_url, saying
from openai import AsyncOpenAI
from sensorium.server.parsers.reasoning import FORMATS

agents = pytest.importorskip("agents", reason="needs the package openai-agents")

ANSWERS = (
    '<think>I look first.</think><tool_call>\n{"name": "look", "arguments": {"place": "desk"}}\n</tool_call>',
    '<think>I add.</think><tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 40}}\n</tool_call>',
    "<think>Done.</think>There are 42 cups.",
)


@agents.function_tool
def look(place: str) -> list:
    """Return a picture of a place."""
    return [agents.ToolOutputText(text=f"the {place}"), agents.ToolOutputImage(image_url=image_url())]


@agents.function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture
def seen(tools, monkeypatch):
    """The messages of each request. The model cannot call tools; its answers are set."""
    server = tools[1]
    monkeypatch.setitem(server.__dict__, "answer_format", replace(server.answer_format, reasoning=FORMATS["think"]))
    generate, seen = server.llm.generate, []

    def answering(messages, params, request_id, kind, priority, **options):
        seen.append(messages)
        turn = sum(message["role"] == "tool" for message in messages)
        return saying(generate, ANSWERS[turn])(messages, params, request_id, kind, priority, **options)

    monkeypatch.setattr(server.llm, "generate", answering)
    return seen


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_calls_tools_until_it_answers(tools, seen, streams):
    agents.set_tracing_disabled(True)

    async def run():
        async with AsyncOpenAI(base_url=str(tools[0].base_url), api_key="none", max_retries=0, timeout=240) as client:
            model = agents.OpenAIResponsesModel("tiny-vl", client)
            agent = agents.Agent("Counter", instructions="Count the cups.", model=model, tools=[look, add])
            picture = {"type": "input_image", "image_url": image_url(), "detail": "auto"}
            asked = [{"role": "user", "content": [{"type": "input_text", "text": "How many?"}, picture]}]
            if not streams:
                return await agents.Runner.run(agent, asked)
            result = agents.Runner.run_streamed(agent, asked)
            async for _ in result.stream_events():
                pass
            return result

    result = asyncio.run(run())
    assert result.final_output == "There are 42 cups."
    assert [item.type for item in result.new_items if item.type != "reasoning_item"] == [
        *("tool_call_item", "tool_call_output_item") * 2,
        "message_output_item",
    ]
    assert len(seen) == 3
    results = [message["content"] for message in seen[-1] if message["role"] == "tool"]
    assert [part["type"] for part in results[0]] == ["input_text", "input_image"]
    assert "42" in str(results[1])
