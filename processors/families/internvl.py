"""What InternVL wants to be fed: tiles by best aspect ratio and a thumbnail; of clips a tile a frame. Knows no model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..mm.errors import ConfigError
from ..mm.geometry import SamplingPolicy
from ..mm.media.policy import DecodeSpec
from ..mm.tiling import AspectTiles, Fixed
from ..mm.types import ItemGeometry
from .base import build_span, with_words
from .files import ProcessorFiles, find_template
from .interface import Span
from .options import with_sampling
from .pictures import read_pixels, with_resample
from .tiles import DETAIL, MOST_PIECES, TiledInfo, TileSpec, is_low, number_of, pair

IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
FRAMES = 8  # of a clip, where neither the checkpoint nor the caller says


_SYSTEM = "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"
TEMPLATES = {
    "internvl2_5": """
{%- if messages[0].role != 'system' -%}{{ '<|im_start|>system\\n"""
    + _SYSTEM
    + """<|im_end|>\\n' }}{%- endif -%}
{%- for m in messages -%}
  {{- '<|im_start|>' ~ m.role ~ '\\n' -}}
  {%- for part in ([{'type': 'text', 'text': m.content}] if m.content is string else m.content) -%}
    {%- if part.type == 'image' -%}{{ '<IMG_CONTEXT>\\n' }}
    {%- elif part.type == 'text' -%}{{ part.text }}
    {%- else -%}{{ raise_exception('this model takes text and images') }}{%- endif -%}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
}
"""What `template` in the publisher's config.json names: that of the tokenizer knows no pictures."""

WORDS_ALONE = """
{{%- for m in messages if m.content is not string %}}{{% for part in m.content or () if part.type != 'text' -%}}
  {{{{ raise_exception({}) }}}}
{{%- endfor %}}{{% endfor %}}
"""
"""Before a tokenizer's template, which would leave pictures out."""


class InternVLProcessingInfo(TiledInfo):
    """ProcessingInfo of InternVL in the layout of the Hub."""

    modalities: tuple[str, ...] = ("image", "video")
    slots = {"image": ("image_token_id", 151667), "video": ("video_token_id", "<video>")}
    known = {
        "image": (*DETAIL, "crop_to_patches", "max_patches", "min_patches"),
        "video": ("fps", "max_duration", "num_frames", "resample"),
    }

    def read(self, modality: str) -> TileSpec:
        json = self.files.image if modality == "image" else self.files.video or self.files.image
        vision = self.files.config.get("vision_config") or {}
        tile = pair(json.get("size") or 384)
        if pair(vision.get("image_size", tile)) != tile:
            raise ConfigError(
                f"image_size in vision_config is {vision['image_size']}, but the {modality} processor's is {tile}"
            )
        merge = round(1 / self.files.config.get("downsample_ratio", 0.5))
        spec = read_pixels(json, TileSpec(tiling=Fixed(tile), patch=pair(vision.get("patch_size", 14))[0], merge=merge))
        for layer in self.layers[modality]:
            spec = with_resample(spec, layer)
        return replace(spec, tiling=self._tiling(tile)) if modality == "image" else spec

    def _tiling(self, tile: tuple[int, int]) -> AspectTiles | Fixed:
        options = {**self.files.image, "crop_to_patches": True}  # the published processor cuts whatever its JSON says
        for layer in self.layers["image"]:
            options |= layer
        if is_low(options) or not options["crop_to_patches"]:
            return Fixed(tile)
        most = number_of(options, "max_patches", 12, MOST_PIECES)
        return AspectTiles(tile, number_of(options, "min_patches", 1), most)

    def decoding(self) -> DecodeSpec:
        json = self.files.video
        own = with_sampling(SamplingPolicy(spread="middle"), {key: json.get(key) for key in ("fps", "num_frames")})
        policy = self.sampling("video", own)
        asked = policy.fps is not None or policy.num_frames is not None
        return DecodeSpec(policy if asked else replace(policy, max_frames=FRAMES))

    def prompt_ids(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """The first word before a clip, which is read together with the prompt's text."""
        return with_words(ids, self.slot_ids["video"], "Frame", "", self.files) if items.get("video") else ids

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """`<img>`, its rows, `</img>`; of a clip each frame so, with its number in front."""
        start, end = (self.special("<img>"),), (self.special("</img>"),)
        if modality == "image":
            return build_span([start, geometry.num_embeds, end], self.slot_ids["image"])
        rows = geometry.num_embeds // geometry.t
        pieces: list[tuple[int, ...] | int] = []
        for number in range(1, geometry.t + 1):
            words = self.encode(f"{number}: " if number == 1 else f"\nFrame{number}: ")
            pieces += [words, start, rows, end]
        return build_span(pieces, self.slot_ids["image"])

    def fewer(self, pieces: int) -> Mapping[str, Any] | None:
        """A thumbnail beside the tiles takes one."""
        return {"max_patches": max(1, pieces - 1), "min_patches": 1}


class InternVLChatProcessingInfo(InternVLProcessingInfo):
    """ProcessingInfo of InternVL in its publisher's own layout: config.json says how pictures are cut, Pillow resizes them.

    There is no token for clips; frames are given as pictures.
    """

    modalities = ("image",)
    slots = {"image": ("image_token_id", "<IMG_CONTEXT>")}
    known = {"image": InternVLProcessingInfo.known["image"]}

    def __init__(self, files: ProcessorFiles, *options: Mapping[str, Any]) -> None:
        config = files.config
        if config.get("pad2square"):
            raise ConfigError("pad2square in config.json is not supported; take a newer checkpoint")
        image = {
            "size": config.get("force_image_size") or (config.get("vision_config") or {}).get("image_size", 224),
            "image_mean": IMAGENET_MEAN,
            "image_std": IMAGENET_STD,
            "min_patches": config.get("min_dynamic_patch", 1),
            "max_patches": config.get("max_dynamic_patch", 6) if config.get("dynamic_image_size", False) else 1,
        }
        given = ({"resample": "pillow"}, *options)
        super().__init__(replace(files, image=image, config={**config, "text_config": config.get("llm_config") or {}}), *given)

    @property
    def template(self) -> str | None:  # type: ignore[override]
        name = str(self.files.config.get("template"))
        own = find_template(self.files.folder) if self.files.folder else None
        if name in TEMPLATES or own is None or str(self.slots["image"][1]) in own:
            return TEMPLATES.get(name)
        said = f"how template {name[:60]!r} of config.json writes pictures is unknown; pass chat_template= or a rendered prompt"
        return WORDS_ALONE.format(json.dumps(said)) + own

    def decoding(self) -> DecodeSpec:
        return DecodeSpec()

    def _tiling(self, tile: tuple[int, int]) -> AspectTiles | Fixed:
        made = super()._tiling(tile)
        return made if isinstance(made, Fixed) else replace(made, thumbnail=bool(self.files.config.get("use_thumbnail", False)))
