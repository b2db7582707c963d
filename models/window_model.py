"""A decoder with a tower that reads sounds window by window, the silence behind them included. Knows no family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..mm.errors import ConfigError
from .activations import mel_encoder_bytes, projector_bytes
from .audio.mel_encoder import Encoder, EncoderConfig
from .decoder_model import DecoderModel
from .interface import Work
from .layers.connectors import Projector, ProjectorSpec
from .text.spec import DecoderSpec

Section = dict[str, Any]
_JOINED = 4  # rows
AUDIO_PREFIXES = (
    ("model.audio_tower.", "audio_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)
"""Names of a tower and its projector beside a decoder, of transformers 5; they are kept without a prefix, too."""


def sections(config: Mapping[str, Any], text: Section, audio: Section) -> tuple[Section, Section]:
    """text_config and audio_config, what they leave out from `text` and `audio`; ConfigError where one is no object."""
    parts = [config.get("text_config") or {}, config.get("audio_config") or {}]
    if not all(isinstance(part, Mapping) for part in parts):
        raise ConfigError("text_config and audio_config in config.json must be objects")
    return text | dict(parts[0]), audio | dict(parts[1])


def joining(config: Mapping[str, Any], tower: EncoderConfig, out: int, inner: int, bias: bool = True) -> ProjectorSpec:
    """Two layers behind four rows joined; ConfigError where the tower's inner width, which says how many, is another."""
    if tower.inner != _JOINED * tower.width:
        raise ConfigError(f"intermediate_size of audio_config is {tower.inner}; {_JOINED} rows joined are expected")
    act, layers = config.get("projector_hidden_act", "gelu"), ("linear_1", "linear_2")
    return ProjectorSpec(tower.width, out, layers, group=_JOINED, inner=inner, act=act, bias=bias)


class WindowModel(DecoderModel):
    """Rows of a sound's windows end to end, joined in groups and projected, as many as the sound has embeddings.

    Takes the tensors of `processors.windows`. One window is encoded at a time, so that a long sound needs no more memory.
    """

    def __init__(
        self, text: DecoderSpec, audio: EncoderConfig, projector: ProjectorSpec, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(text, dtype, device)
        if audio.positions % projector.group:
            raise ConfigError(f"a window of {audio.positions} rows of audio_config is no multiple of {projector.group}")
        self.audio_tower = Encoder(audio, dtype, device)
        self.multi_modal_projector = Projector(projector, dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        windows = list(tensors["input_features"].split(tensors["audio_frames"].tolist()))
        items = zip(tensors["audio_windows"].tolist(), tensors["audio_rows"].tolist(), strict=True)
        return [self._rows([windows.pop(0) for _ in range(count)], rows) for count, rows in items]

    def _rows(self, windows: list[Tensor], rows: int) -> Tensor:
        """Of one sound."""
        group, frames, made = self.multi_modal_projector.spec.group, 2 * self.audio_tower.config.positions, []
        for window in windows:
            silence = window[-1:].expand(frames - len(window), -1)
            # rows of the tower have no name: they are gone when those of the next window are made
            made.append(self.multi_modal_projector(self.audio_tower(torch.cat((window, silence)), [frames])[0][: rows * group]))
            rows -= len(made[-1])
        return torch.cat(made)

    def input_bytes(self, modality: str, rows: int) -> int:
        """Two frames a row of the tower; those of a group that is not full are left over, and one of silence is behind."""
        frames = 2 * self.multi_modal_projector.spec.group * (rows + 1) + 1
        return frames * self.audio_tower.config.mels * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        audio, projector, size = self.audio_tower.config, self.multi_modal_projector.spec, self.dtype.itemsize
        tower = mel_encoder_bytes(audio, 2 * audio.positions, 0, self.dtype, work)
        joined = audio.positions * (audio.width * size + projector_bytes(projector, 1, audio.positions, self.dtype, work))
        made = rows * self.hidden_size * size
        return self.input_bytes(modality, rows) + made + max(tower, joined, made)
