"""Ultravox: a Whisper encoder over windows of 30 s, eight rows joined to one and projected, any decoder.

Source: the publisher's modelling file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....callers.errors import CheckpointError, ConfigError
from ....checkpoints.config import check_activation, positive_int
from ....checkpoints.external import external_parts
from ....kernels.activation import activation
from ...audio.mel_encoder import MelEncoder, mel_encoder_bytes, mel_encoder_spec
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import ForwardBatch, StepLimits
from ...layers.basic import TensorModule
from ...layers.builder import Builder
from ...text.decoder_config import decoder_spec
from ...text.stacks import stack_of

# defaults that the published config.json leaves out
AUDIO = {
    "d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536, "max_source_positions": 1500,
    "num_mel_bins": 80,
}  # fmt: skip
_EPS = 1e-6
_GET = "download it with `sensorium pull`, or give the path of its folder there"


class UltravoxProjector(TensorModule):
    """`[rows, group * width]` -> `[rows, out]`: norm, layer, SwiGLU or another activation, layer, and a second norm.

    `sizes`: width of the input, of the first layer's result, and of the result.
    `middle`: True if the second norm is before the last layer, False if it is after it.
    """

    def __init__(self, sizes: tuple[int, int, int], act: str, middle: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        width, inner, out = sizes
        build, gated = Builder(self, dtype, device), act == "swiglu"
        half = inner // 2 if gated else inner
        self.act, self.gated, self.middle = "silu" if gated else act, gated, middle
        self.layers = (build.linear(["linear_1"], width, [inner], False), build.linear(["linear_2"], half, [out], False))
        last = build.norm("ln_mid", half, _EPS, False) if middle else build.norm("ln_post", out, _EPS, False)
        self.norms = (build.norm("ln_pre", width, _EPS, False), last)

    def forward(self, x: Tensor) -> Tensor:
        (first, second), (before, last) = self.layers, self.norms
        x = first(before(x))
        if self.gated:
            x, gate = x.chunk(2, -1)
            x = activation(self.act, gate.contiguous()).mul_(x)
        else:
            x = activation(self.act, x)
        return second(last(x)) if self.middle else last(second(x))


class Ultravox(DecoderModel):
    """A model of audio. The windows of all items are encoded in one call."""

    prefixes = TEXT_PREFIXES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        for part, name in external_parts(config):
            if not config.get(part.section):
                raise ConfigError(f"{part.section} is in another repository ({part.key}={name!r}), which was not found; {_GET}")
        if config.get("audio_latency_block_size"):
            raise ConfigError("audio_latency_block_size is not supported; remove it, so that a window is encoded as a whole")
        super().__init__(decoder_spec(config, stack_of(config)), dtype, device)
        self.external = [f"{part.key}={name!r}" for part, name in external_parts(config)]
        # v0.6 adds the placeholder after the decoder's vocabulary: it has no embedding and is never sampled
        self.added_ids = int(config.get("audio_token_index") == self.vocab_size)
        self.vocab_size += self.added_ids
        tower = mel_encoder_spec(AUDIO | dict(config.get("audio_config") or {}))
        self.audio_tower = MelEncoder(tower, dtype, device, silence=False)
        self.group, act = positive_int({"stack_factor": 8, **config}, "stack_factor"), config.get("projector_act", "swiglu")
        if act != "swiglu":
            act = check_activation("projector_act", act)
        self.inner = positive_int({"hidden_size": 4096, **config}, "hidden_size")
        middle = bool(config.get("projector_ln_mid", False))
        width = self.group * tower.width
        self.multi_modal_projector = UltravoxProjector((width, self.inner, self.hidden_size), act, middle, dtype, device)

    def forward(self, batch: ForwardBatch) -> Tensor:
        if self.added_ids:
            batch = replace(batch, input_ids=batch.input_ids.clamp(max=self.spec.vocab_size - 1))
        return super().forward(batch)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = super().compute_logits(hidden)
        return F.pad(logits, (0, self.added_ids), value=-math.inf) if self.added_ids else logits

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        frames = tensors["audio_frames"].tolist()
        trailing = self._trailing_rows(frames, tensors["audio_windows"].tolist())
        features = self._padded(tensors["input_features"], frames, trailing) if trailing else tensors["input_features"]
        windows = self.audio_tower(features, frames, trailing)
        stacked = [F.pad(rows, (0, 0, 0, -len(rows) % self.group)).view(-1, self.group * rows.shape[1]) for rows in windows]
        return list(self.multi_modal_projector(torch.cat(stacked)).split(tensors["audio_rows"].tolist()))

    def _trailing_rows(self, frames: list[int], windows: list[int]) -> list[int | None]:
        """Return for each window how many rows after its audio are joined with its last rows; empty if no window has any.

        Only the last of several windows of an item has such rows: it is padded, so that its last result row is complete.
        """
        longest, trailing = 2 * self.audio_tower.config.positions, list[int | None]([None] * len(frames))
        for end, count in zip(accumulate(windows), windows, strict=True):
            if count > 1 and frames[end - 1] < longest:
                rows = self.audio_tower.rows(frames[end - 1])
                trailing[end - 1] = min(longest // 2, -(-rows // self.group) * self.group) - rows
        return trailing if any(more is not None for more in trailing) else []

    def _padded(self, features: Tensor, frames: list[int], trailing: list[int | None]) -> Tensor:
        """Add frames of zeros after the windows that have trailing rows."""
        longest, lengths = 2 * self.audio_tower.config.positions, list(frames)
        for index, more in enumerate(trailing):
            if more is not None:
                lengths[index] = min(2 * (self.audio_tower.rows(frames[index]) + more) + 1, longest)
        padded = features.new_zeros(sum(lengths), features.shape[1])
        for window, target in zip(features.split(frames), padded.split(lengths), strict=True):
            target[: len(window)] = window
        return padded

    def check_weights(self, headers: Mapping[str, Tensor]) -> None:
        try:
            super().check_weights(headers)
        except CheckpointError as error:
            if not self.external:
                raise
            raise CheckpointError(
                f"{error}; config.json names another repository ({', '.join(self.external)}); {_GET}"
            ) from None

    def input_bytes(self, modality: str, rows: int) -> int:
        return 2 * self.group * rows * self.audio_tower.config.mels * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        audio, size = self.audio_tower.config, self.dtype.itemsize
        tower = mel_encoder_bytes(audio, 2 * self.group * rows, 0, self.dtype, limits) + self.input_bytes(modality, rows)
        joined = 3 * self.group * audio.width + self.inner  # the encoder's rows, joined, normed
        return max(tower, self.input_bytes(modality, rows) + rows * (joined + 2 * self.hidden_size) * size)
