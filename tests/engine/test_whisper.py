"""Whisper through the whole engine: greedy tokens against transformers, with the real tiny.en."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from oracle import load_oracle
from sensorium import LLM, SamplingParams
from sensorium.engine.config import load_model_files
from sensorium.engine.loader import load_processing
from sensorium.mm.registry import find
from sensorium.mm.types import AudioItem

CLIPS = ("jfk", "jfk_late", "lj001_0001", "lj001_0002", "lj001_0003", "lj001_0005", "lj001_0007")
CLIPS += ("espeak_en", "espeak_de", "silence_10s", "noise_10s")


def features(folder: Path, samples: Any) -> torch.Tensor:
    files = load_model_files(folder)
    info = load_processing(find(files.architecture), files, {})
    kwargs, geometry = info.process(AudioItem(torch.from_numpy(samples), 16_000), torch.float32)
    assert geometry.num_embeds == 1500
    return kwargs["input_features"].data


@pytest.mark.shared
def test_every_clip_is_heard_as_by_transformers(shared_data: Path) -> None:
    """All clips in one batch; the oracle reads our features, which are its own to 1e-5."""
    folder = shared_data / "whisper-tiny.en"
    sounds = [soundfile.read(shared_data / "speech" / f"{name}.flac", dtype="float32")[0] for name in CLIPS]
    model, processor = load_oracle(folder)
    llm = LLM(folder, dtype="float32", max_num_seqs=8)
    prompt = "<|startoftranscript|><|notimestamps|>"
    prompts = [{"prompt": prompt, "multi_modal_data": {"audio": (sound, 16_000)}} for sound in sounds]
    rules = llm.default_params.logits_processors
    params = SamplingParams(temperature=0.0, max_tokens=None, logits_processors=rules)
    for name, sound, output in zip(CLIPS, sounds, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert output.error is None
        mine = features(folder, sound)
        theirs = processor.feature_extractor(sound, sampling_rate=16_000, return_tensors="pt").input_features[0].T
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
        with torch.inference_mode():
            ids = model.generate(mine.T[None])[0].tolist()
        assert [token for token in ids if token < 50_256] == [t for t in output.outputs[0].token_ids if t < 50_256], name
