"""Input processing of InternVL: images as tiles of the best aspect ratio and a thumbnail, videos as one tile per frame."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ....callers.errors import ConfigError
from ....mm.geometry import FrameSampling, pixel_shuffle_side
from ....mm.media.policy import DecodeSpec
from ....mm.tiling.aspect import AspectTiles
from ....mm.tiling.whole import FixedSize
from ....mm.types import ItemGeometry
from ....processors.bases.base import insert_text_around
from ....processors.bases.text_placeholders import TextPlaceholders
from ....processors.bases.tiles import TILE_KWARGS, TiledInfo, TileSpec, height_width, positive_int_or
from ....processors.files import ProcessorFiles, find_template
from ....processors.images import read_pixel_spec
from ....processors.interface import Span
from ....processors.options import MAX_TILES, TIME_KWARGS, is_low_detail
from ....processors.spans import Piece, build_span

IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
IMAGE_KWARGS = (*TILE_KWARGS, "crop_to_patches", "max_patches", "min_patches")
DEFAULT_FRAMES = 8  # of a video, if neither the checkpoint nor the caller says
_SYSTEM = "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"


def chat_template(system: str, image: str) -> str:
    """Return the template of ChatML with a default system message. `image`: what stands for an image."""
    return (
        """
{%- if messages[0].role != 'system' -%}{{ '<|im_start|>system\\n"""
        + system
        + """<|im_end|>\\n' }}{%- endif -%}
{%- for m in messages -%}
  {{- '<|im_start|>' ~ m.role ~ '\\n' -}}
  {%- for part in ([{'type': 'text', 'text': m.content}] if m.content is string else m.content) -%}
    {%- if part.type == 'image' -%}{{ '"""
        + image
        + """\\n' }}
    {%- elif part.type == 'text' -%}{{ part.text }}
    {%- else -%}{{ raise_exception('this model takes text and images') }}{%- endif -%}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
    )


TEMPLATES = {"internvl2_5": chat_template(_SYSTEM, "<IMG_CONTEXT>")}
"""Chat templates by `template` of the publisher's config.json; the tokenizer's own templates do not support images."""

TEXT_ONLY = """
{{%- for m in messages if m.content is not string %}}{{% for part in m.content or () if part.type != 'text' -%}}
  {{{{ raise_exception({}) }}}}
{{%- endfor %}}{{% endfor %}}
"""
"""Prefix that makes a tokenizer's template refuse images, which it would silently drop."""


class InternVLProcessingInfo(TiledInfo):
    """ProcessingInfo of InternVL in the Hub's layout."""

    inserted = {"video": ("Frame", "")}
    element_format = "ref_box"
    modalities: tuple[str, ...] = ("image", "video")
    placeholders = {"image": ("image_token_id", 151667), "video": ("video_token_id", "<video>")}
    valid_kwargs = {
        "image": IMAGE_KWARGS,
        "video": (*TIME_KWARGS, "fps", "num_frames", "resample"),
    }

    def resolve_spec(self, modality: str) -> TileSpec:
        return resolve_tile_spec(self, modality, self._tiling)

    def _tiling(self, tile: tuple[int, int]) -> AspectTiles | FixedSize:
        return aspect_tiling(self, tile)

    def resolve_decode_spec(self) -> DecodeSpec:
        policy = self.sampling_policy("video", FrameSampling(spread="middle"), self.files.video)
        is_set = policy.fps is not None or policy.num_frames is not None
        return DecodeSpec(policy if is_set else replace(policy, max_frames=DEFAULT_FRAMES))

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Insert the first word before a video: it is tokenized together with the prompt's text."""
        return insert_text_around(ids, self.placeholder_ids["video"], "Frame", "", self.files) if items.get("video") else ids

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return `<img>`, the rows and `</img>`; for a video, the same for each frame after its number."""
        if modality == "image":
            return build_span(bracketed(self, geometry.num_embeds), self.placeholder_ids["image"])
        rows = geometry.num_embeds // geometry.t
        pieces: list[Piece] = []
        for number in range(1, geometry.t + 1):
            words = self.encode(f"{number}: " if number == 1 else f"\nFrame{number}: ")
            pieces += [words, *bracketed(self, rows)]
        return build_span(pieces, self.placeholder_ids["image"])

    def max_tiles_kwargs(self, tiles: int) -> Mapping[str, Any] | None:
        return limit_tiles(tiles)


class InternVLChatProcessingInfo(TiledInfo):
    """ProcessingInfo of InternVL in its publisher's layout: config.json says how images are cut, and Pillow resizes them.

    It has no placeholder for videos; give frames as images. `templates`: chat templates by `template` of config.json.
    """

    element_format = "ref_box"
    modalities = ("image",)
    placeholders = {"image": ("image_token_id", "<IMG_CONTEXT>")}
    valid_kwargs = {"image": IMAGE_KWARGS}
    default_kwargs = {"resample": "pillow"}
    templates: ClassVar[Mapping[str, str]] = TEMPLATES

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        """Write the values of config.json as the JSON of an image processor."""
        config = files.config
        if config.get("pad2square"):
            raise ConfigError("pad2square in config.json is not supported; take a newer checkpoint")
        image = {
            "size": config.get("force_image_size") or (config.get("vision_config") or {}).get("image_size", 224),
            "image_mean": IMAGENET_DEFAULT_MEAN,
            "image_std": IMAGENET_DEFAULT_STD,
            "min_patches": config.get("min_dynamic_patch", 1),
            "max_patches": config.get("max_dynamic_patch", 6) if config.get("dynamic_image_size", False) else 1,
        }
        return replace(files, image=image, config={**config, "text_config": config.get("llm_config") or {}})

    @property
    def chat_template(self) -> str | None:  # type: ignore[override]
        name = str(self.files.config.get("template"))
        template = find_template(self.files.folder) if self.files.folder else None
        if name in self.templates or template is None or str(self.placeholders["image"][1]) in template:
            return self.templates.get(name)
        reason = f"template {name[:60]!r} of config.json is unknown for images; <<give_template_or_prompt>>"
        return TEXT_ONLY.format(json.dumps(reason)) + template

    def resolve_spec(self, modality: str) -> TileSpec:
        return resolve_tile_spec(self, modality, self._tiling)

    def _tiling(self, tile: tuple[int, int]) -> AspectTiles | FixedSize:
        tiling = aspect_tiling(self, tile)
        thumbnail = bool(self.files.config.get("use_thumbnail", False))
        return tiling if isinstance(tiling, FixedSize) else replace(tiling, thumbnail=thumbnail)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        return build_span(bracketed(self, geometry.num_embeds), self.placeholder_ids["image"])

    def max_tiles_kwargs(self, tiles: int) -> Mapping[str, Any] | None:
        return limit_tiles(tiles)


class QianfanOcrProcessingInfo(TextPlaceholders, InternVLProcessingInfo):
    """ProcessingInfo of Qianfan-OCR: images only, which prompts spell as <image>."""

    modalities = ("image",)
    placeholders = {"image": InternVLProcessingInfo.placeholders["image"]}
    valid_kwargs = {"image": IMAGE_KWARGS}
    placeholder_texts = {"image": "<image>"}
    inserted = {}

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        """Read limits on tiles that the preprocessor JSON leaves out from config.json."""
        keys = {"min_patches": "min_dynamic_patch", "max_patches": "max_dynamic_patch"}
        limits = {key: files.config[name] for key, name in keys.items() if files.config.get(name) is not None}
        return replace(files, image={**limits, **files.image})

    def resolve_decode_spec(self) -> DecodeSpec:
        return DecodeSpec()


def resolve_tile_spec(
    info: TiledInfo, modality: str, tiling_of: Callable[[tuple[int, int]], AspectTiles | FixedSize]
) -> TileSpec:
    """Return the spec of an InternVL family; `tiling_of` returns the policy that cuts images into tiles of a size."""
    json = info.preprocessor_json(modality)
    vision = info.files.config.get("vision_config") or {}
    tile = height_width(json.get("size") or 384)
    if height_width(vision.get("image_size", tile)) != tile:
        reason = f"image_size in vision_config is {vision['image_size']}, but the {modality} processor's is {tile}"
        raise ConfigError(reason)
    merge = pixel_shuffle_side(info.files.config)
    tiling = tiling_of(tile) if modality == "image" else FixedSize(tile)
    spec = TileSpec(tiling=tiling, patch=height_width(vision.get("patch_size", 14))[0], merge=merge)
    return read_pixel_spec(json, spec, info.merged_kwargs[modality])


def aspect_tiling(info: TiledInfo, tile: tuple[int, int]) -> AspectTiles | FixedSize:
    """Return the policy that cuts images into tiles of this size."""
    # the published processor ignores crop_to_patches of its JSON
    options = {**info.files.image, "crop_to_patches": True, **info.merged_kwargs["image"]}
    if is_low_detail(options) or not options["crop_to_patches"]:
        return FixedSize(tile)
    most = positive_int_or(options, "max_patches", 12, MAX_TILES)
    return AspectTiles(tile, positive_int_or(options, "min_patches", 1), most)


def bracketed(info: TiledInfo, rows: int) -> list[Piece]:
    """Return `<img>`, the rows and `</img>`."""
    return [(info.special_token_id("<img>"),), rows, (info.special_token_id("</img>"),)]


def limit_tiles(tiles: int) -> Mapping[str, Any]:
    """Return options for at most this many tiles, of which the thumbnail is one."""
    return {"max_patches": max(1, tiles - 1), "min_patches": 1}
