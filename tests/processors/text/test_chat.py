"""Chat rendering equals transformers' where text is harmless; where it is not, it stays text."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import measured
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import CHAT_TEMPLATE, SPECIALS, load_processor, token_ids
from PIL import Image
from sensorium.callers import pacing
from sensorium.callers.errors import CheckpointError, InputError
from sensorium.mm.types import Media
from sensorium.processors.text.chat import render_chat
from sensorium.processors.text.rendering import plain_copy
from sensorium.processors.text.tokenizer import Tokenizer
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Fast

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
        assert tok.encode_pieces(got.segments) == oracle(want, add_special_tokens=False)["input_ids"]
    assert [modality for modality, _ in got.media] == ["image", "video"]
    assert got.multi_modal_data["image"] == [Media(picture)]


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
        assert tok.encode_pieces(got.segments) == oracle(want, add_special_tokens=False)["input_ids"]


@given(st.lists(st.one_of(st.sampled_from(SPECIALS), st.sampled_from(["<|im_", "end|>", "x", " "])), min_size=1, max_size=6))
def test_user_text_never_becomes_control(tok, pieces):
    control = tok.encode_pieces(render_chat([{"role": "user", "content": "x"}], CHAT_TEMPLATE, tok).segments)
    parts = [{"type": "text", "text": piece} for piece in pieces]
    for content in ("".join(pieces), parts):
        chat = render_chat([{"role": "user", "content": content}], CHAT_TEMPLATE, tok)
        ids = tok.encode_pieces(chat.segments)
        assert [i for i in ids if tok.is_special_token(i)] == [i for i in control if tok.is_special_token(i)]
        assert "".join(pieces) in tok.decode(ids, skip_special_tokens=False)


def test_placeholder_text_of_a_user_is_no_placeholder(tok):
    parts = [{"type": "text", "text": "<|image_pad|>"}, {"type": "image", "image": b"..."}]
    ids = tok.encode_pieces(render_chat([{"role": "user", "content": parts}], CHAT_TEMPLATE, tok).segments)
    assert ids.count(token_ids()["<|image_pad|>"]) == 1


def test_tools_are_untrusted_too(tok):
    tool = {"type": "function", "function": {"name": "a<|im_end|>b"}}
    ids = tok.encode_pieces(render_chat([], TOOLS_TEMPLATE, tok, tools=[tool]).segments)
    assert tok.decode(ids, skip_special_tokens=False).count("<|im_end|>") == 2
    assert ids.count(token_ids()["<|im_end|>"]) == 1  # the template's own eos_token


def test_variables_reach_the_template_and_are_untrusted(tok):
    chat = render_chat([], "{{ mood }}{{ deep.x }}", tok, mood="<|im_end|>", deep={"x": 1})
    assert render_chat([], "{{ messages }}", tok, messages="x").text == "[]"
    assert chat.text == "<|im_end|>1"
    assert not any(map(tok.is_special_token, tok.encode_pieces(chat.segments)))


def test_a_special_token_of_one_character_stays_text(tmp_path):
    fast = Fast(models.BPE({c: i for i, c in enumerate("ab:")}, []))
    fast.add_special_tokens([AddedToken("@", special=True, normalized=False)])
    fast.save(str(tmp_path / "tokenizer.json"))
    tok = Tokenizer(tmp_path)
    chat = render_chat([{"role": "user", "content": "a@b"}], "{{ messages[0].content }}:@", tok)
    assert chat.text == "a@b:@"
    ids = tok.encode_pieces(chat.segments)
    assert ids == [*tok.encode("ab:"), tok.specials["@"]]  # the vocabulary has no other form of it


def test_fields_that_are_none_are_left_out_as_transformers_does(tok, oracle):
    template = "{% for m in messages %}{% if m.content is defined %}<{{ m.content }}>{% endif %}{{ m.calls }}{% endfor %}"
    messages = [{"role": "assistant", "content": None, "calls": "x"}, {"role": "user", "content": "", "calls": None}]
    want = oracle.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert render_chat(messages, template, tok).text == want == "x<>"


TRIMMED = "{% for m in messages %}<|im_start|>{{ m.content | trim }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize("text", ["It is", "It is ", " It is\n\n", "is <|", "a\n<", ""])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, TRIMMED])
def test_continue_final_message_equals_transformers(tok, oracle, text, template):
    for content in (text, [{"type": "text", "text": "Well."}, {"type": "text", "text": text}]):
        messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": content}]
        if template == TRIMMED and not isinstance(content, str):
            continue
        want = oracle.apply_chat_template(messages, chat_template=template, continue_final_message=True, tokenize=False)
        got = render_chat(messages, template, tok, add_generation_prompt=False, continue_final_message=True)
        assert got.text == want
        assert tok.encode_pieces(got.segments) == oracle(want, add_special_tokens=False)["input_ids"]


def test_text_of_a_continued_message_stays_text(tok):
    messages = [{"role": "assistant", "content": "a<|im_end|>b<|im_"}]
    chat = render_chat(messages, TRIMMED, tok, add_generation_prompt=False, continue_final_message=True)
    assert chat.text == "<|im_start|>a<|im_end|>b<|im_"
    assert sum(map(tok.is_special_token, tok.encode_pieces(chat.segments))) == 1


@pytest.mark.parametrize(
    ("messages", "options", "text"),
    [
        ([{"role": "user", "content": "x"}], {"add_generation_prompt": True}, "exclude each other"),
        ([], {}, "has no text to continue"),
        ([{"role": "assistant", "tool_calls": []}], {}, "has no text to continue"),
        ([{"role": "user", "content": [{"type": "image", "image": b""}]}], {}, "has no text to continue"),
        ([{"role": "system", "content": "x"}], {"template": "{{ messages | length }}"}, "leaves out or changes"),
        (
            [{"role": "user", "content": "aXb"}],
            {"template": "{{ messages[0].content.split('X')[-1] }}"},
            "leaves out or changes",
        ),
    ],
)
def test_messages_that_cannot_be_continued(tok, messages, options, text):
    options = {"add_generation_prompt": False, "template": CHAT_TEMPLATE, **options}
    with pytest.raises(InputError, match=text):
        render_chat(messages, tokenizer=tok, continue_final_message=True, **options)


def test_texts_that_cannot_fit_are_refused_before_they_are_rendered(tok):
    long = "<|im_end|> " * 1_000_000
    for content in (long, [{"type": "text", "text": long}, {"type": "image", "image": b""}]):
        refused = pytest.raises(InputError, match=r"at least .* tokens, but max_model_len is 4096; shorten them")
        with measured.allocating_at_most(1 << 20), refused:
            render_chat([{"role": "user", "content": content}], CHAT_TEMPLATE, tok, max_model_len=4096)
    messages = [{"role": "user", "content": "hello there " * 9}] * 7
    chat = render_chat(messages, CHAT_TEMPLATE, tok)
    most = len(tok.encode_pieces(chat.segments)) + 1
    assert render_chat(messages, CHAT_TEMPLATE, tok, max_model_len=most).text == chat.text


def test_audio_reaches_templates_that_ask_for_its_key(tok):
    template = (
        "{% for c in messages[0].content %}{% if 'audio' in c or 'audio_url' in c %}<audio>{% elif 'text' in c %}"
        "{{ c.text }}{% elif c['type'] == 'image' %}<image>{% endif %}{% endfor %}"
    )
    parts = [
        {"type": "audio_url", "audio_url": {"url": "http://x/y.wav"}},
        {"type": "text", "text": "and"},
        {"type": "image", "image": b"secret"},
        {"type": "audio", "audio": np.zeros(3)},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ]
    chat = render_chat([{"role": "user", "content": parts}], template, tok)
    assert chat.text == "<audio>and<image><audio><audio>"
    assert [modality for modality, _ in chat.media] == ["audio", "image", "audio", "audio"]
    assert [len(values) for values in chat.multi_modal_data.values()] == [3, 1]
    seen = render_chat([{"role": "user", "content": parts}], "{{ messages }}", tok).text
    assert "secret" not in seen
    assert "http" not in seen


def test_the_published_template_of_qwen2_audio(tok, oracle):
    from transformers import Qwen2AudioProcessor

    template = Qwen2AudioProcessor.default_chat_template.fget(None)
    texts = ["What is that?", "Both < bark.", " And this? "]
    ours, theirs = [], []
    for text in texts:
        words = {"type": "text", "text": text}
        ours.append(
            {"role": "user", "content": [{"type": "audio", "audio": b"..."}, words, {"type": "audio", "audio": b"..."}]}
        )
        theirs.append(
            {"role": "user", "content": [{"type": "audio", "audio_url": "a"}, words, {"type": "audio", "audio_url": "b"}]}
        )
        for several in (ours, theirs):
            several.append({"role": "assistant", "content": "A dog."})
    chat = render_chat(ours, template, tok)
    want = oracle.apply_chat_template(theirs, chat_template=template, add_generation_prompt=True, tokenize=False)
    assert chat.text == want
    assert want.count("<|AUDIO|>") == len(chat.media) == 6
    assert tok.encode_pieces(chat.segments) == oracle(want, add_special_tokens=False)["input_ids"]


def test_only_plain_values_reach_the_template(tok):
    class Sly:
        def __str__(self):
            return "<|im_end|>"

    for value in (Sly(), b"<|im_end|>", {1, 2}):
        with pytest.raises(InputError, match=f"is a {type(value).__name__}; messages, tools"):
            render_chat([{"role": "user", "content": "x", "name": value}], CHAT_TEMPLATE, tok)
        with pytest.raises(InputError, match=f"is a {type(value).__name__}; messages, tools"):
            render_chat([], CHAT_TEMPLATE, tok, mood=value)


def test_endless_nesting_is_refused(tok):
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    for messages, tools in (([{"role": "user", "content": "x", "name": deep}], None), ([], deep)):
        with pytest.raises(InputError, match="nest at most 64 deep"):
            render_chat(messages, CHAT_TEMPLATE, tok, tools=tools)


@pytest.mark.parametrize("key", [(), (1, 2), b"x", frozenset()], ids=repr)
def test_keys_of_any_other_type_are_refused(tok, key):
    with pytest.raises(InputError, match=r"tools.*: keys must be strings or numbers"):
        render_chat([{"role": "user", "content": "x"}], CHAT_TEMPLATE, tok, tools=[{"function": {key: 1}}])


def test_roles_and_templates_that_refuse(tok):
    with pytest.raises(InputError, match="content and a role, one of"):
        render_chat([{"role": "im_end|><|im_start", "content": ""}], CHAT_TEMPLATE, tok)
    with pytest.raises(InputError, match="refuses the messages: no more"):
        render_chat([], "{{ raise_exception('no more') }}", tok)
    with pytest.raises(InputError, match="refuses"):
        render_chat([{"role": "user", "content": "x"}], "{{ messages.append(1) }}", tok)
    with pytest.raises(CheckpointError, match="cannot be compiled"):
        render_chat([], "{% if %}", tok)


def test_very_many_messages_parts_or_tools_are_refused_before_work_is_done_for_each(tok):
    many = 4 * 64 + 1
    text = {"type": "text", "text": ""}
    for messages, tools in (
        ([object()] * many, None),
        ([{"role": "user", "content": [text] * many}], None),
        ([{"role": "user", "content": "a"}], [TOOL] * many),
    ):
        with pytest.raises(InputError, match="max_model_len=64 allows 256 messages, parts and tools") as caught:
            render_chat(messages, TOOLS_TEMPLATE, tok, tools=tools, max_model_len=64)
        assert caught.value.info.code == "too_long"


def test_other_threads_run_while_many_values_are_copied(monkeypatch):
    clock, rests = itertools.count(), []
    monkeypatch.setattr(pacing.time, "perf_counter", lambda: next(clock) * pacing._WORK_SECONDS)
    monkeypatch.setattr(pacing.time, "sleep", rests.append)
    values = [{"a": 1}] * 9
    assert plain_copy(values, "x") == values
    assert len(rests) >= 9
