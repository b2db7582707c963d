"""Llama-Nemotron-Embed-VL and its reranker: SigLIP, pixel shuffle, and a Llama whose tokens all see each other.

Source: vLLM's nemotron_vl.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import pooling_mode, require
from ....mm.geometry import pixel_shuffle_side
from ...decoder_model import TEXT_PREFIXES
from ...layers.classification import ClassificationHead
from ...layers.connectors import ProjectorSpec
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from ...tower_model import TowerModel
from ...vision.encoders import encoder_spec
from ..text_only.model import ClassificationModel

_POOLINGS = {"avg": "mean", "last": "lasttoken"}  # the publisher's name -> sentence-transformers'


class NemotronEmbed(TowerModel):
    """Llama-Nemotron-Embed-VL: SigLIP, pixel shuffle and a Llama whose tokens all see each other, as an embedder."""

    prefixes: Sequence[tuple[str, str]] = (
        ("vision_model.vision_model.", "tower."),
        ("vision_model.", "tower."),
        ("mlp1.", "projector."),
        *TEXT_PREFIXES,
    )
    ignored: Sequence[str] = ("tower.head.", "head.")

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        if config.get("ps_version", "v2") != "v2":
            raise ConfigError("ps_version in config.json is not v2, so images would be transposed; use a newer checkpoint")
        text, merge = require(config, "llm_config"), pixel_shuffle_side(config)
        decoder = decoder_spec({**config, "text_config": {**text, "model_type": "llama", "is_causal": True}}, STACKS["llama"])
        tower = encoder_spec(require(config, "vision_config"), "siglip_vision_model", post_norm=True, merge=merge)
        projector = ProjectorSpec(
            width=tower.width,
            out=decoder.hidden_size,
            layers=("1", "3"),
            group=merge**2,
            inner=decoder.hidden_size,
            norm="0",
            joined_norm=True,
        )
        super().__init__(decoder, tower, projector, dtype, device)
        pooling = config.get("pooling") or text.get("pooling", "avg")
        self.head, self.pooling = None, pooling_mode({"pooling_mode": _POOLINGS.get(pooling, pooling)}, "mean")

    def choose_head(self, headers: Mapping[str, Tensor]) -> None:
        """Do nothing: a stored language model head is not used."""


class NemotronRerank(ClassificationModel, NemotronEmbed):
    """Llama-Nemotron-Rerank-VL: a linear layer over the pooled state of a prompt."""

    prefixes = (
        ("score.", "classifier.out_proj."),
        *((f"model.{stored}", name) for stored, name in NemotronEmbed.prefixes),
        *NemotronEmbed.prefixes,
    )
    keep_encoders = NemotronEmbed.keep_encoders

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        labels = {key: value for key, value in require(config, "llm_config").items() if key in ("num_labels", "id2label")}
        self.classifier = ClassificationHead({**labels, **config}, self.hidden_size, False, dtype, device)
