"""Conversations of DeepSeek-VL2, whose checkpoints have no chat template."""

from __future__ import annotations

from pathlib import Path

import family
from sensorium import LLM, SamplingParams


def test_conversations_are_written_as_published(tmp_path: Path) -> None:
    llm = LLM(family.save(family.load_rows()["deepseek_vl2"], tmp_path / "made"), max_model_len=512)
    content = [{"type": "image", "image": family.make_media("image", (60, 60), 0)}, {"type": "text", "text": "What?"}]
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": content}]
    (output,) = llm.chat([{"role": "system", "content": "Short."}, *said], SamplingParams(max_tokens=1), use_tqdm=False)
    turns = "Short.\n\n<|User|>: Hi\n\n<|Assistant|>: Yes<eos><|User|>: <image>\nWhat?\n\n<|Assistant|>:"
    assert (output.error, output.prompt) == (None, turns)
