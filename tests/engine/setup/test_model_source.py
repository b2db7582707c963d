"""Encoders of modalities that no prompt may have are not built and not loaded."""

from __future__ import annotations

import family
import pytest
from safetensors.torch import load_file, save_file
from sensorium import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


SIZES = {"image": (28, 28), "video": (2, 28, 28), "audio": (400,)}


def answer(folder, **limits):
    """Return the tokens of a text prompt and the number of layers, after items over the limit were refused."""
    with LLM(folder, dtype="float32", max_model_len=256, limit_mm_per_prompt=limits) as llm:
        (output,) = llm.generate("def f(x): return it", GREEDY, use_tqdm=False)
        for modality in limits:
            data = {modality: family.make_media(modality, SIZES[modality], 0)}
            (refused,) = llm.generate({"prompt": "x", "multi_modal_data": data}, GREEDY, use_tqdm=False)
            assert refused.error.param == "limit_mm_per_prompt"
        model = llm.engine.loop.core.executor.runner.model
        return output.outputs[0].token_ids, sum(1 for _ in model.modules())


@pytest.mark.parametrize(
    ("name", "limits", "removed"),
    [
        ("llava", {"image": 0}, ("vision_tower", "multi_modal_projector")),
        ("qwen2_vl", {"image": 0, "video": 0}, ("visual",)),
        ("ernie4_5_vl", {"image": 0, "video": 0}, ("vision_model", "resampler_model")),
        ("qwen2_5_omni", {"audio": 0}, ("audio_tower",)),
        ("qwen2_5_omni", {"image": 0, "video": 0}, ("visual",)),
    ],
)
def test_encoders_that_no_prompt_uses_are_not_loaded(tmp_path, name, limits, removed):
    folder = family.save(family.load_rows()[name], tmp_path)
    full, layers = answer(folder)
    for file in folder.glob("*.safetensors"):  # a checkpoint without the encoder's weights is enough
        kept = {key: value for key, value in load_file(file).items() if not any(part in key.split(".") for part in removed)}
        assert len(kept) < len(load_file(file))
        save_file(kept, file, {"format": "pt"})
    text, fewer = answer(folder, **limits)
    assert text == full
    assert fewer < layers
