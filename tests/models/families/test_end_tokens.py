"""Tokens that end the turns of models whose published EOS ids leave them out."""

from __future__ import annotations

import json
from pathlib import Path

import family
import pytest
from sensorium import LLM


@pytest.mark.parametrize("name", ["got_ocr2", "aria"])
def test_the_token_after_a_turn_ends_an_answer(name: str, tmp_path: Path) -> None:
    folder = family.save(family.load_rows()[name], tmp_path / "made")
    for path in (folder / "generation_config.json", folder / "config.json"):
        if path.is_file():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 3}))
    llm = LLM(folder, max_model_len=2048)
    assert llm.engine.eos_token_ids == (3, llm.get_tokenizer().token_to_id("<|im_end|>"))
    assert llm.engine.loop._eos == llm.engine.eos_token_ids
