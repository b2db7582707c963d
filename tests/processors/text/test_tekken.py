"""Prompts of checkpoints with a tekken.json: token by token those of mistral-common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from oracle import small_tekken
from PIL import Image
from sensorium.callers.errors import InputError
from sensorium.processors.files import find_template
from sensorium.processors.text.chat import render_chat
from sensorium.processors.text.tokenizer import Tokenizer

IMAGE = {"type": "image", "image": Image.new("RGB", (32, 16))}
TEXT = {"type": "text", "text": "What is\nhere? "}
TALKS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello, you"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " spaces "}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": [IMAGE, TEXT]},
    ],
    [{"role": "user", "content": [TEXT, IMAGE]}],
    [{"role": "user", "content": [IMAGE, TEXT, IMAGE]}],
]


def folder_of(tmp_path: Path, version: str) -> Path:
    (tmp_path / "tekken.json").write_text(json.dumps(small_tekken(version)))
    return tmp_path


def published(folder: Path, messages: list[dict[str, Any]]) -> list[int]:
    """Return mistral-common's ids, with the tokens of each image replaced by one placeholder."""
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    talk = [
        message | {"content": [{"type": "image", "image": part["image"]} if "image" in part else part for part in content]}
        if isinstance(content := message["content"], list)
        else message
        for message in messages
    ]
    oracle = MistralTokenizer.from_file(folder / "tekken.json")
    tokens = oracle.encode_chat_completion(ChatCompletionRequest(messages=talk)).tokens
    img, end = 10, 13
    return [img if token == end else token for token in tokens if token != img]


@pytest.mark.parametrize("version", ["v3", "v7", "v11", "v13"])
@pytest.mark.parametrize("talk", range(len(TALKS)))
def test_a_prompt_is_that_of_mistral_common(tmp_path, version, talk):
    folder, messages = folder_of(tmp_path, version), TALKS[talk]
    tokenizer, template = Tokenizer(folder), find_template(folder)
    assert template is not None
    rendered = render_chat(messages, template, tokenizer)
    assert tokenizer.encode_pieces(rendered.segments) == published(folder, messages)


def test_unsupported_messages_are_refused(tmp_path):
    folder = folder_of(tmp_path, "v7")
    tokenizer, template = Tokenizer(folder), find_template(folder)
    with pytest.raises(InputError, match="tools"):
        render_chat(TALKS[0], template, tokenizer, tools=[{"type": "function"}])
    with pytest.raises(InputError, match="role tool"):
        render_chat([*TALKS[0], {"role": "tool", "content": "x"}], template, tokenizer)


def test_folders_without_tekken_have_no_template(tmp_path):
    assert find_template(tmp_path) is None
