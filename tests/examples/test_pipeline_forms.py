"""Messages in the forms of transformers' pipelines, as scripts for "image-text-to-text" write them."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from sensorium import LLM, SamplingParams
from sensorium.cli.ocr import SHIPPED_MODEL

LINE = SHIPPED_MODEL.parent / "media" / "line1.png"
TEXT = {"type": "text", "text": "Read the text."}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(SHIPPED_MODEL), max_model_len=512, media={"allowed_local_media_path": str(LINE.parent)})


def test_a_chat_of_image_text_to_text(llm: LLM) -> None:
    """The same answer for every form of image, with contents as parts in all roles, one conversation or a batch of them."""
    images: list[dict[str, Any]] = [
        {"type": "image", "url": str(LINE)},
        {"type": "image", "path": str(LINE)},
        {"type": "image", "image": str(LINE)},
        {"type": "image", "image": Image.open(LINE)},
        {"type": "image", "base64": b64encode(LINE.read_bytes()).decode()},
        {"type": "image", "url": LINE.as_uri()},
        {"type": "image", "url": None, "image": LINE},
    ]
    system = {"role": "system", "content": [{"type": "text", "text": "You are brief."}]}
    chats = [[system, {"role": "user", "content": [image, TEXT]}] for image in images]
    params = SamplingParams(temperature=0.0, max_tokens=16)
    outputs = [*llm.chat(chats, params, use_tqdm=False), *llm.chat(chats[0], params, use_tqdm=False)]
    assert [output.error for output in outputs] == [None] * 8
    assert len({output.outputs[0].text for output in outputs}) == 1
    begun = [*chats[0], {"role": "assistant", "content": [{"type": "text", "text": "DM"}]}]
    (rest,) = llm.chat(begun, params, add_generation_prompt=False, continue_final_message=True, use_tqdm=False)
    assert "DM" + rest.outputs[0].text == outputs[0].outputs[0].text == "DMTYZ"


def test_arguments_of_pipelines_have_hints(llm: LLM) -> None:
    chat = [{"role": "user", "content": [TEXT]}]
    for name, said in (
        ("images", "put each item into its message"),
        ("max_new_tokens", r"SamplingParams\(max_tokens"),
        ("generate_kwargs", "did you mean sampling_params"),
        ("return_full_text", "the known ones are"),
    ):
        with pytest.raises(ValueError, match=said):
            llm.chat(chat, **{name: [Path("a.png")]})
