"""Qwen3-ForcedAligner's classes of tokens against transformers, in its layout and in the publisher's."""

from __future__ import annotations

import json
from pathlib import Path

import family
import pytest
import torch
from oracle import ensure_torchvision, randomise, save_checkpoint
from safetensors.torch import load_file, save_file
from sensorium import LLM, PoolingParams
from sensorium.callers.errors import ConfigError
from torch import Tensor

ensure_torchvision()
import transformers as tf  # noqa: E402

LABELS = 7
PARTS = {
    "score.": "thinker.lm_head.",
    "model.audio_tower.": "thinker.audio_tower.",
    "model.multi_modal_projector.linear_1.": "thinker.audio_tower.proj1.",
    "model.multi_modal_projector.linear_2.": "thinker.audio_tower.proj2.",
    "model.language_model.": "thinker.model.",
}
AUDIO = "<|audio_start|><|audio_pad|><|audio_end|>"
CLIPS = [(family.make_media("audio", (size,), size), 16_000) for size in (30_000, 9000)]
TEXTS = [f"{AUDIO}return<|endoftext|><|endoftext|>it<|endoftext|><|endoftext|>", f"{AUDIO}def<|endoftext|><|endoftext|>"]


def save(folder: Path, bias: bool) -> list[Tensor]:
    """Save a random checkpoint; return the oracle's logits `[tokens, classes]` of each prompt."""
    built, processor = family.load_rows()["qwen3_asr"].build(0)
    config = built.config
    config.num_labels, config.token_classification_bias = LABELS, bias
    model = tf.Qwen3ASRForTokenClassification(config).eval()
    randomise(model, 0)
    save_checkpoint(folder, model, processor)
    inputs = [
        processor(text=[text], audio=[clip], sampling_rate=16_000, return_tensors="pt")
        for text, (clip, _) in zip(TEXTS, CLIPS, strict=True)
    ]
    with torch.inference_mode():
        return [model(**one).logits[0] for one in inputs]


def publish(folder: Path) -> None:
    """Write the checkpoint's names and config as its publisher does."""
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    renamed = {}
    for name, tensor in load_file(file).items():
        old = next(prefix for prefix in PARTS if name.startswith(prefix))
        renamed[PARTS[old] + name.removeprefix(old)] = tensor
    save_file(renamed, file)
    thinker = {key: value for key, value in config.items() if key not in ("architectures", "id2label", "label2id")}
    thinker |= {"model_type": "qwen3_forced_aligner", "classify_num": LABELS}
    whole = {"architectures": ["Qwen3ASRForConditionalGeneration"], "model_type": "qwen3_asr", "thinker_config": thinker}
    (folder / "config.json").write_text(json.dumps(whole))


@pytest.mark.parametrize("layout", ["transformers", "publisher", "bias"])
def test_classes_of_tokens(layout: str, tmp_path: Path) -> None:
    expected = save(tmp_path, bias=layout == "bias")
    if layout == "publisher":
        publish(tmp_path)
    prompts = [{"prompt": text, "multi_modal_data": {"audio": clip}} for text, clip in zip(TEXTS, CLIPS, strict=True)]
    params = PoolingParams(task="token_classify", use_activation=False)
    with LLM(tmp_path, max_num_seqs=4, max_num_batched_tokens=32) as llm:
        raw = llm.encode(prompts, params, use_tqdm=False)
        (alone,) = llm.encode(prompts[:1], pooling_task="token_classify", use_tqdm=False)
        with pytest.raises(ConfigError):
            llm.classify("a")
    for one, logits in zip(raw, expected, strict=True):
        assert logits.std() > 0.3
        torch.testing.assert_close(one.outputs.data, logits, rtol=1e-3, atol=2e-4 * max(1.0, float(logits.std())))
    torch.testing.assert_close(alone.outputs.data, expected[0].softmax(-1), rtol=1e-3, atol=2e-4)
