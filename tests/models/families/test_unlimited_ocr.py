"""Unlimited-OCR beside the parity suite: the publisher's config, refused drafts, and images that are not cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family import load_rows, save
from oracle import fast_tokenizer
from sensorium import LLM
from sensorium.callers.errors import ConfigError
from sensorium.mm.types import MediaHeader
from sensorium.models.families.unlimited_ocr.model import UnlimitedOcr
from sensorium.models.families.unlimited_ocr.processing import UnlimitedOcrProcessingInfo
from sensorium.pipelines.ocr_prompts import PROMPTS
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.text.chat import render_chat
from sensorium.processors.text.tokenizer import Tokenizer

TEXT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96,
    "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "vocab_size": 200,
    "first_k_dense_replace": 1, "use_mla": False, "kv_lora_rank": None,
}  # fmt: skip


@pytest.mark.parametrize(("window", "expected"), [(96, 96), (None, 128)])
def test_the_publishers_config_has_the_window_beside_the_decoder(window: int | None, expected: int) -> None:
    config = {"language_config": TEXT, **({} if window is None else {"sliding_window": window})}
    model = UnlimitedOcr(config, torch.float32, torch.device("meta"))
    assert [spec.answer_window for spec in model.cache_specs] == [expected] * 2
    assert [spec.window for spec in model.cache_specs] == [None] * 2


def test_drafted_tokens_are_refused(tmp_path: Path) -> None:
    folder = str(save(load_rows()["unlimited_ocr"], tmp_path))
    with pytest.raises(ConfigError) as raised:
        LLM(folder, max_model_len=256, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    assert (raised.value.info.param, raised.value.info.code) == ("speculative_config", "unsupported")


def test_an_image_that_is_not_cut_is_as_large_as_a_whole_one() -> None:
    config = {"text_config": {"vocab_size": 129280}}
    rows = [
        UnlimitedOcrProcessingInfo(ProcessorFiles(config, {}), options).geometry(MediaHeader("image", 1000, 700)).num_embeds
        for options in ({"crop_to_patches": False}, {})
    ]
    assert rows == [16 * 17 + 1, 16 * 17 + 1 + 30 * (2 * 10 + 1)]


def test_the_prompt_follows_its_image_without_a_line_break(tmp_path: Path) -> None:
    fast_tokenizer(["<image>", "<bos>"], bos_token="<bos>").save_pretrained(tmp_path)
    parts = [{"type": "image", "image": b"page"}, {"type": "text", "text": PROMPTS["unlimited-parsing"].text}]
    chat = render_chat([{"role": "user", "content": parts}], UnlimitedOcrProcessingInfo.chat_template, Tokenizer(tmp_path))
    assert chat.text == "<bos><image>document parsing."
