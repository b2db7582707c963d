"""Qwen3-Omni's code-to-wave model against transformers', in one part and in many."""

from __future__ import annotations

import pytest
import talkers
import torch
from oracle import randomise
from sensorium.mm.errors import ConfigError
from sensorium.models.audio.code2wav import Code2Wav, code2wav_spec
from sensorium.models.weights import fill

CONFIG = talkers.WAVE | {"rms_norm_eps": 1e-5}


@pytest.mark.parametrize("count", [1, 25, 301, 640])
def test_samples_are_transformers(count):
    """It begins anew every 300 frames, and drops the samples that depend on later frames."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

    oracle = Qwen3OmniMoeCode2Wav._from_config(Qwen3OmniMoeCode2WavConfig(**CONFIG)).eval()
    randomise(oracle, count)
    oracle.decoder[-1].conv.weight.data *= 0.3  # samples stay in [-1, 1]
    model = Code2Wav(code2wav_spec(CONFIG), torch.device("cpu"))
    fill(model, oracle.state_dict().items(), ())
    codes = torch.randint(0, CONFIG["codebook_size"], (count, 4), generator=torch.Generator().manual_seed(count))
    with torch.inference_mode():
        whole = oracle.chunked_decode(codes.T[None])[0, 0]
        samples = torch.cat(list(model.parts(codes.tolist())))
    assert samples.std() > 0.01
    torch.testing.assert_close(samples, whole, rtol=0, atol=1e-4)


def test_config():
    with pytest.raises(ConfigError, match="rope type 'yarn' of code2wav_config"):
        code2wav_spec(CONFIG | {"rope_parameters": {"rope_type": "yarn"}})
    with pytest.raises(ConfigError, match="do not fit together"):
        code2wav_spec(CONFIG | {"decoder_dim": 18})
