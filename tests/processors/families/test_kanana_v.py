"""Kanana-1.5-v: conversations, text that is tokenised in parts, and configs that are refused."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
import torch
from sensorium.callers.errors import ConfigError
from sensorium.mm.types import MediaHeader
from sensorium.models.families.kanana_v.model import KananaV
from sensorium.models.families.kanana_v.processing import CHAT_TEMPLATE, KananaVProcessingInfo
from sensorium.processors.files import ProcessorFiles

VISION = {"embed_dim": 64, "depth": 2, "num_heads": 4, "mlp_ratio": 2}


def info_of(options: dict[str, Any] | None = None, **text: Any) -> KananaVProcessingInfo:
    def encode(written: str) -> list[int]:  # every text has the number of its characters, so that joined text shows
        return [len(written)] if written else []

    def decode(ids: Any) -> str:
        return "".join(TEXTS[token] for token in ids)

    files = ProcessorFiles(config={"text_config": text}, encode=encode, decode=decode, token_to_id={}.get)
    return KananaVProcessingInfo(files, options or {})


TEXTS = {128000: "", 1: "be kind\n\nHuman: ", 2: "<image>", 3: "\nHuman: what is it\nAI: "}


def test_parts_of_a_prompt_are_tokenised_by_themselves() -> None:
    """Roles are parts, and images; without an image, its text is text."""
    roles = len("\nHuman: "), len("what is it"), len("\nAI: ")
    ids = info_of().preprocess_prompt([128000, 1, 2, 3], {"image": 1})
    assert ids == [128000, len("be kind\n"), roles[0], 128002, *roles]
    assert info_of().preprocess_chat([128000, 2, 1], {"image": 1})[1] == 128002
    assert 128002 not in info_of().preprocess_prompt([128000, 1, 2, 3], {})


def test_a_conversation() -> None:
    """An image is a message of its own, as in the publisher's examples."""
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Really?"},
    ]
    words = jinja2.Environment().from_string(CHAT_TEMPLATE)
    text = words.render(messages=messages, bos_token="<s>", eos_token="</s>", add_generation_prompt=True)
    start, _, rest = text.partition("for me to process.\n")
    assert start.startswith("<s>The following is a conversation between a curious human and AI assistant. 당신은")
    assert rest == "Be kind.\nHuman: <image>\nHuman: What is it?\nAI: A cat.</s>\nHuman: Really?\nAI: "


@pytest.mark.parametrize(("size", "rows"), [((480, 640), 391), ((14, 20), 6), ((10, 1000), 100), ((4000, 3000), 1230)])
def test_rows(size: tuple[int, int], rows: int) -> None:
    assert info_of().geometry(MediaHeader("image", *size)).num_embeds == rows


@pytest.mark.parametrize("eos", [[1, 2], 128255, None])
def test_an_end_token_without_a_next_one_is_refused(eos: object) -> None:
    with pytest.raises(ConfigError):
        info_of(eos_token_id=eos)


@pytest.mark.parametrize("change", [
    {"projector_type": "mlp"}, {"pos_emb_size": 35}, {"encoder_hidden_size": 65}, {"merge_size": 4}, {"depth": 0},
    {"output_hidden_size": 32}, {"feature_layer_index": [0, 1]},
])  # fmt: skip
def test_other_projectors_are_refused(change: dict[str, Any]) -> None:
    text = {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    projector = {"output_hidden_size": 64, "hidden_size": 32, "pos_emb_size": 36, **change}
    config = {"vision_config": VISION, "projector_config": projector, "text_config": text}
    with pytest.raises(ConfigError):
        KananaV(config, torch.float32, torch.device("meta"))
