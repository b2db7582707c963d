"""BLIP-2's prompts: placeholders come before the text's first token; the questions of a chat."""

from __future__ import annotations

from pathlib import Path

import pytest
from family import load_rows, make_media, save
from oracle import small_tokenizer
from sensorium import LLM, SamplingParams
from sensorium.models.families.blip2.processing import Blip2ProcessingInfo
from sensorium.processors.files import ProcessorFiles

TOK = small_tokenizer(["<bos>", "<image>"])
BOS, IMAGE = (TOK.token_to_id(text) for text in ("<bos>", "<image>"))


@pytest.mark.parametrize(
    ("ids", "images", "want"),
    [
        ([BOS, 5, 6], 0, [BOS, 5, 6]),
        ([BOS, 5, 6], 2, [IMAGE, IMAGE, BOS, 5, 6]),
        ([BOS, IMAGE, IMAGE, 5], 2, [IMAGE, IMAGE, BOS, 5]),
        ([BOS, IMAGE], 1, [IMAGE, BOS]),
        ([IMAGE, BOS, 5], 1, [IMAGE, BOS, 5]),
        ([BOS, 5, IMAGE, 6], 1, [BOS, 5, IMAGE, 6]),
    ],
)
def test_placeholders_are_before_the_first_token(ids: list[int], images: int, want: list[int]) -> None:
    config = {"text_config": {"vocab_size": TOK.get_vocab_size()}, "num_query_tokens": 6, "image_token_index": IMAGE}
    info = Blip2ProcessingInfo(ProcessorFiles(config, {"size": {"height": 56, "width": 56}}))
    assert list(info.preprocess_prompt(ids, {"image": images} if images else {})) == want


def test_a_chat_asks_questions_about_an_image(tmp_path: Path) -> None:
    llm = LLM(str(save(load_rows()["blip2"], tmp_path)), max_model_len=256)
    image = {"type": "image", "image": make_media("image", (60, 90), 0)}
    texts = ("Which city is this?", "Singapore.", "Why?")
    contents = [[image, {"type": "text", "text": texts[0]}], texts[1], texts[2]]
    messages = [{"role": role, "content": part} for role, part in zip(("user", "assistant", "user"), contents, strict=True)]
    (output,) = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)
    words = llm.get_tokenizer()
    image_token = words.encode("<image>", add_special_tokens=False)[0]
    ids = list(output.prompt_token_ids)
    assert ids[:6] == [image_token] * 6
    assert words.decode(ids[6:]).endswith("Question: Which city is this? Answer: Singapore. Question: Why? Answer:")
