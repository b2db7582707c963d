"""FireRedASR2-LLM: a conformer, pairs of rows projected, Qwen2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int
from ...decoder_model import DecoderModel
from ...interface import StepLimits
from ...layers.connectors import Projector, ProjectorSpec, projector_bytes
from ...memory_formulas import SMALL
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from .encoder import REDUCTION, FireRedEncoder, fire_red_encoder_bytes, fire_red_encoder_spec, num_rows


class FireRedAsr2(DecoderModel):
    """A model of audio. Rows that fill no group at the end of an item are dropped."""

    prefixes = (("llm.model.", "language_model."), ("llm.lm_head.", "head.lm_head."))
    ignored = ("encoder.positional_encoding.",)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(decoder_spec(config, STACKS["qwen2"]), dtype, device)
        audio = config.get("audio_encoder_conf")
        if not isinstance(audio, Mapping):
            raise ConfigError("config.json lacks audio_encoder_conf, an object with the sizes of the encoder")
        self.encoder = FireRedEncoder(fire_red_encoder_spec(audio), dtype, device)
        group, width = positive_int({"encoder_downsample_rate": 2, **config}, "encoder_downsample_rate"), self.hidden_size
        layers = ("linear1", "linear2")
        projector = ProjectorSpec(self.encoder.spec.width, width, layers, group=group, inner=width, act="relu")
        self.encoder_projector = Projector(projector, dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        frames, group = tensors["audio_frames"].tolist(), self.encoder_projector.spec.group
        lengths = [num_rows(n) for n in frames]
        counts = [n // group for n in lengths]
        items = self.encoder(tensors["input_features"], frames).split(lengths)
        whole = torch.cat([rows[: count * group] for rows, count in zip(items, counts, strict=True)])
        del items
        return list(self.encoder_projector(whole).split(counts))

    def _encoder_rows(self, rows: int) -> int:
        """Return the most rows of the encoder for an item of `rows` rows: some are dropped at its end."""
        return (rows + 1) * self.encoder_projector.spec.group - 1

    def input_bytes(self, modality: str, rows: int) -> int:
        return self._encoder_rows(rows) * REDUCTION * self.encoder.spec.mels * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        spec, projector, count = self.encoder.spec, self.encoder_projector.spec, self._encoder_rows(rows)
        states = count * spec.width * self.dtype.itemsize
        joined = states + rows * projector.group * projector_bytes(projector, 1, count, self.dtype, limits)
        encoded = fire_red_encoder_bytes(spec, count, self.dtype, limits)
        return max(encoded, SMALL + self.input_bytes(modality, rows) + joined)
