"""Input processing of HyperCLOVA X SEED Think: that of Qwen2-VL with other tokens."""

from __future__ import annotations

from ..qwen2_vl.processing import Qwen2VLProcessingInfo


class HyperClovaXV2ProcessingInfo(Qwen2VLProcessingInfo):
    """ProcessingInfo of HyperCLOVA X SEED Think."""

    element_format = ""
    ocr_prompts = ()
    placeholders = {"image": ("image_token_id", 128060), "video": ("video_token_id", 128061)}
