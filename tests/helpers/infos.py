"""The ProcessingInfo of every family with its defaults, without a checkpoint, and small items of every modality."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kokoro_files
import numpy as np
from sensorium.engine.model_files import resolve
from sensorium.models.registry import native_architectures
from sensorium.processors.files import ProcessorFiles

ARCHITECTURES = native_architectures()

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "AriaProcessingInfo": {"vision_config": {"patch_size": 14}},
    "ColModernVBertProcessingInfo": {"vision_config": {"image_size": 364}, "additional_vocab_size": 40},
    "EagleVLProcessingInfo": {"vision_config": {"image_size": 448}},
    "Gemma3ProcessingInfo": {"mm_tokens_per_image": 49},
    "Gemma4ProcessingInfo": {"vision_config": {}, "audio_config": {}},
    "Gemma4UnifiedProcessingInfo": {"vision_config": {}, "audio_config": {}},
    "Granite4VisionProcessingInfo": {"downsample_rate": "4/8", "image_grid_pinpoints": [[224, 448], [448, 224]]},
    "Idefics2ProcessingInfo": {"vision_config": {"image_size": 980}},
    "Idefics3ProcessingInfo": {"vision_config": {"image_size": 364}},
    "SmolVLMProcessingInfo": {"vision_config": {"image_size": 364}},
    "KokoroProcessingInfo": kokoro_files.CONFIG,
    "LlavaProcessingInfo": {"vision_config": {"image_size": 224}},
    "MiniCPMOProcessingInfo": {"vocab_size": 1000, "version": 4.5},  # packs frames of videos; MiniCPMV has an older version
    "MiniCPMVProcessingInfo": {"vocab_size": 1000},
    "Ovis2ProcessingInfo": {"vision_config": {"image_size": 384}},
    "Ovis25ProcessingInfo": {"llm_config": {"vocab_size": 1000}},
    "RawTensorInfo": {
        "pretrained_cfg": {
            "input": {"data": {"pixel_values": {"type": "torch.Tensor", "shape": [6, 512, 512]}}},
            "model": {"init_args": {"model_args": {"num_classes": 2}}},
        }
    },
    "LlavaNextVideoProcessingInfo": {
        "vision_config": {"image_size": 224, "patch_size": 14},
        "image_grid_pinpoints": [[224, 448], [448, 448]],
    },
    "TarsierProcessingInfo": {"vision_config": {"image_size": 224}},
}
"""config.json of families whose defaults contradict each other."""
IMAGE_OPTIONS = {
    "KimiVLProcessingInfo": {"pad_input": True},
    "LlavaNextVideoProcessingInfo": {
        "size": {"shortest_edge": 224},
        "crop_size": 224,
        "image_grid_pinpoints": [[224, 448], [448, 448]],
    },
}
"""Preprocessor JSON of families whose defaults refuse an item of ITEMS, or contradict the config."""
AUDIO_OPTIONS = {"FireRedAsr2ProcessingInfo": {"means": [0.0] * 80, "inverse_std_variences": [1.0] * 80}}
"""Feature extractor JSON of families that have no defaults for it."""

ITEMS: dict[str, list[Any]] = {
    "image": [np.zeros((60, 40, 3), np.uint8), np.zeros((40, 500, 3), np.uint8)],
    "video": [(np.zeros((120, 8, 8, 3), np.uint8), {"fps": 30.0})],  # 4 s
    "audio": [(np.zeros(16_000, np.float32), 16_000)],
}
ITEMS["text"] = []  # of an encoder: made from the prompt
ITEMS["vision_chunk"] = [{"type": name, name: data} for name in ("image", "video") for data in ITEMS[name]]


def info_of(processing: str) -> Any:
    """Return a family's ProcessingInfo with its defaults and a tokenizer that writes 1 for every four letters."""
    name, special = processing.rpartition(":")[2], dict[str, int]()
    files = ProcessorFiles(
        config=CONFIGS.get(name, {}),
        image=IMAGE_OPTIONS.get(name, {}),
        audio=AUDIO_OPTIONS.get(name, {}),
        encode=lambda text: [1] * -(-len(text) // 4),
        decode=lambda ids: "text" * list(ids).count(1),
        token_to_id=lambda text: special.setdefault(text, 2 + len(special)),
    )
    return resolve(processing)(files)


PROCESSING = sorted({row.processing for row in ARCHITECTURES.values()})
INFOS = {processing.rpartition(":")[2]: info_of(processing) for processing in PROCESSING}
