"""The base of models that encode audio in windows of fixed length, silence included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..callers.errors import ConfigError
from .audio.mel_encoder import LARGE, MelEncoder, MelEncoderSpec, mel_encoder_bytes
from .decoder_model import DecoderModel
from .interface import StepLimits
from .layers.connectors import Projector, ProjectorSpec, projector_bytes
from .text.spec import DecoderSpec

Section = dict[str, Any]
_GROUP = 4  # rows of the encoder per result row
AUDIO_PREFIXES = (
    ("model.audio_tower.", "audio_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)
"""Prefixes of encoder and projector in checkpoints of transformers 5; names without `model.` need none."""


def config_sections(config: Mapping[str, Any], text: Section) -> tuple[Section, Section]:
    """Return text_config with the defaults `text`, and audio_config with those of the largest Whisper."""
    parts = [config.get("text_config") or {}, config.get("audio_config") or {}]
    if not all(isinstance(part, Mapping) for part in parts):
        raise ConfigError("text_config and audio_config in config.json must be objects")
    return {**text, **parts[0]}, {**LARGE, **parts[1]}


def joined_projector(
    config: Mapping[str, Any], tower: MelEncoderSpec, out: int, inner: int, bias: bool = True, eps: float = 1e-5
) -> ProjectorSpec:
    """Return the spec of two layers over four joined rows. ConfigError if intermediate_size is not the width of four rows."""
    if tower.inner != _GROUP * tower.width:
        raise ConfigError(f"intermediate_size of audio_config is {tower.inner}; it must be {_GROUP} x {tower.width}")
    act, layers = config.get("projector_hidden_act", "gelu"), ("linear_1", "linear_2")
    return ProjectorSpec(tower.width, out, layers, group=_GROUP, inner=inner, act=act, bias=bias, eps=eps)


class WindowModel(DecoderModel):
    """A model that joins and projects the rows of an item's windows and cuts them to the item's number of rows.

    Reads the tensors of `processors.bases.windows`. Windows are encoded one at a time, so that long audio needs no more
    memory than short audio. `projector_class`: Projector, or a subclass.
    """

    projector_class: ClassVar[type[Projector]] = Projector

    def __init__(
        self, text: DecoderSpec, audio: MelEncoderSpec, projector: ProjectorSpec, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(text, dtype, device)
        if audio.positions % projector.group:
            raise ConfigError(f"audio_config has windows of {audio.positions} rows, not a multiple of {projector.group}")
        self.audio_tower = MelEncoder(audio, dtype, device)
        self.multi_modal_projector = self.projector_class(projector, dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        windows = list(tensors["input_features"].split(tensors["audio_frames"].tolist()))
        items = zip(tensors["audio_windows"].tolist(), tensors["audio_rows"].tolist(), strict=True)
        return [self._item_rows([windows.pop(0) for _ in range(count)], rows) for count, rows in items]

    def _item_rows(self, windows: list[Tensor], rows: int) -> Tensor:
        group, frames, projected = self.multi_modal_projector.spec.group, 2 * self.audio_tower.config.positions, []
        for window in windows:
            silence = window[-1:].expand(frames - len(window), -1)
            # the encoder's rows are not named, so that they are freed before the next window is encoded
            projected.append(
                self.multi_modal_projector(self.audio_tower(torch.cat((window, silence)), [frames])[0][: rows * group])
            )
            rows -= len(projected[-1])
        return torch.cat(projected)

    def input_bytes(self, modality: str, rows: int) -> int:
        """Count two frames per encoder row, of which the last group may have fewer, and one frame of silence."""
        frames = 2 * self.multi_modal_projector.spec.group * (rows + 1) + 1
        return frames * self.audio_tower.config.mels * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        audio, projector, size = self.audio_tower.config, self.multi_modal_projector.spec, self.dtype.itemsize
        tower = mel_encoder_bytes(audio, 2 * audio.positions, 0, self.dtype, limits)
        joined = audio.positions * (audio.width * size + projector_bytes(projector, 1, audio.positions, self.dtype, limits))
        joined += self.multi_modal_projector.extra_bytes(audio.positions // projector.group)
        result = rows * self.hidden_size * size
        return self.input_bytes(modality, rows) + result + max(tower, joined, result)
