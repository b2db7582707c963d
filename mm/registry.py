"""The one registry table: architecture name -> its model and ProcessingInfo. Strings only; the engine resolves them."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError, hint


@dataclass(frozen=True)
class Architecture:
    """`"module:Class"` below the package, for the model and for the ProcessingInfo."""

    model: str
    processing: str


ARCHITECTURES: dict[str, Architecture] = {
    "Qwen2AudioForConditionalGeneration": Architecture(
        "models.qwen2_audio:Qwen2Audio", "processors.qwen2_audio:Qwen2AudioProcessingInfo"
    ),
    "Qwen2VLForConditionalGeneration": Architecture("models.qwen2_vl:Qwen2VL", "processors.qwen2_vl:Qwen2VLProcessingInfo"),
    "Qwen2_5_VLForConditionalGeneration": Architecture(
        "models.qwen2_vl:Qwen25VL", "processors.qwen2_vl:Qwen25VLProcessingInfo"
    ),
    "WhisperForConditionalGeneration": Architecture("models.whisper:Whisper", "processors.whisper:WhisperProcessingInfo"),
}


def find(name: str) -> Architecture:
    """The row of an architecture; ConfigError with the known ones for another name."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    raise ConfigError(f"unknown architecture {name!r}; {hint(name, ARCHITECTURES)}")
