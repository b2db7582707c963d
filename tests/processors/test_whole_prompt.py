"""Whole prompts with interleaved images and videos, from messages to expanded ids, equal the published processor's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracle import CHAT_TEMPLATE, load_processor
from sensorium.engine.frontend.media import MultiModalProcessor, MultiModalSettings
from sensorium.models.families.qwen2_vl.processing import Qwen25VLProcessingInfo
from sensorium.processors.files import find_template, read_preprocessors
from sensorium.processors.spans import lay_out
from sensorium.processors.text.chat import render_chat
from sensorium.processors.text.tokenizer import Tokenizer

RNG = np.random.default_rng(0)
PICTURES = [RNG.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in ((60, 90), (112, 56), (200, 30))]
CLIPS = [RNG.integers(0, 256, (n, 60, 90, 3), dtype=np.uint8) for n in (2, 5)]


def text(words: str) -> dict:
    return {"type": "text", "text": words}


CONTENTS = {
    "text only": [text("Hello, who are you?")],
    "one picture": [PICTURES[0], text("What is it?")],
    "several pictures": [PICTURES[0], PICTURES[1], text("Compare."), PICTURES[2]],
    "a clip": [text("Before. "), CLIPS[1], text("What moves?")],
    "interleaved": [CLIPS[0], PICTURES[1], text("and"), CLIPS[1], PICTURES[2]],
}


def part(value: object) -> dict:
    if isinstance(value, dict):
        return value
    kind = "image" if np.ndim(value) == 3 else "video"
    return {"type": kind, kind: value}


@pytest.mark.parametrize("name", CONTENTS)
def test_ids_equal_the_published_processor(checkpoint: Path, name: str):
    parts = [part(value) for value in CONTENTS[name]]
    oracle = load_processor(checkpoint)
    bare = [{"type": p["type"]} if p["type"] != "text" else p for p in parts]
    rendered = oracle.apply_chat_template([{"role": "user", "content": bare}], add_generation_prompt=True, tokenize=False)
    want = oracle(
        text=[rendered],
        images=[p["image"] for p in parts if p["type"] == "image"] or None,
        videos=[p["video"] for p in parts if p["type"] == "video"] or None,
    )["input_ids"][0]

    tokenizer, template = Tokenizer(checkpoint), find_template(checkpoint)
    assert template == CHAT_TEMPLATE
    media = MultiModalProcessor(Qwen25VLProcessingInfo(read_preprocessors(checkpoint)), MultiModalSettings())
    placeholder_ids = {name: tokenizer.token_to_id(f"<|{name}_pad|>") for name in ("image", "video")}
    chat = render_chat([{"role": "user", "content": parts}], template, tokenizer)
    assert chat.text == rendered
    placeholders = {}
    for item in media.open(chat.multi_modal_data, {}, {}, None):
        placeholders.setdefault(item.source.modality, []).append(item.spans)
    for ids in (tokenizer.encode_pieces(chat.segments), want):  # with placeholders, and already expanded
        got, ranges = lay_out(ids, placeholders, placeholder_ids).expand()
        assert list(got) == list(want)
        for kind, placed in ranges.items():
            assert all(got[i] == placeholder_ids[kind] for (r,) in placed for i in range(r.offset, r.end))
