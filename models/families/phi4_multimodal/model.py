"""Phi-4-multimodal (arXiv 2503.01743): SigLIP over padded tiles, a conformer, one adapter of the decoder per modality."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int
from ...audio.biased_conformer import BiasedConformer, biased_conformer_bytes, biased_conformer_spec
from ...decoder_model import DecoderModel
from ...interface import StepLimits
from ...layers.builder import StoredTensor
from ...layers.connectors import Projector, ProjectorSpec, projector_bytes, tiles_in_lines
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS, replace_parts
from ...tower_model import feature_states
from ...vision.encoders import encoder_spec
from ...vision.spec import TableSpec, TowerSpec
from ...vision.vit import VisionTower, tower_bytes
from .config import hub_config, stored_adapters

TEXT = {"vocab_size": 200064, "num_key_value_heads": 8, "max_position_embeddings": 131072}
VISION: Mapping[str, Any] = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "num_channels": 3,
    "image_size": 448, "patch_size": 14, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "feature_layer": -2,
}  # fmt: skip
AUDIO: Mapping[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 1536, "num_blocks": 24, "num_attention_heads": 16, "activation": "swish",
    "chunk_size": -1, "ext_pw_out_channel": 1024, "depthwise_separable_out_channel": 1024, "depthwise_multiplier": 1,
    "kernel_size": 3, "conv_activation": "swish", "input_size": 80, "conv_glu_type": "swish", "time_reduction": 8,
    "bias_max_distance": 1000, "bias_symmetric": False, "nemo_activation": "relu", "nemo_conv_channels": 1024,
    "downsample_rate": 1,
}  # fmt: skip
_ENCODER = "siglip_vision_model"
_EMBED = "model.embed_tokens_extend."
_PUBLISHED = (  # parts of the publisher's names
    (".base_layer.", "."),
    (".net.0.linear.", ".gate_up_proj."),
    (".net.2.", ".down_proj."),
    (".self_attn.linear_out.", ".self_attn.o_proj."),
    (".self_attn.linear_q.", ".self_attn.q_proj."),
    (".self_attn.linear_k.", ".self_attn.k_proj."),
    (".self_attn.linear_v.", ".self_attn.v_proj."),
)
_PATCHES_PER_ROW = 4  # at most: squares of two by two are averaged, and lines have one more row


class Phi4Multimodal(DecoderModel):
    """A model of images and audio. Where a prompt has both, audio has a projector of its own."""

    prefixes = (
        (f"{_EMBED}image_embed.img_processor.", "tower."),
        (f"{_EMBED}image_embed.img_projection_", "projector."),
        (f"{_EMBED}image_embed.img_projection.0.", "projector.up."),
        (f"{_EMBED}image_embed.img_projection.2.", "projector.down."),
        (f"{_EMBED}image_embed.global_img_feature_extensor", "separator"),
        (f"{_EMBED}image_embed.glb_GN", "separator"),
        (f"{_EMBED}image_embed.sub_img_feature_extensor", "line_end"),
        (f"{_EMBED}image_embed.sub_GN", "line_end"),
        (f"{_EMBED}audio_embed.encoder.", "audio."),
        *(
            (f"{_EMBED}audio_embed.{stored}", f"{projector}.{layer}.")
            for projector, of, old in (("speech", "speech", "speech"), ("vision_speech", "vision_speech", "vision"))
            for layer, number in (("up", 0), ("down", 2))
            for stored in (f"{layer}_proj_for_{of}.", f"audio_projection.{old}.{number}.")
        ),
        ("model.", "language_model."),
        ("lm_head.", "head.lm_head."),
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = hub_config(config)
        stack = replace(STACKS["phi3"], defaults={**STACKS["phi3"].defaults, **TEXT})
        super().__init__(decoder_spec(config, stack), dtype, device)
        self.stored_adapters = stored_adapters(config)
        tower = _tower({**VISION, **(config.get("vision_config") or {})})
        audio = biased_conformer_spec({**AUDIO, **(config.get("audio_config") or {})})
        assert tower.table is not None
        self.side = tower.table.side // 2  # rows along a side of a tile
        self.tower: VisionTower | None = VisionTower(tower, dtype, device)
        self.projector = self._projector(tower.width, device)
        self.separator, self.line_end = (StoredTensor((tower.width,), dtype, device) for _ in range(2))
        self.audio: BiasedConformer | None = BiasedConformer(audio, dtype, device)
        self.speech, self.vision_speech = (self._projector(audio.width, device) for _ in range(2))
        self.ignored = ("tower.head.", *(f"tower.{name}" for name in tower.unbuilt))

    def _projector(self, width: int, device: torch.device) -> Projector:
        spec = ProjectorSpec(width, self.hidden_size, ("up", "down"), inner=self.hidden_size)
        return Projector(spec, self.dtype, device)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Rename the parts of the publisher's names."""
        return ((replace_parts(name, _PUBLISHED), tensor) for name, tensor in weights)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Encode items. `layout` of an image, `beside_image` of audio: see the ProcessingInfo."""
        if modality == "audio":
            assert self.audio is not None
            frames = tensors["audio_frames"].tolist()
            rows = self.audio(tensors["input_features"], frames).split([self.audio.spec.num_rows(n) for n in frames])
            projectors = [self.vision_speech if beside else self.speech for beside in tensors["beside_image"].tolist()]
            return [project(item) for project, item in zip(projectors, rows, strict=True)]
        assert self.tower is not None
        layouts, full = tensors["layout"].tolist(), 2 * self.side
        shapes = [[(full, full), *_kept(full, *layout)] for layout in layouts]
        flat = [shape for item in shapes for shape in item]
        whole = [_even(tall) * _even(wide) for tall, wide in flat]
        border = [both - tall * wide for both, (tall, wide) in zip(whole, flat, strict=True)]
        state = self.tower(tensors["pixel_values"], [(1, *shape) for shape in flat], border)[-1]
        tiles = [_averaged(*pair) for pair in zip(flat, state.split(whole), strict=True)]
        lines, start = list[Tensor](), 0
        for (_, columns, *_), item in zip(layouts, shapes, strict=True):
            item_tiles = tiles[start : start + len(item)]
            lines.append(tiles_in_lines(item_tiles, columns, self.line_end.weight, self.separator.weight))
            start += len(item)
        counts = [len(item) for item in lines]
        joined = torch.cat(lines)
        del state, tiles, lines
        return list(self.projector(joined).split(counts))

    def keep_encoders(self, modalities: Collection[str]) -> None:
        super().keep_encoders(modalities)
        if self.audio is not None and "audio" not in modalities:
            self._remove("audio", "speech", "vision_speech")
        if self.tower is not None and "image" not in modalities:
            self._remove("tower", "projector", "separator", "line_end")

    def input_bytes(self, modality: str, rows: int) -> int:
        if modality == "audio":
            assert self.audio is not None
            return rows * self.audio.spec.reduction * self.audio.spec.bands * self.dtype.itemsize
        assert self.tower is not None
        return rows * _PATCHES_PER_ROW * self.tower.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        size = self.dtype.itemsize
        if modality == "audio":
            assert self.audio is not None
            encoder = biased_conformer_bytes(self.audio.spec, rows, self.dtype, limits)
            projected = rows * (self.audio.spec.width * size + projector_bytes(self.speech.spec, 1, rows, self.dtype, limits))
            return max(encoder, self.input_bytes(modality, rows) + projected)
        assert self.tower is not None
        tower, patches = self.tower.spec, rows * _PATCHES_PER_ROW
        pixels = patches * tower.patch_dim * size
        pooled = pixels + patches * tower.width * size + 3 * rows * tower.width * size
        after = rows * projector_bytes(self.projector.spec, 1, rows, self.dtype, limits)
        return max(tower_bytes(tower, patches, None, self.dtype, limits), pooled, pixels + after)


def _tower(vision: Mapping[str, Any]) -> TowerSpec:
    side, rest = divmod(positive_int(vision, "image_size"), positive_int(vision, "patch_size"))
    if side % 2 or rest or vision.get("crop_size", vision["image_size"]) != vision["image_size"]:
        raise ConfigError("image_size of vision_config must be crop_size, and an even number of patches of patch_size pixels")
    features = feature_states(vision["feature_layer"], positive_int(vision, "num_hidden_layers"))
    vision = {**vision, "model_type": _ENCODER}
    return encoder_spec(vision, _ENCODER, table=TableSpec(side, fit="buckets"), features=features)


def _even(side: int) -> int:
    return side + side % 2


def _kept(full: int, rows: int, columns: int, tall: int, wide: int) -> list[tuple[int, int]]:
    """Return the patches of each tile without its padding, row by row. Tiles have `full` a side, the image `tall` x `wide`."""
    heights = [min(full, tall - full * row) for row in range(rows)]
    widths = [min(full, wide - full * column) for column in range(columns)]
    return [(height, width) for height in heights for width in widths]


def _averaged(shape: tuple[int, int], patches: Tensor) -> Tensor:
    """Average squares of two by two patches `[patches, width]` to `[rows, columns, width]`.

    The patches of `shape`, row by row, come before those that complete the squares: one right of each line of an odd length,
    then a line below an odd number.
    """
    tall, wide = shape
    inner, right, below = patches.split([tall * wide, wide % 2 * tall, tall % 2 * _even(wide)])
    plane = inner.view(tall, wide, -1)
    if len(right):
        plane = torch.cat((plane, right[:, None]), 1)
    if len(below):
        plane = torch.cat((plane, below[None]))
    squares: Tensor = plane.unflatten(0, (-1, 2)).unflatten(2, (-1, 2))
    return squares.mean((1, 3))
