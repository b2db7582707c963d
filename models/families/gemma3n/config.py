"""Reads the sizes of `audio_config` that both the model and the processing need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....callers.errors import ConfigError, short_repr
from ....checkpoints.config import positive_int

Pairs = tuple[tuple[int, int], tuple[int, int]]
AUDIO: dict[str, Any] = {
    "hidden_size": 1536, "vocab_size": 128, "vocab_offset": 262272, "rms_norm_eps": 1e-6, "gradient_clipping": 1e10,
    "conf_attention_chunk_size": 12, "conf_attention_context_left": 13, "conf_attention_context_right": 0,
    "conf_attention_logit_cap": 50.0, "conf_num_attention_heads": 8, "conf_num_hidden_layers": 12, "conf_conv_kernel_size": 5,
    "conf_reduction_factor": 4, "conf_residual_weight": 0.5, "sscp_conv_channel_size": (128, 32),
    "sscp_conv_group_norm_eps": 1e-3, "input_feat_size": 128, "sscp_conv_kernel_size": ((3, 3), (3, 3)),
    "sscp_conv_stride_size": ((2, 2), (2, 2)),
}  # fmt: skip


def frames_per_row(audio: Mapping[str, Any]) -> int:
    """Return how many mel frames of audio make a row; `audio`: the raw `audio_config`."""
    strides = conv_sizes(audio, "sscp_conv_stride_size")
    return strides[0][0] * strides[1][0] * positive_int(audio, "conf_reduction_factor")


def conv_sizes(audio: Mapping[str, Any], key: str) -> Pairs:
    """Return two positive numbers for each of two convolutions."""
    match audio[key]:
        case [[int(a), int(b)], [int(c), int(d)]] if min(a, b, c, d) > 0:
            return (a, b), (c, d)
    raise ConfigError(f"{key} of audio_config is {short_repr(audio[key])}; it must be two pairs of positive integers")
