"""HunYuan-VL and HunYuan-OCR (arXiv 2511.19575): pages at native size, a learned row after each line, four position axes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....checkpoints.config import get_text_config, positive_int
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.builder import Builder
from ...layers.connectors import Projector, ProjectorSpec
from ...native_model import TENSORS
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from ...vision.positions import Grid
from ...vision.spec import TableSpec, TowerNames, TowerSpec
from ...vision.vit import VisionTower, tower_bytes

_VISION = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "num_channels": 3,
    "patch_size": 16, "spatial_merge_size": 2, "max_image_size": 2048, "hidden_act": "gelu", "rms_norm_eps": 1e-5,
}  # fmt: skip
_NAMES = TowerNames(
    patch="embeddings.patch_embedding",
    table="embeddings.position_embedding.weight",
    layers="layers",
    norms=("layer_norm1", "layer_norm2"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
)
_PUBLISHED = {
    "input_layernorm": "layer_norm1", "post_attention_layernorm": "layer_norm2", "mlp.dense_h_to_4h": "mlp.fc1",
    "mlp.dense_4h_to_h": "mlp.fc2", "proj.0": "proj_conv", "proj.2": "proj_out",
}  # fmt: skip
_PART = re.compile("|".join(rf"(?<=\.){re.escape(name)}(?=\.)" for name in _PUBLISHED))


class LineMerger(Projector):
    """Projects squares of patches, adds a row at each line's end, projects again, and puts a row before and after the image."""

    def __init__(self, spec: ProjectorSpec, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        build = Builder(self, dtype, device)
        self.parts = (  # in a tuple: their only names are the checkpoint's
            build.stored("image_newline", spec.out),
            build.stored("image_begin", hidden),
            build.stored("image_end", hidden),
            build.linear(["mlp"], spec.out, [hidden], True),
            build.norm("after_rms", hidden, spec.eps, False),
        )

    def merge(self, patches: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        """Merge `[patches, width]` in squares to `[lines * (columns + 1) + 2, hidden]` for each image."""
        newline, begin, end, last, norm = self.parts
        sizes = [(h * w // self.spec.group, w) for _, h, w in grids]
        side = int(self.spec.group**0.5)
        images = self(patches).split([count for count, _ in sizes])
        ended = []
        for image, (_, width) in zip(images, sizes, strict=True):
            lines = image.view(-1, width // side, image.shape[1])
            ended.append(torch.cat((lines, newline.weight.expand(len(lines), 1, -1)), 1).flatten(0, 1))
        rows = last(torch.cat(ended)).split([len(rows_of_image) for rows_of_image in ended])
        return [norm(torch.cat((begin.weight[None], rows_of_image, end.weight[None]))) for rows_of_image in rows]


class HunYuanVL(DecoderModel):
    """A model of images. The text config may be at the top level of config.json."""

    prefixes = (
        ("model.vision_tower.patch_merger.", "merger."),
        ("vision_tower.patch_merger.", "merger."),
        ("vit.perceive.", "merger."),
        ("model.vision_tower.", "tower."),
        ("vision_tower.", "tower."),
        ("vit.", "tower."),
        *TEXT_PREFIXES,
        ("model.", "language_model."),
    )
    ignored = ("merger.image_sep",)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(decoder_spec(_with_rope(config), STACKS["hunyuan_v1_dense"]), dtype, device)
        vision = {**_VISION, **(config.get("vision_config") or {})}
        width, patch = positive_int(vision, "hidden_size"), positive_int(vision, "patch_size")
        tower = TowerSpec(
            depth=positive_int(vision, "num_hidden_layers"),
            width=width,
            heads=positive_int(vision, "num_attention_heads"),
            inner=positive_int(vision, "intermediate_size"),
            patch_dim=positive_int(vision, "num_channels") * patch**2,
            act=vision["hidden_act"],
            merge=positive_int(vision, "spatial_merge_size"),
            eps=vision["rms_norm_eps"],
            table=TableSpec(positive_int(vision, "max_image_size") // patch, "bilinear"),
            names=_NAMES,
        )
        merger = ProjectorSpec(
            width,
            4 * width,
            ("proj_conv", "proj_out"),
            tower.merge**2,
            inner=2 * width,
            act=tower.act,
            norm="before_rms",
            eps=tower.eps,
            rms=True,
            channels_first=True,
        )
        self.tower = VisionTower(tower, dtype, device)
        self.merger = LineMerger(merger, self.hidden_size, dtype, device)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Drop the class token's position, and rename the publisher's layers."""
        for name, tensor in weights:
            stored = _PART.sub(lambda part: _PUBLISHED[part[0]], name) if name.startswith("vit.") else name
            yield stored, tensor[1:] if stored.endswith("embeddings.position_embedding.weight") else tensor

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        pixels, grid = (tensors[name] for name in TENSORS[modality])
        grids = [(int(t), int(h), int(w)) for t, h, w in grid.tolist()]
        return self.merger.merge(self.tower(pixels, grids)[-1], grids)

    def input_bytes(self, modality: str, rows: int) -> int:
        return self._max_patches(rows) * self.tower.spec.patch_dim * self.dtype.itemsize

    def _max_patches(self, rows: int) -> int:
        """Return the most patches for `rows` rows: an image of one line has three rows that are no patches."""
        return max(1, rows - 3) * self.merger.spec.group

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        merger, size = self.merger.spec, self.dtype.itemsize
        tower = tower_bytes(self.tower.spec, self._max_patches(rows), merger, self.dtype, limits)
        lines = rows * size * (2 * merger.out + 3 * self.hidden_size)
        return max(tower, self.input_bytes(modality, rows) + lines)


def _with_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with a text section whose rotary positions have transformers' names; the publisher's are its own.

    The publisher's `num_experts` of 1 means that there are no experts.
    """
    text = dict(get_text_config(config))
    if text.get("num_experts") == 1:
        del text["num_experts"]
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    if rope.get("xdrope_section"):
        rope["mrope_section"] = rope.pop("xdrope_section")
    for key in ("type", "rope_type"):
        if rope.get(key) == "xdrope":
            rope[key] = "dynamic"
    head = {"head_dim": text["attention_head_dim"]} if text.get("attention_head_dim") else {}
    return {"tie_word_embeddings": True, **config, "text_config": {**head, **text, "rope_parameters": rope}}
