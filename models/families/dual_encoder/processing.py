"""Input processing of CLIP, SigLIP and SigLIP 2: a prompt is a text or one image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ....callers.errors import ConfigError, InputError
from ....kernels.pixels.layout import PatchLayout
from ....mm.fields import BatchedField, FieldElem, FlatField
from ....mm.tiling.plan import TilingPolicy
from ....mm.tiling.whole import CenterCrop, FixedSize, PatchLimit
from ....mm.types import ImageItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ....processors.bases.attention_rules import PREFIX_LM
from ....processors.bases.tiles import TiledInfo, TileSpec, height_width, positive_int_or
from ....processors.files import ProcessorFiles
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, PixelSpec, patchify_crops, read_pixel_spec
from ....processors.retrieval import retrieval_template

_MAX_PATCHES = 1024  # of the memory plan
_SPECIALS = 2  # tokens that tokenizers add to an empty text, at most


class ClipProcessingInfo(TiledInfo):
    """ProcessingInfo of CLIP. The prompt of an image is one token, an id beyond the vocabulary, whose row is the vector.

    `pixels`: defaults of the image processor's JSON. `default_patch`: of the vision config.
    """

    rewrites_prompts = True
    modalities = ("image",)
    valid_kwargs = {"image": ("resample",)}
    text_config_defaults = {"vocab_size": 49408, "max_position_embeddings": 77}
    embeds_layout = None
    chat_template = retrieval_template("")
    takes_instruction = False
    pixels: ClassVar[PixelSpec] = PixelSpec()
    default_patch: ClassVar[int] = 32

    def __init__(self, files: ProcessorFiles, *kwargs: Mapping[str, Any]) -> None:
        super().__init__(files, *kwargs)
        self.placeholder_ids = {"image": positive_int_or(self.text_config, "vocab_size", 0)}

    def resolve_spec(self, modality: str) -> TileSpec:
        vision = self.files.config.get("vision_config") or {}
        patch = positive_int_or(vision, "patch_size", self.default_patch)
        spec = TileSpec(**vars(self.pixels), tiling=self.resolve_tiling(patch), patch=patch)
        return read_pixel_spec(self.files.image, spec, self.merged_kwargs[modality])

    def resolve_tiling(self, patch: int) -> TilingPolicy:
        """Return how an image is resized."""
        crop = height_width(self.files.image.get("crop_size") or 224, "crop_size")
        self.check_config("vision_config", image_size=crop[0])
        return CenterCrop(min(height_width(self.files.image.get("size") or 224)), crop)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        self.plan(header)  # refuses an image without pixels
        return ItemGeometry(1, 1, 1)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return `pixel_values` `[patches, 3 * patch^2]` and `grid` (1, h, w) in patches."""
        if not isinstance(item, ImageItem):
            raise TypeError(f"a {type(item).__name__} is not an image")
        spec, plan = self.specs["image"], self.plan(item.header)
        patches = patchify_crops(item.pixels[None], plan, spec, PatchLayout(spec.patch), dtype)
        shape = torch.tensor([1, *(side // spec.patch for side in plan.views[0].tile_size)])
        kwargs = {"pixel_values": FieldElem(patches, FlatField()), "grid": FieldElem(shape, BatchedField(keep_on_cpu=True))}
        return kwargs, ItemGeometry(1, 1, 1)

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Return the placeholder of an image instead of the special tokens of an empty text.

        Raises:
            InputError: the prompt has a text and an image, or several images.
        """
        if not items:
            return ids
        if items["image"] > 1 or len(ids) > _SPECIALS:
            raise InputError(
                "this model embeds a text or one image; give each text and each image as an input of its own",
                code="unsupported",
            )
        return [self.placeholder_ids["image"]]


class SiglipProcessingInfo(ClipProcessingInfo):
    """ProcessingInfo of SigLIP and SigLIP 2. A text is padded to all positions.

    SigLIP 2 may keep the aspect ratio of an image (NaFlex): it then has as many patches as the limit allows.
    """

    prompt_attention = PREFIX_LM
    text_config_defaults = {"vocab_size": 32000, "max_position_embeddings": 64}
    pixels = PixelSpec(IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD)
    default_patch = 16

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        self.keeps_ratio = files.config.get("model_type") == "siglip2"
        return replace(files, image={"resample": 2, **files.image}) if self.keeps_ratio else files

    def resolve_token_ids(self) -> None:
        settings = self.files.read_json("tokenizer_config.json")
        pad = settings.get("pad_token")
        pad = pad.get("content") if isinstance(pad, Mapping) else pad
        self.pad = self.special_token_id(pad) if isinstance(pad, str) else self.text_config.get("pad_token_id", 1)
        self.pads_left = settings.get("padding_side") == "left"

    def resolve_tiling(self, patch: int) -> TilingPolicy:
        if not self.keeps_ratio:
            size = height_width(self.files.image.get("size") or 224)
            self.check_config("vision_config", image_size=size[0])
            return FixedSize(size)
        most = positive_int_or(self.files.image, "max_num_patches", 256)
        if most > _MAX_PATCHES:
            raise ConfigError(f"max_num_patches is {most} in the preprocessor's JSON; give at most {_MAX_PATCHES}")
        return PatchLimit(patch, most)

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        if items:
            return super().preprocess_prompt(ids, items)
        padding = [self.pad] * (self.text_config["max_position_embeddings"] - len(ids))
        return [*padding, *ids] if self.pads_left else [*ids, *padding]
