"""Thinkers beyond the parity suite: whole checkpoints with a talker."""

from __future__ import annotations

import json
import shutil

import family
import pytest
import torch
from safetensors.torch import load_file, save_file
from sensorium import LLM, SamplingParams
from sensorium.mm.errors import ConfigError
from sensorium.models.thinker import thinker_config, with_thinker_prefix
from sensorium.models.weights import rename

WHOLE = {"qwen2_5_omni": ("Qwen2_5OmniModel", "token2wav"), "qwen3_omni": ("Qwen3OmniMoeForConditionalGeneration", "code2wav")}


def speaking(folder, target, architecture, voice):
    """Copy the checkpoint as it is published: the thinker nested, with tensors of the talker."""
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text())
    whole = {"architectures": [architecture], "thinker_config": config, "talker_config": {"vocab_size": 9}}
    (target / "config.json").write_text(json.dumps(whole))
    tensors = {f"thinker.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors |= {f"{part}.model.norm.weight": torch.ones(2) for part in ("talker", voice)}
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize("name", WHOLE)
def test_a_checkpoint_that_also_speaks(name, tmp_path):
    row = family.load_rows()[name]
    plain = family.save(row, tmp_path / "plain")
    question = family.ask(row, "a")
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    answers = []
    for folder in (plain, speaking(plain, tmp_path / "whole", *WHOLE[name])):
        llm = LLM(folder, max_model_len=512, max_num_seqs=2, device="cpu")
        answers.append(llm.generate(question.ours, params, use_tqdm=False)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


def test_the_part_that_a_thinker_is_made_from():
    text = {"tie_word_embeddings": True, "eps": 2}
    made = thinker_config({"thinker_config": {"text_config": text}}, text_config={"eps": 1, "theta": 3})
    assert made["text_config"] == {"tie_word_embeddings": None, "eps": 2, "theta": 3}
    assert made["tie_word_embeddings"] is False
    assert thinker_config({"text_config": text, "tie_word_embeddings": True}, text_config={})["tie_word_embeddings"] is True
    with pytest.raises(ConfigError, match=r"audio_config in config\.json must be an object"):
        thinker_config({"text_config": text}, text_config={}, audio_config={})


def test_names_below_the_thinker():
    prefixes = with_thinker_prefix((("model.", "language_model."),))
    names = ("model.norm.weight", "thinker.model.norm.weight", "thinker.visual.x", "visual.x")
    assert [rename(name, prefixes) for name in names] == ["language_model.norm.weight"] * 2 + ["visual.x"] * 2
