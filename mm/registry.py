"""The model registry: architecture name -> model and ProcessingInfo classes, as strings that the engine resolves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from .errors import ConfigError


@dataclass(frozen=True)
class Architecture:
    """Classes of a model family, in `models/<folder>/<family>.py` and `processors/<folder>/<family>.py`."""

    family: str
    model_class: str
    info_class: str
    folder: str = "families"

    @property
    def model(self) -> str:
        """`"module:Class"` of the model, below the package."""
        return f"models.{self.folder}.{self.family}:{self.model_class}"

    @property
    def processing(self) -> str:
        """`"module:Class"` of the ProcessingInfo, below the package."""
        return f"processors.{self.folder}.{self.family}:{self.info_class}"


@dataclass(frozen=True)
class FamilyNote:
    """Notes on a family for docs/models.md. `other_tests`: tests besides the parity suite."""

    features: str
    limits: str = ""
    other_tests: str = ""


@dataclass(frozen=True)
class CheckpointLayout:
    """A publisher's own checkpoint layout.

    Args:
        reader: "module:function" that reads the publisher's config file and returns `(kind, config in the Hub's layout)`.
        architectures: kind -> key of ARCHITECTURES.
    """

    reader: str
    architectures: Mapping[str, str]


ARCHITECTURES: dict[str, Architecture] = {
    "DeepseekOCR2ForCausalLM": Architecture("deepseek_ocr2", "DeepseekOcr2", "DeepseekOcr2ProcessingInfo"),
    "DeepseekOCRForCausalLM": Architecture("deepseek_ocr2", "DeepseekOcr", "DeepseekOcrProcessingInfo"),
    "DeepseekOcr2ForConditionalGeneration": Architecture("deepseek_ocr2", "DeepseekOcr2", "DeepseekOcr2ProcessingInfo"),
    "Ernie4_5_VLMoeForConditionalGeneration": Architecture("ernie4_5_vl", "Ernie45VL", "Ernie45VLProcessingInfo"),
    "Ernie4_5_VL_MoeForConditionalGeneration": Architecture("ernie4_5_vl", "Ernie45VL", "Ernie45VLProcessingInfo"),
    "Gemma3ForConditionalGeneration": Architecture("gemma3", "Gemma3", "Gemma3ProcessingInfo"),
    "Glm46VForConditionalGeneration": Architecture("glm4v", "Glm4V", "Glm46VProcessingInfo"),
    "Glm4vMoeForConditionalGeneration": Architecture("glm4v", "Glm4VMoe", "Glm4VProcessingInfo"),
    "Glm4vForConditionalGeneration": Architecture("glm4v", "Glm4V", "Glm4VProcessingInfo"),
    "GlmAsrForConditionalGeneration": Architecture("glmasr", "GlmAsr", "GlmAsrProcessingInfo"),
    "GlmOcrForConditionalGeneration": Architecture("glm4v", "GlmOcr", "GlmOcrProcessingInfo"),
    "Idefics2ForConditionalGeneration": Architecture("idefics2", "Idefics2", "Idefics2ProcessingInfo"),
    "Idefics3ForConditionalGeneration": Architecture("idefics3", "Idefics3", "Idefics3ProcessingInfo"),
    "GraniteSpeechForConditionalGeneration": Architecture("granite_speech", "GraniteSpeech", "GraniteSpeechProcessingInfo"),
    "Granite4VisionForConditionalGeneration": Architecture("granite4_vision", "Granite4Vision", "Granite4VisionProcessingInfo"),
    "InternVLChatModel": Architecture("internvl", "InternVLChat", "InternVLChatProcessingInfo"),
    "InternVLForConditionalGeneration": Architecture("internvl", "InternVL", "InternVLProcessingInfo"),
    "KimiK25ForConditionalGeneration": Architecture("kimi_k25", "KimiK25", "KimiK25ProcessingInfo"),
    "Kimi_K25ForConditionalGeneration": Architecture("kimi_k25", "KimiK25", "KimiK25ProcessingInfo"),
    "LightOnOcrForConditionalGeneration": Architecture("lighton_ocr", "LightOnOcr", "LightOnOcrProcessingInfo"),
    "LlavaForConditionalGeneration": Architecture("llava", "Llava", "LlavaProcessingInfo"),
    "LlavaForConditionalGeneration/pixtral": Architecture("pixtral", "Pixtral", "PixtralProcessingInfo"),
    "LlavaNextForConditionalGeneration": Architecture("llava", "LlavaNext", "LlavaNextProcessingInfo"),
    "LlavaOnevisionForConditionalGeneration": Architecture("llava", "LlavaOnevision", "LlavaOnevisionProcessingInfo"),
    "Mistral3Consolidated": Architecture("pixtral", "Mistral3Consolidated", "MistralFormatProcessingInfo"),
    "Mistral3ForConditionalGeneration": Architecture("pixtral", "Mistral3", "Mistral3ProcessingInfo"),
    "PaddleOCRVLForConditionalGeneration": Architecture("paddleocr_vl", "PaddleOcrVL", "PaddleOcrVLProcessingInfo"),
    "PaliGemmaForConditionalGeneration": Architecture("paligemma", "PaliGemma", "PaliGemmaProcessingInfo"),
    "PixtralConsolidated": Architecture("pixtral", "PixtralConsolidated", "MistralFormatProcessingInfo"),
    "Qwen2AudioForConditionalGeneration": Architecture("qwen2_audio", "Qwen2Audio", "Qwen2AudioProcessingInfo"),
    "Qwen2VLForConditionalGeneration": Architecture("qwen2_vl", "Qwen2VL", "Qwen2VLProcessingInfo"),
    "Qwen2_5OmniForConditionalGeneration": Architecture("qwen2_5_omni", "Qwen25Omni", "Qwen25OmniProcessingInfo"),
    "Qwen2_5OmniModel": Architecture("qwen2_5_omni", "Qwen25Omni", "Qwen25OmniProcessingInfo"),
    "Qwen2_5OmniThinkerForConditionalGeneration": Architecture("qwen2_5_omni", "Qwen25Omni", "Qwen25OmniProcessingInfo"),
    "Qwen2_5_VLForConditionalGeneration": Architecture("qwen2_vl", "Qwen25VL", "Qwen25VLProcessingInfo"),
    "Qwen3ASRForConditionalGeneration": Architecture("qwen3_asr", "Qwen3ASR", "Qwen3ASRProcessingInfo"),
    "Qwen3OmniMoeForConditionalGeneration": Architecture("qwen3_omni", "Qwen3Omni", "Qwen3OmniProcessingInfo"),
    "Qwen3OmniMoeThinkerForConditionalGeneration": Architecture("qwen3_omni", "Qwen3Omni", "Qwen3OmniProcessingInfo"),
    "Qwen3VLForConditionalGeneration": Architecture("qwen3_vl", "Qwen3VL", "Qwen3VLProcessingInfo"),
    "Qwen3VLMoeForConditionalGeneration": Architecture("qwen3_vl", "Qwen3VL", "Qwen3VLProcessingInfo"),
    "SmolVLMForConditionalGeneration": Architecture("idefics3", "Idefics3", "SmolVLMProcessingInfo"),
    "UltravoxModel": Architecture("ultravox", "Ultravox", "UltravoxProcessingInfo"),
    "VoxtralConsolidated": Architecture("voxtral", "VoxtralConsolidated", "VoxtralProcessingInfo"),
    "VoxtralForConditionalGeneration": Architecture("voxtral", "Voxtral", "VoxtralProcessingInfo"),
    "WhisperForConditionalGeneration": Architecture("whisper", "Whisper", "WhisperProcessingInfo"),
}

NOTES: dict[str, FamilyNote] = {
    "deepseek_ocr2": FamilyNote(
        "SAM features, then CLIP (DeepSeek-OCR) or a decoder with learned queries (DeepSeek-OCR 2); tiles by the best aspect "
        "ratio, the whole image padded to a square; the Hub's layout and the publisher's own"
    ),
    "ernie4_5_vl": FamilyNote(
        "frames merged in pairs, separate experts for images and videos, timestamps drawn onto frames", "sides up to 200:1"
    ),
    "gemma3": FamilyNote(
        "bidirectional attention within an image, sliding windows in most layers, norms before and after each sublayer; "
        "pan and scan"
    ),
    "glm4v": FamilyNote(
        "timestamps between frames as text, rotary positions on half of a head, norms before and after each sublayer, or "
        "experts; the OCR model with its own tower"
    ),
    "glmasr": FamilyNote("transcribes speech; rotary positions in the tower, rows stacked by four", "630 s per audio"),
    "granite4_vision": FamilyNote("query transformer outputs added after several layers (DeepStack); grids of tiles"),
    "granite_speech": FamilyNote("conformer, a query transformer over windows of rows; an adapter for prompts with audio"),
    "idefics2": FamilyNote(
        "quarters of an image and the whole image, each at its own size; a perceiver resampler makes the rows"
    ),
    "idefics3": FamilyNote("rows of tiles with text tags, pixel shuffle"),
    "internvl": FamilyNote(
        "tiles by the best aspect ratio, thumbnail, pixel shuffle; the Hub's layout and the publisher's own",
        "12 tiles per image by default; no videos in the publisher's layout",
    ),
    "kimi_k25": FamilyNote(
        "images and timed chunks of videos in one stream, frames of a chunk averaged, latent attention, grouped experts",
        "4 frames per chunk",
    ),
    "lighton_ocr": FamilyNote("pages at native resolution; incomplete squares of merged patches are dropped; no break tokens"),
    "llava": FamilyNote("one or several encoder layers of CLIP or SigLIP; grids of tiles with newline rows; pooled videos"),
    "paddleocr_vl": FamilyNote("pages at native resolution; text config nested or at the top level", "sides up to 200:1"),
    "paligemma": FamilyNote("images before the prompt, without placeholders; bidirectional attention in the prompt"),
    "pixtral": FamilyNote("2-D rotary tower, row breaks in the span, patch merger; the Hub's layout and the publisher's own"),
    "qwen2_5_omni": FamilyNote(
        "images, videos and audio together; timestamps as positions; text output only", "5 minutes per audio"
    ),
    "qwen2_audio": FamilyNote("Whisper's tower, rows averaged in pairs", "30 s per audio"),
    "qwen2_vl": FamilyNote("M-RoPE; windows in the tower and seconds as positions (2.5)", "sides up to 200:1"),
    "qwen3_asr": FamilyNote("transcribes speech; linear M-RoPE"),
    "qwen3_omni": FamilyNote(
        "images, videos and audio together; DeepStack, experts; text output only",
        "40 minutes per audio",
    ),
    "qwen3_vl": FamilyNote(
        "DeepStack, interleaved M-RoPE, timestamps as text, experts; `embed` and `score`",
        "2048 frames per video; sides up to 200:1",
        "tests/pipelines/test_rank.py (vectors and scores)",
    ),
    "ultravox": FamilyNote("rows stacked by eight, any decoder", "all weights in one checkpoint"),
    "voxtral": FamilyNote(
        "windows of 30 s, padded with silence; prompts and transcriptions as mistral-common writes them; "
        "the Hub's layout and the publisher's own"
    ),
    "whisper": FamilyNote(
        "encoder-decoder: cross-attention, language and task tokens, timestamp rules",
        "30 s per audio",
        "tiny.en's real weights on real speech",
    ),
}


CHECKPOINT_LAYOUTS: dict[str, CheckpointLayout] = {
    "params.json": CheckpointLayout(
        "models.consolidated:hub_config",
        {"images": "PixtralConsolidated", "merged images": "Mistral3Consolidated", "audio": "VoxtralConsolidated"},
    )
}
"""Files that replace config.json in a publisher's own layout."""


def architecture_key(architecture: str, config: Mapping[str, Any]) -> str:
    """Return the key of ARCHITECTURES: "Architecture/vision model type" if there is one, else the architecture."""
    name = f"{architecture}/{(config.get('vision_config') or {}).get('model_type')}"
    return name if name in ARCHITECTURES else architecture


def find_architecture(name: str) -> Architecture:
    """Return the entry of an architecture; ConfigError with the nearest known name if there is none."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    near = get_close_matches(name, ARCHITECTURES, n=1, cutoff=0.5)
    meant = f"did you mean {near[0]}? The" if near else "the"
    raise ConfigError(f"unknown architecture {name!r}; {meant} known ones are in docs/models.md")
