"""Input processing of EXAONE 4.5: that of Qwen2-VL with other tokens."""

from __future__ import annotations

from ..qwen2_vl.processing import Qwen2VLProcessingInfo


class Exaone45ProcessingInfo(Qwen2VLProcessingInfo):
    """ProcessingInfo of EXAONE 4.5."""

    element_format = ""
    ocr_prompts = ()
    placeholders = {"image": ("image_token_id", 67), "video": ("video_token_id", 68)}
