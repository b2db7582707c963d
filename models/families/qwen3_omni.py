"""Qwen3-Omni's thinker (arXiv 2509.17765): Qwen3-VL with experts, and the AuT encoder for audio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..audio.aut import AutEncoder, aut_spec
from ..audio.mel_encoder import LARGE
from ..layers.connectors import ProjectorSpec
from ..native_model import NativeModel
from ..thinker import TALKER_PREFIXES, check_output_dim, thinker_config, with_thinker_prefix
from .qwen3_vl import PREFIXES, STACK, qwen3_specs

# defaults that the published config.json leaves out
AUDIO = {**LARGE, "n_window": 50, "n_window_infer": 800, "downsample_hidden_size": 480, "output_dim": 3584}
TEXT = {
    "vocab_size": 3584, "hidden_size": 2048, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "head_dim": None, "max_position_embeddings": 32768, "rope_theta": 1e6, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip
_MERGER = ProjectorSpec(0, 0, ("mlp.0", "mlp.2"), norm="ln_q")  # names of its norm and layers


class Qwen3Omni(NativeModel):
    """A model of images, videos and audio."""

    prefixes = with_thinker_prefix(
        (
            ("model.audio_tower.", "audio_tower."),
            ("model.visual.merger_list.", "deepstack_mergers."),
            ("visual.merger_list.", "deepstack_mergers."),
            *PREFIXES,
            ("model.", "language_model."),
        )
    )
    ignored = TALKER_PREFIXES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = thinker_config(config, vision_config={}, text_config=TEXT, audio_config=AUDIO)
        decoder, tower, mergers = qwen3_specs(config, replace(STACK, router={"normalise": True}), _MERGER)
        audio = replace(aut_spec(config["audio_config"]), pad_short=False)
        check_output_dim(audio.out, decoder.hidden_size)
        super().__init__(decoder, tower, mergers, dtype, device, AutEncoder(audio, dtype, device))
