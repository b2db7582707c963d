"""Input processing of Bee and R-4B: that of LLaVA-OneVision without videos."""

from __future__ import annotations

from ..llava.config import PINPOINTS_384
from ..llava.processing import ONEVISION_KWARGS, SIGLIP_TOWER, LlavaNextProcessingInfo


class BeeProcessingInfo(LlavaNextProcessingInfo):
    """ProcessingInfo of Bee and R-4B."""

    placeholders = {"image": ("image_token_id", "image_token_index", "<image>")}
    valid_kwargs = {"image": ONEVISION_KWARGS}
    vision_defaults = SIGLIP_TOWER
    default_feature_strategy = "full"
    default_pinpoints = PINPOINTS_384
    default_aspect_ratio = "anyres_max_9"
