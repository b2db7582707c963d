"""The reasoning of earlier messages reaches a chat template under the name that it reads."""

from __future__ import annotations

import pytest
from sensorium.callers.errors import InputError
from sensorium.callers.message_fields import check_messages
from sensorium.processors.text.rendering import RenderInputs, render

CALL = {"type": "function", "function": {"name": "look", "arguments": '{"place": "here"}'}}


def prompt(template, message):
    """Render one message, in OpenAI's form."""
    return "".join(text for text, _ in render(RenderInputs(template, [message], {}, {}, {}, False, 10_000, 1000, 10.0)))


def assistant(**fields):
    return {"role": "assistant", "content": "Yes.", **fields}


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize(
    "read",
    [
        "message.reasoning_content", "message.reasoning", "message.thinking", "message['reasoning']",
        "message.get('reasoning') or message.get('reasoning_content')",
        "(message.reasoning_content if message.reasoning_content is string else '')",
    ],
)  # fmt: skip
def test_a_template_gets_the_reasoning_under_its_name(given, read):
    template = "{% for message in messages %}<{{ " + read + " }}>{{ message.content }}{% endfor %}"
    assert prompt(template, assistant(**{given: "hm"})) == "<hm>Yes."
    assert prompt(template, {"role": "user", "content": "Yes.", given: "hm"}).endswith("Yes.")


def test_a_text_before_a_call_where_the_template_has_one_place_for_both():
    """As in gpt-oss's template."""
    template = (
        "{% for message in messages %}{% if message.tool_calls %}"
        "{% if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}"
        "[{{ message.content or message.thinking }}]{{ message.tool_calls[0].function.name }}"
        "{{ message.tool_calls[0].function.arguments | tojson }}{% endif %}{% endfor %}"
    )
    called = {"tool_calls": [CALL]}
    assert prompt(template, assistant(reasoning_content="hm", **called)) == '[hm\nYes.]look{"place": "here"}'
    assert prompt(template, assistant(**called)) == '[Yes.]look{"place": "here"}'
    assert prompt(template, {"role": "assistant", "reasoning_content": "hm", **called}) == '[hm]look{"place": "here"}'


def test_both_names_of_the_reasoning_are_known():
    check_messages([assistant(reasoning="hm"), assistant(reasoning_content="hm")], "{{ messages }}")
    with pytest.raises(InputError, match="unknown field 'thoughts'"):
        check_messages([assistant(thoughts="hm")], "{{ messages }}")
