"""What GLM-4.1V, GLM-4.6V and GLM-OCR are fed: pictures and clips at their own size, a time after each step. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..mm.geometry import SamplingPolicy
from ..mm.types import ItemGeometry
from .base import build_span
from .interface import Span
from .native import NativeInfo
from .patches import PatchSpec

_AREA = 28 * 28  # pixels of an embedding


class Glm4VProcessingInfo(NativeInfo):
    """ProcessingInfo of GLM-4.1V. Each temporal step of a clip has a picture's marks, and its time behind them as text."""

    slots = {"image": ("image_token_id", 151343), "video": ("video_token_id", 151344)}
    marks: tuple[int, int] = (151339, 151340)
    published = {"vocab_size": 151552, "hidden_size": 4096}
    patches = {
        "image": PatchSpec(min_pixels=112 * 112, max_pixels=15000 * _AREA, together=True),
        "video": PatchSpec(min_pixels=112 * 112, max_pixels=60000 * _AREA, together=True),
    }
    frames = SamplingPolicy(fps=2.0, max_frames=600)
    timed = 0.0

    def json(self, modality: str) -> Mapping[str, Any]:
        """The published sampler does not look at its `num_frames`."""
        json = super().json(modality)
        return {key: value for key, value in json.items() if key != "num_frames"} if json.get("fps") else json

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        if modality != "video":
            return super().span(modality, geometry)
        start, end = self.token("image_start_token_id", self.marks[0]), self.token("image_end_token_id", self.marks[1])
        rows = geometry.num_embeds // geometry.t
        pieces: list[tuple[int, ...] | int] = []
        for seconds in geometry.times:
            pieces += [(start,), rows, (end, *self.encode(self.written(seconds)))]
        return build_span(pieces, self.slot_ids["image"])

    def written(self, seconds: float) -> str:
        """A time as text."""
        return str(int(seconds))


class Glm46VProcessingInfo(Glm4VProcessingInfo):
    """ProcessingInfo of GLM-4.6V."""

    def written(self, seconds: float) -> str:
        return f"{seconds:.1f} seconds"


class GlmOcrProcessingInfo(Glm46VProcessingInfo):
    """ProcessingInfo of GLM-OCR."""

    slots = {"image": ("image_token_id", 59280), "video": ("video_token_id", 59281)}
    marks = (59256, 59257)
    published = {"vocab_size": 59392, "hidden_size": 1024}
