"""The AuT encoder's row counts and configs; the parity suite checks its results."""

from __future__ import annotations

import pytest
import torch
from sensorium.callers.errors import ConfigError
from sensorium.models.audio.aut import aut_spec
from sensorium.models.families.qwen3_asr.model import AUDIO, Qwen3ASR

TEXT = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_scaling": {"mrope_section": [2, 3, 3]}}


@pytest.mark.parametrize(
    ("frames", "rows"), [(1, 1), (8, 1), (9, 2), (50, 7), (99, 13), (100, 13), (101, 14), (200, 26), (300, 39), (3000, 390)]
)
def test_rows_of_an_item(frames: int, rows: int) -> None:
    spec = aut_spec(AUDIO)
    assert spec.rows(frames) == rows
    assert sum(spec.windows(frames)) == rows
    assert all(window == 104 for window in spec.windows(frames)[:-1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"encoder_attention_heads": 7}, "d_model 1024 is not a multiple of encoder_attention_heads 7"),
        ({"n_window_infer": 150}, "n_window_infer 150 of the audio config is not a multiple of 100"),
        ({"activation_function": "prelu"}, "parameters of its own"),
        ({"n_window": 0}, "n_window in config.json is 0"),
    ],
)
def test_bad_configs_are_named(change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        aut_spec(AUDIO | change)


def test_the_published_layout_is_nested() -> None:
    """The published config nests the thinker; positions have three axes."""
    config = {"thinker_config": {"text_config": TEXT, "audio_config": {"output_dim": 64, "d_model": 64}}}
    model = Qwen3ASR(config, torch.float16, torch.device("meta"))
    assert (model.rope_axes, model.vocab_size, model.audio_tower.spec.channels) == (3, 300, 480)
    assert model.spec.tied
    with pytest.raises(ConfigError, match=r"audio_config in config\.json must be an object"):
        Qwen3ASR({"thinker_config": {"text_config": TEXT}}, torch.float16, torch.device("meta"))
    with pytest.raises(ConfigError, match=r"output_dim 3584 of audio_config in config\.json is not hidden_size 64"):
        Qwen3ASR({"text_config": TEXT, "audio_config": {"d_model": 64}}, torch.float16, torch.device("meta"))
