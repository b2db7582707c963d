"""Chat rendering equals transformers' where text is harmless; where it is not, it stays text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import CHAT_TEMPLATE, SPECIALS, load_processor, token_ids
from PIL import Image
from sensorium.mm.errors import CheckpointError, InputError
from sensorium.processors.chat import encode_segments, render_chat
from sensorium.processors.files import find_template, read_preprocessors
from sensorium.processors.text import Tokenizer

TOOLS_TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }}\n{%- endif %}\n"
    "{%- for m in messages %}{% if loop.index0 > 9 %}{% break %}{% endif %}\n"
    "    {%- if m.role == 'x' %}{{ raise_exception('no') }}{% endif %}<|im_start|>{{ m.role }}\n"
    "{% generation %}{{ (m.content.split('</think>')[-1] | trim) if m.content is string else '' }}{% endgeneration %}"
    "<|im_end|>\n{% endfor %}{{ eos_token }}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "look <up>", "parameters": {"é": [1, None]}}}


@pytest.fixture(scope="module")
def tok(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path):
    return load_processor(checkpoint).tokenizer


def test_equals_transformers_on_harmless_messages(tok, oracle):
    picture = Image.new("RGB", (30, 30))
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "image", "image": picture}, {"type": "text", "text": "\n\nWhat < is > this? 🚀 "}],
        },
        {"role": "assistant", "content": " A thing. "},
        {
            "role": "user",
            "content": [{"type": "video", "video": np.zeros((2, 8, 8, 3), np.uint8)}, {"type": "text", "text": "<"}],
        },
    ]
    bare = json.loads(json.dumps(messages, default=lambda _: 0))
    for add in (True, False):
        got = render_chat(messages, CHAT_TEMPLATE, tok, add_generation_prompt=add)
        want = oracle.apply_chat_template(bare, chat_template=CHAT_TEMPLATE, add_generation_prompt=add, tokenize=False)
        assert got.text == want
        assert encode_segments(got.segments, tok) == oracle(want, add_special_tokens=False)["input_ids"]
    assert [modality for modality, _ in got.media] == ["image", "video"]
    assert got.multi_modal_data["image"] == [picture]


@given(st.lists(st.text(alphabet="<|>im_end\n ab👩", max_size=12), min_size=1, max_size=4), st.booleans())
def test_equals_transformers_on_any_text_without_literals(tok, oracle, texts, tools):
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]
    given_tools = [TOOL] if tools else None
    got = render_chat(messages, TOOLS_TEMPLATE, tok, tools=given_tools)
    want = oracle.apply_chat_template(
        messages, tools=given_tools, chat_template=TOOLS_TEMPLATE, add_generation_prompt=True, tokenize=False
    )
    assert got.text == want
    if not any(special in text for special in SPECIALS for text in texts):
        assert encode_segments(got.segments, tok) == oracle(want, add_special_tokens=False)["input_ids"]


@given(st.lists(st.one_of(st.sampled_from(SPECIALS), st.sampled_from(["<|im_", "end|>", "x", " "])), min_size=1, max_size=6))
def test_user_text_never_becomes_control(tok, pieces):
    control = encode_segments(render_chat([{"role": "user", "content": "x"}], CHAT_TEMPLATE, tok).segments, tok)
    parts = [{"type": "text", "text": piece} for piece in pieces]
    for content in ("".join(pieces), parts):
        chat = render_chat([{"role": "user", "content": content}], CHAT_TEMPLATE, tok)
        ids = encode_segments(chat.segments, tok)
        assert [i for i in ids if tok.is_special(i)] == [i for i in control if tok.is_special(i)]
        assert "".join(pieces) in tok.decode(ids, skip_special_tokens=False)


def test_a_spelled_media_slot_is_no_slot(tok):
    parts = [{"type": "text", "text": "<|image_pad|>"}, {"type": "image", "image": b"..."}]
    ids = encode_segments(render_chat([{"role": "user", "content": parts}], CHAT_TEMPLATE, tok).segments, tok)
    assert ids.count(token_ids()["<|image_pad|>"]) == 1


def test_tools_are_untrusted_too(tok):
    tool = {"type": "function", "function": {"name": "a<|im_end|>b"}}
    ids = encode_segments(render_chat([], TOOLS_TEMPLATE, tok, tools=[tool]).segments, tok)
    assert tok.decode(ids, skip_special_tokens=False).count("<|im_end|>") == 2
    assert ids.count(token_ids()["<|im_end|>"]) == 1  # the template's own eos_token


def test_variables_reach_the_template_and_are_untrusted(tok):
    chat = render_chat([], "{{ mood }}{{ deep.x }}", tok, mood="<|im_end|>", deep={"x": 1})
    assert chat.text == "<|im_end|>1"
    assert not any(map(tok.is_special, encode_segments(chat.segments, tok)))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "image_url", "image_url": "data:image/png;base64,AA"}], 'is an object {"url"'),
        ([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}], "data: URLs only"),
        ([{"type": "image", "image": "/etc/passwd"}], "data: URLs only"),
        ([{"type": "sound", "sound": 1}], "known ones are text, image, image_url, video, video_url"),
        (["hello"], "unknown part type 'hello'"),
        ([{"type": "text"}], "has a field 'text'"),
        ([{"type": "text", "text": 3}], "text is a string, not a int"),
        (7, "text or a list of parts, not a int"),
    ],
)
def test_bad_parts_are_named(tok, content, text):
    with pytest.raises(InputError, match=text) as error:
        render_chat([{"role": "user", "content": "ok"}, {"role": "user", "content": content}], CHAT_TEMPLATE, tok)
    assert str(error.value).startswith("message 1")


def test_data_urls_pass(tok):
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert render_chat([{"role": "user", "content": [url]}], CHAT_TEMPLATE, tok).media == (
        ("image", "data:image/png;base64,AA=="),
    )


def test_roles_and_templates_that_refuse(tok):
    with pytest.raises(InputError, match="a role is expected"):
        render_chat([{"role": "im_end|><|im_start", "content": ""}], CHAT_TEMPLATE, tok)
    with pytest.raises(InputError, match="refuses the messages: no more"):
        render_chat([], "{{ raise_exception('no more') }}", tok)
    with pytest.raises(InputError, match="refuses"):
        render_chat([{"role": "user", "content": "x"}], "{{ messages.append(1) }}", tok)
    with pytest.raises(CheckpointError, match="cannot be compiled"):
        render_chat([], "{% if %}", tok)


def test_template_places(tmp_path):
    assert find_template(tmp_path) is None
    several = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert find_template(tmp_path) == "d"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "j"}))
    assert find_template(tmp_path) == "j"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert find_template(tmp_path) == "file"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"chat_template\.json is not valid JSON"):
        find_template(tmp_path)


def test_preprocessor_places(tmp_path):
    assert read_preprocessors(tmp_path) == ({}, {})
    (tmp_path / "preprocessor_config.json").write_text('{"a": 1}')
    assert read_preprocessors(tmp_path) == ({"a": 1}, {})
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"a": 2}, "video_processor": {"b": 3}}')
    assert read_preprocessors(tmp_path) == ({"a": 2}, {"b": 3})
