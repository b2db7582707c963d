"""Nemotron 3 Omni: Nemotron-Nano-VL with a FastConformer for audio.

Sources: transformers 5.23 and the published checkpoints' layout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....checkpoints.config import get_text_config, positive_int
from ...audio.fastconformer import FastConformer, fastconformer_bytes, fastconformer_spec
from ...interface import StepLimits
from ...layers.basic import Norm
from ...layers.connectors import Projector, ProjectorSpec, projector_bytes
from ..nemotron_vl.model import NemotronVL
from .config import publisher_config

_NORM = "vision_final_layernorm."
_CONVOLUTIONS = ("pointwise_conv1", "depthwise_conv", "pointwise_conv2")


class NemotronOmni(NemotronVL):
    """A model of images, videos and, if config.json has a `sound_config`, audio.

    If the decoder has layers for multi-token prediction, the rows of the image encoder are normed; not all checkpoints store
    the weights of this norm.
    """

    prefixes = (
        ("sound_encoder.encoder.", "audio."),
        ("sound_projection.", "audio_projector."),
        ("vision_projector.vision_final_layernorm.", _NORM),
        (_NORM, _NORM),
        *NemotronVL.prefixes,
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = publisher_config(config)
        super().__init__(config, dtype, device)
        tower = self.tower.spec
        self.norms_rows = bool(get_text_config(config).get("num_nextn_predict_layers"))
        self.vision_final_layernorm = Norm(tower.width, tower.eps, True, dtype, device) if self.norms_rows else None
        self.audio: FastConformer | None = None
        self.audio_projector: Projector | None = None
        sound = config.get("sound_config")
        if sound is not None:
            self._add_audio(sound, device)

    def _add_audio(self, sound: Mapping[str, Any], device: torch.device) -> None:
        self.audio = FastConformer(replace(fastconformer_spec(sound), padding_row=True), self.dtype, device)
        spec = self.audio.spec
        projector = ProjectorSpec(
            width=spec.width,
            out=self.hidden_size,
            layers=("linear1", "linear2"),
            inner=positive_int({"projection_hidden_size": 4096, **sound}, "projection_hidden_size"),
            act="relu2",
            bias=bool(sound.get("projection_bias", False)),
            norm="norm",
            rms=True,
        )
        self.audio_projector = Projector(projector, self.dtype, device)
        unused = ["feature_extractor.", *self.audio.unused]
        if not spec.conv_bias:  # published checkpoints store them even so
            unused += [f"layers.{i}.conv.{name}.bias" for i in range(spec.layers) for name in _CONVOLUTIONS]
        self.ignored = (*self.ignored, *(f"audio.{name}" for name in unused))

    def choose_head(self, headers: Mapping[str, Tensor]) -> None:
        super().choose_head(headers)
        if headers and not any(_NORM in name for name in headers):
            self.vision_final_layernorm = None

    def project(self, rows: Tensor) -> Tensor:
        if self.vision_final_layernorm is not None:
            rows = self.vision_final_layernorm(rows)
        elif self.norms_rows:
            rows = F.layer_norm(rows, rows.shape[1:], eps=self.tower.spec.eps)
        return super().project(rows)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        if modality != "audio":
            return super().embed_multimodal(modality, tensors)
        assert self.audio is not None
        assert self.audio_projector is not None
        frames = tensors["audio_frames"].tolist()
        rows = self.audio_projector(self.audio(tensors["input_features"], frames))
        return list(rows.split([self.audio.spec.num_rows(n) for n in frames]))

    def keep_encoders(self, modalities: Collection[str]) -> None:
        super().keep_encoders(modalities)
        if not modalities:
            return
        if self.audio is not None and "audio" not in modalities:
            self._remove("audio", "audio_projector")
        if not {*modalities} - {"audio"}:
            self._remove("tower", "projector", "vision_final_layernorm")

    def input_bytes(self, modality: str, rows: int) -> int:
        if modality != "audio":
            return super().input_bytes(modality, rows)
        assert self.audio is not None
        return rows * self.audio.spec.factor * self.audio.spec.mels * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        if modality != "audio":
            normed = self._all_rows(modality, rows) * self.tower.spec.merge**2 * self.tower.spec.width * self.dtype.itemsize
            return super().encoder_bytes(modality, rows, limits) + self.norms_rows * normed
        assert self.audio is not None
        assert self.audio_projector is not None
        encoder = fastconformer_bytes(self.audio.spec, rows, self.dtype, limits)
        per_row = self.audio.spec.width * self.dtype.itemsize
        per_row += projector_bytes(self.audio_projector.spec, 1, rows, self.dtype, limits)
        return max(encoder, self.input_bytes(modality, rows) + rows * per_row)
