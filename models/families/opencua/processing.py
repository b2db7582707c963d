"""Input processing of OpenCUA: that of Qwen2-VL for images, with another token."""

from __future__ import annotations

from ....processors.bases.native import IMAGE_KWARGS, NativeResolutionInfo
from ....processors.patches import PatchSpec


class OpenCUAProcessingInfo(NativeResolutionInfo):
    """ProcessingInfo of OpenCUA."""

    modalities = ("image",)
    valid_kwargs = {"image": IMAGE_KWARGS}
    can_keep_sizes = True
    placeholders = {"image": ("media_placeholder_token_id", 151664)}
    patch_specs = {"image": PatchSpec()}
