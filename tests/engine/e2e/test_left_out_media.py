"""Media that a chat template leaves out: the error names the message, its role and what to do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import InputError
from sensorium.processors.text.left_out import left_out_error

TINY = Path(__file__).parents[3] / "assets" / "tiny-vl"
IMAGE = np.zeros((32, 32, 3), np.uint8)
VIDEO = np.zeros((4, 32, 32, 3), np.uint8)
SHORT = SamplingParams(max_tokens=1, temperature=0)
USER_ONLY = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{ part.text }}
{%- elif message.role == 'user' and part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif message.role == 'user' and loop.first -%}<|vision_start|><|video_pad|><|vision_end|>{%- endif -%}
{%- endfor -%}{%- endif -%}<|im_end|>
{%- endfor -%}"""


@pytest.fixture(scope="module")
def llm():
    with LLM(TINY, max_model_len=512, warm_up=False, chat_template=USER_ONLY) as llm:
        yield llm


def message(role, *parts, text="hello"):
    return {"role": role, "content": [*parts, {"type": "text", "text": text}]}


def image():
    return {"type": "image", "image": IMAGE}


def video():
    return {"type": "video", "video": VIDEO}


@pytest.mark.parametrize("role", ["system", "assistant", "tool", "developer"])
@pytest.mark.parametrize("part", [image, video])
def test_the_error_names_the_role(llm, role, part):
    kind = part.__name__
    conversations = [
        ([message(role, part()), message("user")], 0),
        ([message("user", part(), text="first"), message(role, part()), message("user", part())], 1),
        ([message("user"), message(role, text="one"), {"role": role, "content": [part()]}], 2),
    ]
    for messages, number in conversations:
        (found,) = llm.chat([messages], SHORT, use_tqdm=False)
        items = {"image": "images", "video": "videos"}.get(kind, kind)
        assert f"drops {items} in messages with the role {role}" in found.error.message
        assert found.error.param == f"messages[{number}].content[0]"
        assert "chat" not in found.error.message.replace("chat template", "")


def test_media_of_users_are_shown(llm):
    (found,) = llm.chat([[message("system"), message("user", image()), message("user", video(), image())]], SHORT)
    assert found.error is None


def test_an_item_that_is_left_out_of_a_users_message(llm):
    """The second video of a message: there is no other role to suggest, and the first one is shown."""
    (found,) = llm.chat([[message("user", video(), video())]], SHORT, use_tqdm=False)
    said = "the chat template writes fewer placeholders than the messages have items (2 of video)"
    assert found.error.message == f"{said}; pass another chat_template"
    with pytest.raises(InputError, match="or ask with chat"):  # a prompt without a template
        llm.generate({"prompt": "a", "multi_modal_data": {"image": IMAGE}}, SHORT, on_error="raise")


def test_a_template_that_shows_no_sound():
    def render(messages):
        return "|".join(one["content"] if isinstance(one["content"], str) else "x" for one in messages if one["role"] == "user")

    sound = {"type": "input_audio", "input_audio": {}}
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": [sound]}, {"role": "user", "content": [sound]}]
    media = [("audio", "messages[1].content[0]"), ("audio", "messages[2].content[0]")]
    found = left_out_error(messages, "audio", media, render(messages), render)
    assert "the role tool; put it into" in found.info.message
    assert found.info.param == "messages[1].content[0]"
    only = [{"role": "user", "content": [sound, "text"]}]
    found = left_out_error(only, "audio", [("audio", "messages[0].content[0]")], "x", render)
    assert "role user; leave it out" in found.info.message


def test_over_http():
    from http_server import TINY as MODEL
    from http_server import image_url, serving

    part = {"type": "image_url", "image_url": {"url": image_url()}}
    with serving(MODEL, "tiny-vl", max_model_len=512, chat_template=USER_ONLY) as (url, _):
        import httpx

        for path, key, kind in (
            ("chat/completions", "messages", part),
            ("responses", "input", {"type": "input_image", "image_url": image_url(), "detail": "auto"}),
        ):
            body = {key: [{"role": "user", "content": "a"}, {"role": "assistant", "content": [kind]}]}
            error = httpx.post(f"{url}/v1/{path}", json=body, timeout=240).json()["error"]
            assert error["param"] == f"{key}[1].content[0]"
            assert "role assistant; put it into" in error["message"]
