"""Audio Flamingo 3 (arXiv 2507.08128), Music Flamingo: a Whisper encoder over windows of 30 s, rows averaged in pairs, Qwen2.

Music Flamingo rotates the encoder's rows by the window's number and the time; the angles are those of transformers' class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ...audio.mel_encoder import MelEncoder, mel_encoder_bytes, mel_encoder_spec
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.connectors import Projector, ProjectorSpec
from ...text.attention_config import rope_scaling
from ...text.decoder_config import decoder_spec
from ...text.rope import scaled_frequencies
from ...text.spec import RopeSpec
from ...text.stacks import STACKS
from ...window_model import AUDIO_PREFIXES, config_sections

_POOL = 2


class AudioFlamingo3(DecoderModel):
    """A model of audio."""

    prefixes = (*AUDIO_PREFIXES, *TEXT_PREFIXES)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text, audio = config_sections(config, {})
        # the head of this family is never tied
        super().__init__(decoder_spec({**config, "text_config": text}, STACKS["qwen2"], tied=False), dtype, device)
        spec = mel_encoder_spec(audio)
        self.audio_tower = MelEncoder(spec, dtype, device, pool=_POOL)
        act, bias = config.get("projector_hidden_act", "gelu"), bool(config.get("projector_bias", True))
        layers, width = ("linear_1", "linear_2"), self.hidden_size
        projector = ProjectorSpec(spec.width, width, layers, inner=width, act=act, bias=bias)
        self.multi_modal_projector = Projector(projector, dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        rows, frames = self._windows(tensors), tensors["audio_frames"].tolist()
        items = []
        for count in tensors["audio_windows"].tolist():
            items.append(torch.cat([self._window_rows(number, next(rows), frames.pop(0)) for number in range(count)]))
        return items

    def _windows(self, tensors: Mapping[str, Any]) -> Iterator[Tensor]:
        yield from tensors["input_features"].split(tensors["audio_inputs"].tolist())

    def _window_rows(self, number: int, features: Tensor, frames: int) -> Tensor:
        """Return the rows of one window, which is encoded alone, so that long audio needs no more memory than short audio."""
        rows: Tensor = self.multi_modal_projector(self.place_in_time(number, self.audio_tower(features, [frames])[0]))
        return rows

    def place_in_time(self, number: int, rows: Tensor) -> Tensor:
        """Hook: mark the encoder rows of window `number`, counted from 0, with their time."""
        return rows

    def input_bytes(self, modality: str, rows: int) -> int:
        """Count four frames per row, and 5 for the end of the audio: up to 3 that make no row, and 2 of padding."""
        return (2 * _POOL * rows + 5) * self.audio_tower.config.mels * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        spec, size = self.audio_tower.config, self.dtype.itemsize
        frames = min(2 * _POOL * rows + 5, 2 * spec.positions)
        features, row = frames * spec.mels * size, self.hidden_size * size
        window = mel_encoder_bytes(spec, frames, self.hidden_size, self.dtype, limits) - features  # they are part of the input
        earlier = max(0, rows - spec.positions // _POOL) * row  # rows of the windows before the last one
        return self.input_bytes(modality, rows) + max(earlier + window, 2 * rows * row)


class MusicFlamingo(AudioFlamingo3):
    """Audio Flamingo 3 whose encoder rows are rotated by their time."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        rope = config.get("rope_parameters") or {}
        if rope.get("rope_type", "default") not in ("default", "linear"):
            raise ConfigError(f"rope_type is {rope['rope_type']!r}; for times only default and linear are defined")
        width = self.audio_tower.config.width
        dim = int(width * float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.2))))
        if dim % 2 or 2 * dim > width:
            raise ConfigError(f"partial_rotary_factor gives {dim} numbers per axis; it must be even and at most {width // 2}")
        self.theta = float(rope.get("rope_theta", 1200.0))
        self.row_seconds = 2 * _POOL * float(config.get("audio_frame_step", 0.01))
        scaling = rope_scaling({"max_position_embeddings": self.theta, **config}, rope)
        self.frequencies = scaled_frequencies(RopeSpec(self.theta, dim, (), scaling=scaling))[0].to(device)

    def place_in_time(self, number: int, rows: Tensor) -> Tensor:
        """Rotate adjacent pairs of each row's first numbers: half by the window's number, half by the row's, times seconds."""
        whole = self.audio_tower.config.positions // _POOL  # rows of a window
        steps = torch.arange(len(rows), device=rows.device)
        seconds = number * whole * self.row_seconds + steps.float() * self.row_seconds  # [rows]
        turns = torch.stack((torch.full_like(seconds, number / self.theta), steps / self.theta * (2 * math.pi)), 1)
        angles = (turns[..., None] * self.frequencies).flatten(1) * (-seconds * 2 * math.pi)[:, None]  # [rows, dim]
        pairs = rows[:, : 2 * angles.shape[1]].double().unflatten(1, (-1, 2))
        cos, sin = angles.cos().double(), angles.sin().double()
        rotated = torch.stack((pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos + pairs[..., 0] * sin), -1)
        return torch.cat((rotated.flatten(1).to(rows.dtype), rows[:, 2 * angles.shape[1] :]), 1)
