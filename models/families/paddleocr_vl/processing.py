"""Input processing of PaddleOCR-VL: pages at native resolution, as flat patches of one frame."""

from __future__ import annotations

from ....processors.bases.native import IMAGE_KWARGS, NativeResolutionInfo
from ....processors.patches import PatchSpec


class PaddleOcrVLProcessingInfo(NativeResolutionInfo):
    """ProcessingInfo of PaddleOCR-VL. A side shorter than a merged patch is enlarged to one, keeping the aspect ratio."""

    element_format = "corner_tokens"
    ocr_prompts = ("paddleocr-chart", "paddleocr-formula", "paddleocr-table", "paddleocr-text")
    modalities = ("image",)
    valid_kwargs = {"image": IMAGE_KWARGS}
    placeholders = {"image": ("image_token_id", 100295)}
    text_config_defaults = {"vocab_size": 103424, "hidden_size": 1024}
    patch_specs = {"image": PatchSpec(temporal=1, min_pixels=384**2, max_pixels=1536**2, upscale_short_sides=True)}
