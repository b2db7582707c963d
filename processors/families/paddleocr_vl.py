"""What PaddleOCR-VL wants to be fed: pages at their own size, as flat patches of one frame. Knows no model."""

from __future__ import annotations

from .native import PIXELS, NativeInfo
from .patches import PatchSpec


class PaddleOcrVLProcessingInfo(NativeInfo):
    """ProcessingInfo of PaddleOCR-VL. A side shorter than a merged patch is enlarged to one, and the other with it."""

    modalities = ("image",)
    known = {"image": PIXELS}
    slots = {"image": ("image_token_id", 100295)}
    published = {"vocab_size": 103424, "hidden_size": 1024}
    patches = {"image": PatchSpec(temporal=1, min_pixels=384**2, max_pixels=1536**2, enlarge=True)}
