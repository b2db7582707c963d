"""Input processing of dots.ocr: pages at native resolution, as flat patches of one frame."""

from __future__ import annotations

from ....processors.bases.native import IMAGE_KWARGS, NativeResolutionInfo
from ....processors.patches import PatchSpec


class DotsOcrProcessingInfo(NativeResolutionInfo):
    """ProcessingInfo of dots.ocr."""

    element_format = "resized_json"
    ocr_prompts = ("dots-layout",)
    modalities = ("image",)
    valid_kwargs = {"image": IMAGE_KWARGS}
    placeholders = {"image": ("image_token_id", 151665)}
    patch_specs = {"image": PatchSpec(temporal=1, min_pixels=56 * 56, max_pixels=11_289_600)}
