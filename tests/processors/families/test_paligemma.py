"""PaliGemma's prompts: placeholders, BOS and the final newline are added where they are missing."""

from __future__ import annotations

import pytest
from oracle import small_tokenizer
from sensorium.callers.errors import ConfigError
from sensorium.models.families.paligemma.processing import PaliGemmaProcessingInfo
from sensorium.processors.files import ProcessorFiles

WORDS = small_tokenizer(["<bos>", "<image>"])
BOS, PLACEHOLDER = (WORDS.token_to_id(name) for name in ("<bos>", "<image>"))
SAY, LINE = WORDS.encode("say", add_special_tokens=False).ids, WORDS.encode("\n", add_special_tokens=False).ids


def info_of(side: int = 56) -> PaliGemmaProcessingInfo:
    config = {
        "image_token_index": PLACEHOLDER, "bos_token_id": BOS, "vision_config": {"image_size": 56, "patch_size": 14},
        "text_config": {"vocab_size": 640, "hidden_size": 64},
    }  # fmt: skip
    encode = lambda text: WORDS.encode(text, add_special_tokens=False).ids  # noqa: E731
    return PaliGemmaProcessingInfo(ProcessorFiles(config, {"size": {"height": side, "width": side}}, encode=encode))


@pytest.mark.parametrize("start", [[], [BOS]], ids=["plain", "with a start"])
@pytest.mark.parametrize("placeholders", [[], [PLACEHOLDER, PLACEHOLDER]], ids=["no placeholders", "placeholders"])
def test_placeholders_bos_and_newline_are_added_once(start: list[int], placeholders: list[int]) -> None:
    written = info_of().preprocess_prompt([*start, *placeholders, *SAY], {"image": 2})
    assert list(written) == [PLACEHOLDER, PLACEHOLDER, BOS, *SAY, *LINE]
    assert list(info_of().preprocess_prompt(written, {"image": 2})) == list(written)


def test_a_text_prompt_gets_bos_and_newline() -> None:
    assert list(info_of().preprocess_prompt(SAY, {})) == [BOS, *SAY, *LINE]


def test_a_size_that_is_not_the_towers_is_refused() -> None:
    with pytest.raises(ConfigError, match="image_size is 56 in vision_config"):
        info_of(70)
