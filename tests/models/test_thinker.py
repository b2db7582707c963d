"""Thinkers beyond the parity suite: whole checkpoints with a talker."""

from __future__ import annotations

import json
import shutil

import family
import pytest
import torch
from safetensors.torch import load_file, save_file
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import ConfigError
from sensorium.models.thinker import thinker_config, with_thinker_prefix
from sensorium.models.weights import rename

WHOLE = {"qwen2_5_omni": ("Qwen2_5OmniModel", "token2wav"), "qwen3_omni": ("Qwen3OmniMoeForConditionalGeneration", "code2wav")}

TEMPLATE = (  # of the published template, what an audio item needs
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}{% if c['type'] == 'audio' %}"
    "<|audio_start|><|audio_pad|><|audio_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def whole(folder, target, architecture, voices=(), **config):
    """Copy the checkpoint as it is published: the thinker nested, perhaps with tensors of the talker."""
    shutil.copytree(folder, target)
    config |= {"architectures": [architecture], "thinker_config": json.loads((folder / "config.json").read_text())}
    (target / "config.json").write_text(json.dumps(config))
    tensors = {f"thinker.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors |= {f"{part}.model.norm.weight": torch.ones(2) for part in voices}
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize("name", WHOLE)
def test_a_checkpoint_that_also_speaks(name, tmp_path):
    row = family.load_rows()[name]
    plain = family.save(row, tmp_path / "plain")
    question = family.ask(row, "a")
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    answers = []
    architecture, voice = WHOLE[name]
    speaking = whole(plain, tmp_path / "whole", architecture, ("talker", voice), talker_config={"vocab_size": 9})
    for folder in (plain, speaking):
        llm = LLM(folder, max_model_len=512, max_num_seqs=2, device="cpu")
        answers.append(llm.generate(question.ours, params, use_tqdm=False)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


def test_a_captioner_takes_one_audio_item_and_no_text(tmp_path):
    """Qwen3-Omni-30B-A3B-Captioner has the config of the whole model without a talker; its conversations are one audio item."""
    row, params = family.load_rows()["qwen3_omni"], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    plain = family.save(row, tmp_path / "plain")
    folder = whole(plain, tmp_path / "captioner", WHOLE[row.name][0], model_type="qwen3_omni_moe", enable_audio_output=False)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    audio = (family.make_media("audio", (30_080,), 0), family.RATE)
    prompt = f"<|im_start|>user\n{row.placeholders['audio']}<|im_end|>\n<|im_start|>assistant\n"
    options = {"max_model_len": 512, "max_num_seqs": 2, "device": "cpu"}
    asked = LLM(plain, **options).generate({"prompt": prompt, "multi_modal_data": {"audio": audio}}, params, use_tqdm=False)
    messages = [{"role": "user", "content": [{"type": "audio", "audio": audio}]}]
    for limits in ({}, {"limit_mm_per_prompt": {"image": 0, "video": 0}}):
        heard = LLM(folder, **options, **limits).chat(messages, params, use_tqdm=False)
        assert (heard[0].error, heard[0].prompt) == (None, prompt)
        assert heard[0].prompt_token_ids == asked[0].prompt_token_ids
        assert heard[0].outputs[0].token_ids == asked[0].outputs[0].token_ids


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
