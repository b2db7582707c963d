"""Ultravox: rows of an encoder of log-mel frames, stacked by eight and projected, take the place of placeholders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels.activation import REFERENCES, activation
from ..mm.errors import CheckpointError, ConfigError
from .activations import mel_encoder_bytes
from .audio.mel_encoder import Encoder, encoder_config
from .config import count, decoder_spec
from .decoder_model import TEXT_PREFIXES, DecoderModel
from .interface import Work
from .layers.tree import Maker
from .text.stacks import stack_of

AUDIO = {  # what the published config.json leaves out
    "d_model": 384,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "max_source_positions": 1500,
    "num_mel_bins": 80,
}
_EPS = 1e-6
_ELSEWHERE = {"audio_model_id": "audio_config", "text_model_id": "text_config"}
_MERGE = "merge its config and weights into this checkpoint"


class Stacked(nn.Module):
    """`[rows, group * width]` -> `[rows, out]`: a norm, a layer, its second half gating the first, a layer; and a norm.

    `middle`: the second norm stands before the last layer, else behind it.
    """

    def __init__(
        self, wide: int, inner: int, out: int, act: str, middle: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        make, gated = Maker(self, dtype, device), act == "swiglu"
        half = inner // 2 if gated else inner
        self.act, self.gated, self.middle = "silu" if gated else act, gated, middle
        self.layers = (make.linear(["linear_1"], wide, [inner], False), make.linear(["linear_2"], half, [out], False))
        last = make.norm("ln_mid", half, _EPS, False) if middle else make.norm("ln_post", out, _EPS, False)
        self.norms = (make.norm("ln_pre", wide, _EPS, False), last)

    def forward(self, x: Tensor) -> Tensor:
        (first, second), (before, last) = self.layers, self.norms
        x = first(before(x))
        if self.gated:
            x, gate = x.chunk(2, -1)
            x = activation(self.act, gate.contiguous()).mul_(x)
        else:
            x = activation(self.act, x)
        made: Tensor = second(last(x)) if self.middle else last(second(x))
        return made


class Ultravox(DecoderModel):
    """See `DecoderModel`."""

    prefixes = TEXT_PREFIXES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        for key, section in _ELSEWHERE.items():
            if config.get(key) and not config.get(section):
                raise ConfigError(f"{section} is not here but in another model ({key}={config[key]!r}); {_MERGE}")
        if config.get("audio_latency_block_size"):
            raise ConfigError("audio_latency_block_size is not supported; remove it to hear a window as a whole")
        super().__init__(decoder_spec(config, stack_of(config)), dtype, device)
        self.elsewhere = [f"{key}={config[key]!r}" for key in _ELSEWHERE if config.get(key)]
        tower = encoder_config(AUDIO | dict(config.get("audio_config") or {}))
        self.audio_tower = Encoder(tower, dtype, device, silence=False)
        self.group, act = count({"stack_factor": 8, **config}, "stack_factor"), config.get("projector_act", "swiglu")
        if act != "swiglu" and act not in REFERENCES:
            raise ConfigError(f"projector_act {act!r} is not supported; known are swiglu, {', '.join(REFERENCES)}")
        self.inner = count({"hidden_size": 4096, **config}, "hidden_size")
        middle = bool(config.get("projector_ln_mid", False))
        wide = self.group * tower.width
        self.multi_modal_projector = Stacked(wide, self.inner, self.hidden_size, act, middle, dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        frames = tensors["audio_frames"].tolist()
        behind = self._behind(frames, tensors["audio_windows"].tolist())
        features = self._filled(tensors["input_features"], frames, behind) if behind else tensors["input_features"]
        windows = self.audio_tower(features, frames, behind)
        stacked = [F.pad(rows, (0, 0, 0, -len(rows) % self.group)).view(-1, self.group * rows.shape[1]) for rows in windows]
        return list(self.multi_modal_projector(torch.cat(stacked)).split(tensors["audio_rows"].tolist()))

    def _behind(self, frames: list[int], windows: list[int]) -> list[int | None]:
        """For the last of several windows, which is filled up: rows behind its sound that share a token with it. Else empty."""
        most, behind = 2 * self.audio_tower.config.positions, list[int | None]([None] * len(frames))
        for end, several in zip(accumulate(windows), windows, strict=True):
            if several > 1 and frames[end - 1] < most:
                rows = self.audio_tower.rows(frames[end - 1])
                behind[end - 1] = min(most // 2, -(-rows // self.group) * self.group) - rows
        return behind if any(more is not None for more in behind) else []

    def _filled(self, features: Tensor, frames: list[int], behind: list[int | None]) -> Tensor:
        """With frames of nothing after those windows."""
        most, wanted = 2 * self.audio_tower.config.positions, list(frames)
        for place, more in enumerate(behind):
            if more is not None:
                wanted[place] = min(2 * (self.audio_tower.rows(frames[place]) + more) + 1, most)
        filled = features.new_zeros(sum(wanted), features.shape[1])
        for window, place in zip(features.split(frames), filled.split(wanted), strict=True):
            place[: len(window)] = window
        return filled

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        try:
            super().load_weights(weights)
        except CheckpointError as error:
            if not self.elsewhere:
                raise
            raise CheckpointError(f"{error}; it names another model ({', '.join(self.elsewhere)}): {_MERGE}") from None

    def input_bytes(self, modality: str, rows: int) -> int:
        return 2 * self.group * rows * self.audio_tower.config.mels * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        audio, size = self.audio_tower.config, self.dtype.itemsize
        tower = mel_encoder_bytes(audio, 2 * self.group * rows, 0, self.dtype, work) + self.input_bytes(modality, rows)
        wide = 3 * self.group * audio.width + self.inner  # the tower's rows, side by side, normed
        return max(tower, self.input_bytes(modality, rows) + rows * (wide + 2 * self.hidden_size) * size)
