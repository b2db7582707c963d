"""MiniCPM-V: SigLIP's tower for views of many sizes, and a resampler (2.6 to 4.5) or mergers of squares (4.6, 4.7).

Sources: arXiv 2408.01800 (2.6), 2509.18154 (4.5), the modelling files of transformers 5.23 (4.6, 4.7, MiniCPM-OCR).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int, require
from ....mm.tiling.slices import MAX_PACKED_FRAMES, SliceTiles
from ...audio.mel_encoder import LARGE, MelEncoder, averaged, mel_encoder_bytes, mel_encoder_spec
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.builder import Builder
from ...layers.connectors import Projector, ProjectorSpec, projector_bytes, squares
from ...layers.resampler import Resampler, ResamplerSpec, resampler_bytes
from ...memory_formulas import SMALL, OpBytes
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS, stack_of
from ...vision.encoders import encoder_spec
from ...vision.positions import Grid
from ...vision.spec import TableSpec, TowerSpec
from ...vision.vit import TowerMetadata, VisionAttention, VisionTower, tower_bytes

_ENCODER = "siglip_vision_model"
_LAYERS = "model.vision_tower.encoder.layers."
_LINEAR = ("linear_1", "linear_2")
_SQUARE = 4  # rows that one merger joins
_ROWS_PER_SECOND = 50  # of Whisper's encoder
_DECODERS = {"2.6": "qwen2", "4": "llama", "4.5": "qwen3"}  # by version in config.json


class WindowMerger(Projector):
    """Attention within squares of 2 x 2 rows, then an MLP that joins each square. It is added to the square's mean."""

    def __init__(self, tower: TowerSpec, dtype: torch.dtype, device: torch.device) -> None:
        width, inner = tower.width, _SQUARE * tower.inner
        mlp = ProjectorSpec(width, width, _LINEAR, _SQUARE, inner, "gelu_pytorch_tanh", eps=tower.eps)
        super().__init__(replace(mlp, norm="pre_norm", joined_norm=True), dtype, device)
        build = Builder(self, dtype, device)
        self.attention_norm = [build.norm("layer_norm1", width, tower.eps, True)]
        self.attention = VisionAttention(tower, build)

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, width]` in squares -> `[squares, width]`; updates `x` in place."""
        sizes = [_SQUARE] * (len(x) // _SQUARE)
        x += self.attention(self.attention_norm[0](x), TowerMetadata(None, sizes, sizes), sizes)
        return super().forward(x).add_(x.view(-1, _SQUARE, x.shape[1]).mean(1))


class MiniCPMV46(DecoderModel):
    """Images and frames of videos as several views. The tower is cut in two where its rows are merged."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        if config.get("model_type") == "minicpm_ocr":  # whose head is tied by default
            config = {"tie_word_embeddings": True, **config}
        super().__init__(decoder_spec(config, stack_of(config, "qwen3_5_text")), dtype, device)
        if config.get("merger_times", 1) != 1:
            raise ConfigError(f"merger_times is {config['merger_times']}; only 1 is supported")
        vision = {"image_size": 224, "patch_size": 16, **require(config, "vision_config"), "model_type": _ENCODER}
        table = TableSpec(positive_int(vision, "image_size") // positive_int(vision, "patch_size"), fit="ratio_buckets")
        whole = encoder_spec(vision, _ENCODER, table=table, merge=2)
        self.cut = config.get("insert_layer_id", 6) + 1
        if not 0 < self.cut < whole.depth:
            raise ConfigError(f"insert_layer_id is {self.cut - 1}; it must be a layer before the last of {whole.depth}")
        self.tower = VisionTower(replace(whole, depth=self.cut), dtype, device)
        self.window_merger = WindowMerger(whole, dtype, device)
        upper = replace(whole, depth=whole.depth - self.cut, patch_dim=0, table=None, merge=1, post_norm=True)
        self.upper = VisionTower(upper, dtype, device)
        merger = ProjectorSpec(whole.width, self.hidden_size, _LINEAR, _SQUARE, norm="pre_norm", eps=1e-6, joined_norm=True)
        self.merger = Projector(merger, dtype, device)

    prefixes = (
        ("model.vision_tower.vit_merger.", "window_merger."),
        ("model.vision_tower.post_layernorm.", "upper.post_layernorm."),
        ("model.vision_tower.", "tower."),
        ("model.merger.mlp.0.", "merger."),
        *TEXT_PREFIXES,
    )

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Number the layers of the upper half of the tower from 0."""
        for name, tensor in weights:
            number, dot, rest = name.removeprefix(_LAYERS).partition(".")
            if name.startswith(_LAYERS) and number.isdecimal() and int(number) >= self.cut:
                name = f"upper.encoder.layers.{int(number) - self.cut}{dot}{rest}"
            yield name, tensor

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Encode items. `merge`: patches along a side of one row, 4 or 2; `views`: number of grids per item."""
        grids, merge = [(t, h, w) for t, h, w in tensors["grids"].tolist()], int(tensors["merge"])
        counts, ends = [h * w // merge**2 for _, h, w in grids], accumulate(tensors["views"].tolist(), initial=0)
        rows = self._encode(tensors["pixel_values"], grids, merge)
        return list(rows.split([sum(counts[start:end]) for start, end in pairwise(ends)]))

    def _encode(self, pixels: Tensor, grids: Sequence[Grid], merge: int) -> Tensor:
        x = self.tower(pixels, grids)[-1]
        if merge == 2:
            return self.merger(self.upper(x, grids)[-1])
        halves = [(t, h // 2, w // 2) for t, h, w in grids]
        return self.merger(squares(self.upper(self.window_merger(x), halves)[-1], halves, 2))

    def input_bytes(self, modality: str, rows: int) -> int:
        return rows * _SQUARE**2 * self.tower.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        """Return the peak in one half of the tower or in the first merger, beside the pixels."""
        tower, size, patches = self.tower.spec, self.dtype.itemsize, rows * _SQUARE**2
        merger = patches * projector_bytes(self.window_merger.spec, 1, patches, self.dtype, limits)
        upper = tower_bytes(self.upper.spec, patches // _SQUARE, self.merger.spec, self.dtype, limits)
        base = patches * tower.patch_dim * size
        return max(tower_bytes(tower, patches, None, self.dtype, limits), base + max(merger, upper))


class MiniCPMV(DecoderModel):
    """MiniCPM-V 2.6, 4 and 4.5 in their publisher's layout: each view becomes as many rows as the resampler has queries.

    In 4.5, the resampler may read several frames of a video together, with their times.
    """

    prefixes: Sequence[tuple[str, str]] = (
        ("vpm.", "tower."),
        ("resampler.attn.out_proj.", "resampler.out_proj."),
        ("llm.model.", "language_model."),
        ("llm.lm_head.", "head.lm_head."),
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        version = str(config.get("version")).removesuffix(".0")
        if version not in _DECODERS:
            raise ConfigError(f"version of this MiniCPM-V is {version}; supported are {', '.join(_DECODERS)} and 4.6")
        super().__init__(decoder_spec(config, STACKS[_DECODERS[version]]), dtype, device)
        vision = {"patch_size": 14, **require(config, "vision_config"), "model_type": _ENCODER}
        table = TableSpec(positive_int(vision, "image_size") // positive_int(vision, "patch_size"), fit="step_buckets")
        tower = encoder_spec(vision, _ENCODER, table=table, post_norm=True)
        if config.get("drop_vision_last_layer"):
            tower = replace(tower, depth=tower.depth - 1)
            self.ignored = (f"tower.encoder.layers.{tower.depth}.",)
        resampler = ResamplerSpec(positive_int({"query_num": 64, **config}, "query_num"), tower.width, self.hidden_size)
        if self.hidden_size % 128:
            raise ConfigError(f"hidden_size is {self.hidden_size}; it must be a multiple of the resampler's heads of 128")
        self.tower, self.resampler = VisionTower(tower, dtype, device), Resampler(resampler, dtype, device)
        tiles = SliceTiles(positive_int({"image_size": 448, **config}, "image_size"), vision["patch_size"], 1)
        self.most_patches = tiles.most_patches(vision["patch_size"])
        self.packed = MAX_PACKED_FRAMES if version == "4.5" else 1

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Encode items. `packs`: how many views become rows together; `results`: number of such packs, per item."""
        grids, times = [(t, h, w) for t, h, w in tensors["grids"].tolist()], tensors["times"].tolist()
        patches = self.tower(tensors["pixel_values"], grids)[-1]
        rows, start, first = list[Tensor](), 0, 0
        for pack in tensors["packs"].tolist():
            packed = grids[first : first + pack]
            size = sum(h * w for _, h, w in packed)
            rows.append(self.resampler(patches[start : start + size], packed, times[first : first + pack]))
            first, start = first + pack, start + size
        return list(torch.cat(rows).split([count * self.resampler.spec.queries for count in tensors["results"].tolist()]))

    def input_bytes(self, modality: str, rows: int) -> int:
        return self._patches(modality, rows) * self.tower.spec.patch_dim * self.dtype.itemsize

    def _patches(self, modality: str, rows: int) -> int:
        """Return the most patches of views that become `rows` rows."""
        each = self.most_patches if modality == "image" else self.most_patches * self.packed
        return -(-rows // self.resampler.spec.queries) * each

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        """Return the peak in the tower, which takes all views together, or after it, where one result follows another.

        Linear layers may pad an odd number of patches, so one patch less than the maximum can need more memory.
        """
        tower, size, dtype, patches = self.tower.spec, self.dtype.itemsize, self.dtype, self._patches(modality, rows)
        result, each = rows * self.hidden_size * size, self._patches(modality, 1)
        resampled = max(resampler_bytes(self.resampler.spec, count, dtype, limits) for count in (each, each - 1))
        base = patches * (tower.patch_dim + tower.width) * size + result
        peak = max(tower_bytes(tower, count, None, dtype, limits) for count in (patches, patches - 1))
        return max(peak, base + max(resampled, result))


class MiniCPMO(MiniCPMV):
    """MiniCPM-o 2.6 and 4.5: MiniCPM-V with Whisper's encoder for audio. Output is text; speech output is not implemented."""

    prefixes = (("apm.", "audio_tower."), *MiniCPMV.prefixes)
    ignored = ("tts.",)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        audio, seconds = mel_encoder_spec({**LARGE, **require(config, "audio_config")}), config.get("audio_chunk_length", 1.0)
        self.pool = positive_int({"audio_pool_step": 2, **config}, "audio_pool_step")
        self.audio_tower = MelEncoder(audio, dtype, device, silence=False, chunk=int(seconds * _ROWS_PER_SECOND))
        layers = ProjectorSpec(audio.width, self.hidden_size, ("linear1", "linear2"), inner=self.hidden_size, act="relu")
        self.audio_projection_layer = Projector(layers, dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        if modality != "audio":
            return super().embed_multimodal(modality, tensors)
        items = self.audio_tower(tensors["input_features"], tensors["audio_frames"].tolist())
        projected = self.audio_projection_layer(torch.cat(items)).split([len(rows) for rows in items])
        windows = [averaged(rows, self.pool) for rows in projected]
        ends = accumulate(tensors["audio_windows"].tolist(), initial=0)
        return [torch.cat(windows[start:end]) for start, end in pairwise(ends)]

    def keep_encoders(self, modalities: Collection[str]) -> None:
        super().keep_encoders(modalities)
        if "audio" not in modalities:
            self._remove("audio_tower", "audio_projection_layer")
        elif len(modalities) == 1:
            self._remove("tower", "resampler")

    def input_bytes(self, modality: str, rows: int) -> int:
        if modality != "audio":
            return super().input_bytes(modality, rows)
        return self._frames(rows) * self.audio_tower.config.mels * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        if modality != "audio":
            return super().encoder_bytes(modality, rows, limits)
        tower, ops = self.audio_tower.config, OpBytes(self.dtype, limits)
        frames = self._frames(rows)
        states = frames // 2
        copies = states * ops.attention_copies(tower.width) + ops.torch_attention_tiles(states, tower.head_dim)
        layers = projector_bytes(self.audio_projection_layer.spec, 1, states, self.dtype, limits)
        projected = SMALL + self.input_bytes(modality, rows) + states * (2 * tower.width * self.dtype.itemsize + layers)
        return max(copies + mel_encoder_bytes(tower, frames, 0, self.dtype, limits), projected)

    def _frames(self, rows: int) -> int:
        """Return the most frames that give `rows` rows: the last frames may be too few for a row of their own."""
        return 2 * self.pool * (rows + 1)
