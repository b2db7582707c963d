"""Qwen3-Omni's code-to-wave model against transformers', in one part and in many."""

from __future__ import annotations

import pytest
import talkers
import torch
from oracle import randomise
from sensorium.callers.errors import ConfigError
from sensorium.models.audio.code2wav import Code2Wav, code2wav_spec
from sensorium.models.audio.flow_matching import FlowDecoder, flow_spec
from sensorium.models.weights import fill

CONFIG = talkers.WAVE | {"rms_norm_eps": 1e-5}


TRAINED = {"factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e3}
ROPES = [
    {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e3},
    {"rope_type": "yarn", **TRAINED},
    {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED},
]


@pytest.mark.parametrize(("count", "rope"), [*((count, None) for count in (1, 25, 301, 640)), *((40, rope) for rope in ROPES)])
def test_samples_are_transformers(count, rope):
    """It begins anew every 300 frames, and drops the samples that depend on later frames."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

    config = CONFIG | ({"rope_parameters": rope} if rope else {})
    oracle = Qwen3OmniMoeCode2Wav._from_config(Qwen3OmniMoeCode2WavConfig(**config)).eval()
    randomise(oracle, count)
    oracle.decoder[-1].conv.weight.data *= 0.3  # samples stay in [-1, 1]
    model = Code2Wav(code2wav_spec(config), torch.device("cpu"))
    fill(model, oracle.state_dict().items(), ())
    codes = torch.randint(0, CONFIG["codebook_size"], (count, 4), generator=torch.Generator().manual_seed(count))
    with torch.inference_mode():
        whole = oracle.chunked_decode(codes.T[None])[0, 0]
        samples = torch.cat(list(model.parts(codes.tolist())))
    assert samples.std() > 0.01
    torch.testing.assert_close(samples, whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e3}, *ROPES])
def test_rotations_of_the_flow_are_transformers(rope):
    """Qwen2.5-Omni's."""
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniDiTRotaryEmbedding

    config = talkers.FLOW | {"rope_parameters": rope}
    oracle = Qwen2_5OmniDiTRotaryEmbedding(Qwen2_5OmniDiTConfig(**config))
    whole = Qwen2_5OmniDiTConfig(**config).to_dict() | config
    decoder = FlowDecoder(flow_spec(whole), torch.device("cpu"))
    ours, theirs = decoder.rotation(3, 50, torch.device("cpu")), oracle(torch.zeros(1), torch.arange(3, 50)[None])
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine[:, 0], other[0, :, : mine.shape[-1]], rtol=0, atol=1e-6)


def test_config():
    with pytest.raises(ConfigError, match="rope type 'dynamic'"):
        code2wav_spec(CONFIG | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}})
    with pytest.raises(ConfigError, match="do not fit together"):
        code2wav_spec(CONFIG | {"decoder_dim": 18})
