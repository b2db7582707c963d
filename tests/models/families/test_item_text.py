"""Prompts whose items have text of their own take the oracle's tokens, whatever flags the tokenizer's added tokens have."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from family import Family, Question, load_oracle, make_media, one_thread
from oracle import load_processor
from parity import ROWS, LoadedModels
from sensorium.engine.frontend.input_processor import InputProcessor
from sensorium.engine.frontend.media import MultiModalSettings
from sensorium.engine.model_files import load_model_files
from sensorium.engine.setup.resolve import load_processing
from sensorium.processors.text.tokenizer import Tokenizer
from vocabularies import change_added_tokens

VARIANTS: dict[str, tuple[dict[str, bool], tuple[str, ...]]] = {
    "special": ({}, ()),
    "not special": ({"special": False}, ()),
    "normalised": ({"special": False, "normalized": True}, ()),
    "lstrip": ({"lstrip": True}, ()),
    "rstrip": ({"rstrip": True}, ()),
    "both": ({"lstrip": True, "rstrip": True}, ()),
    "more tokens": ({}, ("TILE_1", "TILE_GLOBAL", "Frame1", "seconds", "0.5", "\n\n")),
}
TEXTS = ("{0}", "a{0}b", "a {0} b", "a\n{0}\nb", "a  {0}\n\n b", "{0}{1}", "x {0}\n{1} y", "{0} and {1}: c")
FAMILIES = [
    row
    for row in ROWS.values()
    if row.load is load_oracle and any(text for text in row.placeholders.values()) and "kimi" not in row.name
]  # the placeholder of Kimi's row is a token of the test, which the published processor finds as text


@pytest.mark.sampled
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in FAMILIES])
def test_ids_are_the_oracles(row: Family, variant: str, loaded: LoadedModels, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(loaded.folder(row.name), folder)
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("this tokenizer has no added tokens with flags")
    change_added_tokens(folder, *VARIANTS[variant])
    tokenizer, processor = Tokenizer(folder), load_processor(folder)
    info = load_processing(load_model_files(folder), {}, tokenizer)
    inputs = InputProcessor(info, tokenizer, MultiModalSettings(dtype=torch.float32), 1 << 20)
    compared = 0
    for modality, placeholder in row.placeholders.items():
        for number, text in enumerate(TEXTS):
            count = 1 + ("{1}" in text)
            media = [make_media(modality, row.sizes[modality][0], 10 * number + index) for index in range(count)]
            question = Question(row, text.format(placeholder, placeholder), {modality: media})
            expected = ids_of(question, processor)
            if expected is None:
                continue
            with one_thread():
                assert list(inputs.process(question.ours).token_ids) == expected, question.text
            compared += 1
    assert compared >= 4


def ids_of(question: Question, processor: Any) -> list[int] | None:
    """Return the oracle's tokens; None if it takes one item per prompt, or does not find its own placeholders."""
    try:
        ids: list[int] = question.theirs(processor)["input_ids"][0].tolist()
    except (ValueError, IndexError, RuntimeError):
        return None
    return ids
