"""What GLM-4.1V to 4.6V and GLM-OCR are fed: pictures and clips at their own size, a time after each step. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ..mm.geometry import SamplingPolicy
from ..mm.media.policy import DecodeSpec
from ..mm.types import ItemGeometry
from .base import build_span
from .files import ProcessorFiles
from .interface import Span
from .native import NativeInfo
from .patches import PatchSpec

_AREA = 28 * 28  # pixels of an embedding


class Glm4VProcessingInfo(NativeInfo):
    """ProcessingInfo of GLM-4.1V. Each temporal step of a clip has a picture's marks, and its time behind them as text.

    One architecture, the mixture of experts, may come with this processor or the one of GLM-4.6V: a checkpoint whose JSON
    names that one gets it. Its slots have other published ids.
    """

    slots = {"image": ("image_token_id", 151343), "video": ("video_token_id", 151344)}
    marks: ClassVar[tuple[int, int]] = (151339, 151340)
    published = {"vocab_size": 151552, "hidden_size": 4096}
    patches = {
        "image": PatchSpec(min_pixels=112 * 112, max_pixels=15000 * _AREA, together=True),
        "video": PatchSpec(min_pixels=112 * 112, max_pixels=60000 * _AREA, together=True),
    }
    frames = SamplingPolicy(fps=2.0, spread="after")
    timed = 0.0
    unused: ClassVar[tuple[str, ...]] = ("num_frames",)  # of the preprocessor's JSON: the published sampler looks at others
    longest: ClassVar[float | None] = 300.0  # seconds of which frames are used at the full rate

    def __new__(cls, files: ProcessorFiles, *options: Mapping[str, Any]) -> Glm4VProcessingInfo:
        said = (files.video.get("video_processor_type"), files.image.get("image_processor_type"))
        later = cls is Glm4VProcessingInfo and any(str(name).startswith("Glm46V") for name in said)
        return super().__new__(Glm46VProcessingInfo if later else cls)

    def __init__(self, files: ProcessorFiles, *options: Mapping[str, Any]) -> None:
        if files.config.get("model_type") == "glm4v_moe":
            self.slots = {"image": ("image_token_id", 151363), "video": ("video_token_id", 151364)}
        super().__init__(files, *options)
        names = ("image_start_token_id", "image_end_token_id")
        self.start, self.end = (self.token(*both) for both in zip(names, self.marks, strict=True))

    def json(self, modality: str) -> Mapping[str, Any]:
        return {key: value for key, value in super().json(modality).items() if key not in self.unused}

    def decoding(self) -> DecodeSpec:
        """Frames are chosen one by one; a last step that lacks one repeats it."""
        sampling = replace(super().decoding().sampling, multiple=1)
        if self.longest is None or sampling.fps is None:
            return DecodeSpec(sampling)
        return DecodeSpec(
            replace(sampling, max_frames=int(self.json("video").get("max_duration", self.longest) * sampling.fps))
        )

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        if modality != "video":
            return super().span(modality, geometry)
        rows = geometry.num_embeds // geometry.t
        pieces: list[tuple[int, ...] | int] = []
        for seconds in geometry.times:
            pieces += [(self.start,), rows, (self.end, *self.encode(self.written(seconds)))]
        return build_span(pieces, self.slot_ids["image"])

    def written(self, seconds: float) -> str:
        """A time as text."""
        return str(int(seconds))


class Glm46VProcessingInfo(Glm4VProcessingInfo):
    """ProcessingInfo of GLM-4.6V. The longer a clip, the fewer of its frames are used in a second."""

    frames = SamplingPolicy(fps=1.0, max_frames=640, spread="after", paces=((30.0, 6.0), (300.0, 2.0)))
    unused = ("fps", "num_frames")
    longest = None

    def written(self, seconds: float) -> str:
        return f"{seconds:.1f} seconds"


class GlmOcrProcessingInfo(Glm46VProcessingInfo):
    """ProcessingInfo of GLM-OCR."""

    slots = {"image": ("image_token_id", 59280), "video": ("video_token_id", 59281)}
    marks = (59256, 59257)
    published = {"vocab_size": 59392, "hidden_size": 1024}
