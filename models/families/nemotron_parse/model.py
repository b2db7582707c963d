"""Nemotron-Parse: RADIO on a page, a convolution that joins its rows, and mBART's decoder without positions (2511.20478)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int, require
from ...audio.mel_encoder import layer_sizes
from ...interface import StepLimits
from ...layers.basic import TensorModule
from ...layers.builder import Builder
from ...text.encoder_decoder import CrossDecoderSpec
from ...vision.radio import RADIO_PREFIX, RADIO_UNUSED, radio_spec, summary_rows
from ...vision.vit import VisionTower, tower_bytes
from ..whisper.model import Whisper

_DECODER: dict[str, Any] = {
    "vocab_size": 50265, "d_model": 1024, "decoder_layers": 12, "decoder_attention_heads": 16, "decoder_ffn_dim": 4096,
    "activation_function": "gelu",
}  # fmt: skip
_JOINED = 4  # rows of patches that the convolution joins
_EPS = 1e-6


class PageNeck(TensorModule):
    """Rows of a page's patches, after its class rows, to the rows that the decoder reads.

    `[pages, first rows + h * w, width]` -> `[pages, h * (w // 4) + 1, out]`; the last row is the page's summary.
    """

    def __init__(
        self, width: int, out: int, grid: tuple[int, int], summary: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        build = Builder(self, dtype, device)
        self.grid, self.summary, self.out = grid, list(summary), out
        self.norms = [build.norm(f"layer_norm{number}", out, _EPS, True) for number in (1, 2, 3)]
        self.layers = [
            build.linear(["conv1"], width, [out], True),
            build.linear(["conv2"], _JOINED * out, [out], False),
            build.linear(["sum_proj"], len(summary) * width, [out], True),
        ]

    def forward(self, rows: Tensor) -> Tensor:
        (h, w), (first, second, whole), pages = self.grid, self.layers, len(rows)
        x = first(rows[:, -h * w :].reshape(pages * h * w, -1))
        x = self.norms[0](x).view(pages * h, w, self.out)[:, : w // _JOINED * _JOINED]
        x = x.reshape(-1, _JOINED, self.out).transpose(1, 2).reshape(-1, _JOINED * self.out)  # as the convolution's weight
        x = self.norms[1](second(x)).view(pages, -1, self.out)
        summary = self.norms[2](whole(torch.stack([rows[:, i] for i in self.summary], 1).flatten(1)))
        return torch.cat([x, summary[:, None]], 1)


class PageEncoder(nn.Module):
    """Patches of whole pages, all of one size, to `[pages, rows, out]`."""

    def __init__(self, config: Mapping[str, Any], out: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        vision, size = require(config, "encoder"), require(config, "image_size")
        if not isinstance(size, list | tuple) or len(size) != 2:
            raise ConfigError(f"image_size in config.json is {str(size)[:60]}; it must be a height and a width")
        patch = positive_int({"patch_size": 16} | vision, "patch_size")
        self.h, self.w = (positive_int({"image_size": side}, "image_size") // patch for side in size)
        if self.w < _JOINED or not self.h:
            raise ConfigError(f"image_size in config.json is {size}; a page needs {_JOINED} x 1 patches of {patch} pixels")
        spec = radio_spec(vision, min_frame=self.h * self.w, keep_first=True)
        self.dtype, self.tower = dtype, VisionTower(spec, dtype, device)
        self.neck = PageNeck(spec.width, out, (self.h, self.w), summary_rows(vision), dtype, device)

    @property
    def rows(self) -> int:
        """Rows of a page."""
        return self.h * (self.w // _JOINED) + 1

    def encode(self, patches: Tensor) -> Tensor:
        pages = len(patches) // (self.h * self.w)
        rows = self.tower(patches, [(1, self.h, self.w)] * pages)[-1]
        return self.neck(rows.view(pages, -1, self.tower.spec.width))


class NemotronParse(Whisper):
    """A model of pages. Heads that predict several tokens at once are not used."""

    prefixes = (
        (f"encoder.model_encoder.{RADIO_PREFIX}", "encoder.tower."),
        ("encoder.model_encoder.", "encoder.model_encoder."),
        ("encoder.", "encoder.neck."),
        ("lm_head.", "head.lm_head."),
    )
    ignored = (
        *(f"encoder.model_encoder.{name}" for name in RADIO_UNUSED),
        "decoder.embed_positions.",
        "decoder.extra_heads.",
        "decoder.extra_proj.",
    )
    defaults: Mapping[str, Any] = {}
    encoder: PageEncoder  # type: ignore[assignment]

    def _build_encoder(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> CrossDecoderSpec:
        text = _DECODER | require(config, "decoder")
        width = positive_int(text, "d_model")
        self.encoder = PageEncoder(config, width, dtype, device)
        return CrossDecoderSpec(
            vocab_size=positive_int(text, "vocab_size"),
            hidden_size=width,
            positions=positive_int({"max_sequence_length": 9000, **config}, "max_sequence_length"),
            learned_positions=False,
            embed_scale=math.sqrt(width) if text.get("scale_embedding", False) else 1.0,
            embed_norm=True,
            **layer_sizes(text, "decoder"),
        )

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        return list(self.encoder.encode(tensors["pixel_values"]))

    def input_bytes(self, modality: str, rows: int) -> int:
        return self._patches(rows) * self.encoder.tower.spec.patch_dim * self.encoder.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        return tower_bytes(self.encoder.tower.spec, self._patches(rows), None, self.encoder.dtype, limits)

    def _patches(self, rows: int) -> int:
        return -(-rows // self.encoder.rows) * self.encoder.h * self.encoder.w

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return weights
