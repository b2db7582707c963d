"""The form of content that a chat template reads is detected: every text reaches the prompt, or the rendering is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sensorium.callers.errors import InputError
from sensorium.processors.text.chat import render_chat
from sensorium.processors.text.template import load_template
from sensorium.processors.text.tokenizer import Tokenizer

LOOP = "{% for m in messages %}[{{ m.role }}]"
END = "{% endfor %}"
IF_STRING = "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
SHOW = "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}"
# name -> what the template reads, and the template, in the shapes that published templates have
SHAPES = {
    "joined": ("string", "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}"),
    "trimmed": ("string", LOOP + "{{ m['content'] | trim }}" + END),
    "trimmed system": (
        "string",
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}{% set rest = messages[1:] %}"
        "{% else %}{% set rest = messages %}{% endif %}[system]{{ system }}{% for m in rest %}[{{ m.role }}]"
        "{{ m['content'] | trim }}{% endfor %}",
    ),
    "a string or nothing": (
        "string",
        LOOP + "{% if m.content is string %}{% set content = m.content %}{% else %}{% set content = '' %}{% endif %}"
        "{{ content }}" + END,
    ),
    "first part": ("parts", LOOP + "{{ m['content'][0]['text'] }}" + END),
    "loop": ("parts", LOOP + "{% for c in m['content'] %}" + SHOW + END + END),
    "loop of a variable": ("parts", LOOP + "{% set parts = m.content %}{% for c in parts %}" + SHOW + END + END),
    "loop of get": ("parts", LOOP + "{% for c in m.get('content') or [] %}" + SHOW + END + END),
    "selected": (
        "parts",
        LOOP + "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
        "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %}" + END,
    ),
    "mapped": ("parts", LOOP + "{{ m.content | map(attribute='text') | join('') }}" + END),
    "macro": (
        "parts",
        "{% macro show(x) %}{% for c in x %}" + SHOW + END + "{% endmacro %}" + LOOP + "{{ show(m.content) }}" + END,
    ),
    "either": ("any", LOOP + IF_STRING + SHOW + END + "{% endif %}" + END),
    "either in a macro": (
        "any",
        "{% macro show(x) %}{% if x is string %}{{ x }}{% else %}{% for c in x %}" + SHOW + END + "{% endif %}{% endmacro %}"
        + LOOP + "{{ show(m.content) | trim }}" + END,
    ),
    "either, but a system text": (
        "any",
        "{% for m in messages %}{% if m.role == 'system' %}[system]{{ m.content | trim }}{% else %}[{{ m.role }}]"
        + IF_STRING + SHOW + END + "{% endif %}{% endif %}" + END,
    ),
}  # fmt: skip
TEXTS = ["Be brief.", "What is\n this?", "A {thing}.", "And that?"]
ROLES = ["system", "user", "assistant", "user"]


@pytest.fixture(scope="module")
def tok(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


@pytest.mark.parametrize("name", SHAPES)
def test_every_text_reaches_the_prompt_of_every_template(tok, name):
    reads, template = SHAPES[name]
    assert load_template(template).reads.content == reads
    want = "".join(f"[{role}]{text}" for role, text in zip(ROLES, TEXTS, strict=True))
    for parts in range(16):
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if parts >> i & 1 else text}
            for i, (role, text) in enumerate(zip(ROLES, TEXTS, strict=True))
        ]
        chat = render_chat(messages, template, tok)
        assert chat.text == want
        assert [text for text, written in chat.segments if not written] == TEXTS


def test_several_texts_for_a_template_of_strings(tok):
    content = [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]
    assert render_chat([{"role": "user", "content": content}], SHAPES["trimmed"][1], tok).text == "[user]One\ntwo"


@pytest.mark.parametrize("name", SHAPES)
def test_items_in_every_template(tok, name):
    reads, template = SHAPES[name]
    content = [{"type": "image", "image": b"x"}, {"type": "text", "text": "What?"}]
    messages = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, {"role": "user", "content": content}]
    if name == "first part":
        with pytest.raises(InputError, match="the chat template"):
            render_chat(messages, template, tok)
        return
    chat = render_chat(messages, template, tok, placeholders={"image": "<image>"})
    between = "\n" if reads == "string" else ""
    image = "" if name == "mapped" else "<image>"  # the missing placeholder is refused later
    assert chat.text == f"[system]Be brief.[user]{image}{between}What?"
    assert [text for text, written in chat.segments if not written and text.strip()] == ["Be brief.", f"{between}What?"]
    if reads == "string":
        with pytest.raises(InputError, match=r"message 1: the chat template reads texts only.*image"):
            render_chat(messages, template, tok)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role != 'user' %}{{ m.content }}{% endif %}{% endfor %}",
        "{{ messages | length }}",
        "{{ messages[0].content[:4] }}{{ messages[1].content }}",
        "{% for m in messages %}{{ m.content | string | length }}{% endfor %}",
    ],
)
def test_a_rendering_that_lacks_a_text_is_refused(tok, template):
    messages = [{"role": "user", "content": "What is this?"}, {"role": "assistant", "content": "x"}]
    with pytest.raises(
        InputError, match=r"message 0: the chat template leaves out or changes its text; .* chat_template"
    ) as caught:
        render_chat(messages, template, tok)
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_input", "messages[0]")


def test_what_templates_may_leave_out(tok):
    template = (
        "{% for m in messages %}{{ (m.content.split('</think>')[-1] | replace('/no_think', '') | replace('<image>', '') | trim)"
        " if m.role != 'tool' else (m.content | tojson) }}\n{% endfor %}"
    )
    messages = [
        {"role": "system", "content": "Be /no_think brief."},
        {"role": "user", "content": "<image>\nWhat is in /usr/bin?  "},
        {"role": "assistant", "content": "<think>Hm.</think>\nMuch."},
        {"role": "tool", "content": 'A "line"\nand é'},
    ]
    want = 'Be  brief.\nWhat is in /usr/bin?\nMuch.\n"A \\"line\\"\\nand é"\n'
    assert render_chat(messages, template, tok).text == want


CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
PAIRS = '"{{ k }}": {{ v | tojson }}'
AS_OBJECT = {
    "tojson": CALLS + "{{ c.function.name }}({{ c.function.arguments | tojson }})" + END + END,
    "items": CALLS
    + "{{ c.function.name }}({{ '{' }}{% for k, v in c['function']['arguments'] | items %}"
    + PAIRS
    + "{% endfor %}{{ '}' }})"
    + END
    + END,
    "method": CALLS
    + "{% set f = c.function %}{% set a = f.arguments %}{{ f.name }}({{ '{' }}{% for k, v in a.items() %}"
    + PAIRS
    + "{% endfor %}{{ '}' }})"
    + END
    + END,
    "either": CALLS
    + "{{ c.function.name }}({% if c.function.arguments is string %}{{ c.function.arguments }}"
    + "{% else %}{{ c.function.arguments | tojson }}{% endif %})"
    + END
    + END,
    "text": CALLS + "{{ c['function']['name'] + '(' + c['function']['arguments'] + ')' }}" + END + END,
    "printed": CALLS + "{{ c.function.name }}({{ c.function.arguments }})" + END + END,
}


@pytest.mark.parametrize("name", AS_OBJECT)
def test_arguments_of_tool_calls_are_encoded_once(tok, name):
    arguments = {"city": "Köln <|im_end|>"}
    for given in (arguments, json.dumps(arguments, ensure_ascii=False)):
        call = {"type": "function", "id": "1", "function": {"name": "look", "arguments": given}}
        messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        chat = render_chat(messages, AS_OBJECT[name], tok)
        assert chat.text == 'look({"city": "Köln <|im_end|>"})'
        assert not any(map(tok.is_special_token, tok.encode_pieces(chat.segments)))
        assert call["function"]["arguments"] == given


def test_a_whole_tool_call_as_json(tok):
    template = "{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}"
    for given, want in (('{"a": 1}', '{"a": 1}'), ("", "{}"), ({"a": 1}, '{"a": 1}')):
        messages = [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": given}]}]
        assert render_chat(messages, template, tok).text == f'[{{"name": "f", "arguments": {want}}}]'
    for wrong in ("{'a': 1}", "[" * 100_000):
        messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": wrong}}]}]
        with pytest.raises(InputError, match="message 0: the arguments of a tool call are not JSON") as caught:
            render_chat(messages, template, tok)
        assert len(str(caught.value)) < 200
        assert caught.value.info.param == "messages[0].tool_calls[0]"


def test_tools_and_calls_that_the_template_leaves_out_are_refused(tok):
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]}]
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(InputError, match="message 1: the chat template leaves out its call of 'look'") as caught:
        render_chat(messages, plain, tok)
    assert caught.value.info.param == "messages[1]"
    with pytest.raises(InputError, match="the chat template takes no tools; leave them out") as caught:
        render_chat(messages[:1], plain, tok, tools=[{"function": {"name": "look"}}])
    assert caught.value.info.param == "tools"
    assert render_chat(messages[:1], plain, tok, tools=[]).text == "What?"
    reading = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    )
    assert render_chat(messages, reading, tok, tools=[{"name": "look"}]).text.count("look") == 2
