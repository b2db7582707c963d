"""Input processing of Llama-Nemotron-Embed-VL and its reranker: the tiles of Llama-Nemotron-Nano-VL.

Source: vLLM's nemotron_vl.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....processors.bases.attention_rules import PREFIX_LM
from ....processors.bases.tiles import TILE_KWARGS
from ....processors.files import ProcessorFiles
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD
from ....processors.retrieval import retrieval_template
from ..nemotron_vl.processing import LlamaNemotronVLProcessingInfo


class NemotronEmbedProcessingInfo(LlamaNemotronVLProcessingInfo):
    """ProcessingInfo of Llama-Nemotron-Embed-VL and its reranker. Prompts are as callers write them."""

    placeholders = {"image": ("img_context_token_id", "<IMG_CONTEXT>")}
    valid_kwargs: Mapping[str, Any] = {"image": (*TILE_KWARGS, "max_num_tiles")}
    prompt_attention = PREFIX_LM
    takes_instruction = False
    chat_template = retrieval_template("<IMG_CONTEXT>")

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        """Read the numbers of tiles, which stand in processor_config.json, or else in config.json."""
        settings, config = files.read_json("processor_config.json"), files.config
        least, most = (settings.get(f"{name}_input_tiles", config.get(f"{name}_dynamic_patch", 1)) for name in ("min", "max"))
        if not settings.get("dynamic_image_size", config.get("dynamic_image_size", True)):
            least = most = 1
        image = {"image_mean": IMAGENET_STANDARD_MEAN, "image_std": IMAGENET_STANDARD_STD, "use_thumbnail": True}
        files = replace(files, image={**image, "min_num_tiles": least, "max_num_tiles": most})
        vision = config.get("vision_config") or {}
        return super().prepare_files(replace(files, config={**config, "patch_size": vision.get("patch_size", 16)}))
