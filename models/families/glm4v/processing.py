"""Input processing of GLM-4.1V to 4.6V and GLM-OCR: images and videos at native resolution, a timestamp after each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ....mm.geometry import FrameSampling
from ....mm.media.policy import DecodeSpec
from ....mm.types import ItemGeometry
from ....processors.bases.native import IMAGE_AND_VIDEO_KWARGS, NativeResolutionInfo
from ....processors.interface import Span
from ....processors.patches import PatchSpec
from ....processors.spans import Piece, build_span

_PIXELS_PER_ROW = 28 * 28


@dataclass(frozen=True)
class VideoStyle:
    """Video sampling and timestamp format of one generation of the published processors.

    `ignored_keys`: keys of the preprocessor's JSON that the published sampler does not read. `full_rate_seconds`: a longer
    video uses as many frames as one of this length; None: no such limit.
    """

    frame_sampling: FrameSampling
    ignored_keys: tuple[str, ...]
    full_rate_seconds: float | None
    format_timestamp: Callable[[float], str]


GLM_4_1V = VideoStyle(FrameSampling(fps=2.0, spread="after"), ("num_frames",), 300.0, lambda seconds: str(int(seconds)))
GLM_4_6V = VideoStyle(
    FrameSampling(fps=1.0, max_frames=640, spread="after", fps_by_duration=((30.0, 6.0), (300.0, 2.0))),
    ("fps", "num_frames"),
    None,
    lambda seconds: f"{seconds:.1f} seconds",
)


class Glm4VProcessingInfo(NativeResolutionInfo):
    """ProcessingInfo of GLM-4.1V. Each temporal step of a video is written as an image, followed by its timestamp.

    The mixture-of-experts model has other placeholders. Its preprocessor's JSON says whether it uses this processor or that of
    GLM-4.6V.
    """

    can_keep_sizes = True
    placeholders = {"image": ("image_token_id", 151343), "video": ("video_token_id", 151344)}
    start_and_end: ClassVar[tuple[int, int]] = (151339, 151340)  # published ids of the tokens around an image
    text_config_defaults = {"vocab_size": 151552, "hidden_size": 4096}
    patch_specs = {
        "image": PatchSpec(min_pixels=112 * 112, max_pixels=15000 * _PIXELS_PER_ROW, bounds_all_frames=True),
        "video": PatchSpec(min_pixels=112 * 112, max_pixels=60000 * _PIXELS_PER_ROW, bounds_all_frames=True),
    }
    timestamp_position = 0.0
    valid_kwargs = {  # the rule "after" has no bounds of its own
        **IMAGE_AND_VIDEO_KWARGS,
        "video": tuple(name for name in IMAGE_AND_VIDEO_KWARGS["video"] if name not in ("max_frames", "min_frames")),
    }

    def placeholder_keys(self) -> Mapping[str, tuple[str | int, ...]]:
        if self.files.config.get("model_type") == "glm4v_moe":
            return {"image": ("image_token_id", 151363), "video": ("video_token_id", 151364)}
        return self.placeholders

    def resolve_token_ids(self) -> None:
        start, end = self.start_and_end
        self.start = self.config_token_id("image_start_token_id", start)
        self.end = self.config_token_id("image_end_token_id", end)

    @property
    def style(self) -> VideoStyle:
        """The style that the preprocessor's JSON names."""
        types = (self.files.video.get("video_processor_type"), self.files.image.get("image_processor_type"))
        return GLM_4_6V if any(str(name).startswith("Glm46V") for name in types) else GLM_4_1V

    @property
    def frame_sampling(self) -> FrameSampling:  # type: ignore[override]
        return self.style.frame_sampling

    def preprocessor_json(self, modality: str) -> Mapping[str, Any]:
        json = super().preprocessor_json(modality)
        return {key: value for key, value in json.items() if key not in self.style.ignored_keys}

    def resolve_decode_spec(self) -> DecodeSpec:
        """Sample any number of frames, not only full steps: `process` repeats the last frame to fill the last step."""
        sampling = replace(super().resolve_decode_spec().sampling, multiple=1)
        longest = self.style.full_rate_seconds
        if longest is None or sampling.fps is None:
            return DecodeSpec(sampling)
        longest = self.preprocessor_json("video").get("max_duration", longest)
        return DecodeSpec(replace(sampling, max_frames=max(1, int(longest * sampling.fps))))

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        if modality != "video":
            return super().span(modality, geometry)
        rows = geometry.num_embeds // geometry.t
        pieces: list[Piece] = []
        for seconds in geometry.times:
            pieces += [(self.start,), rows, (self.end, *self.encode(self.style.format_timestamp(seconds)))]
        return build_span(pieces, self.placeholder_ids["image"])


class Glm46VProcessingInfo(Glm4VProcessingInfo):
    """ProcessingInfo of GLM-4.6V. Longer videos use fewer frames per second."""

    style = GLM_4_6V


class GlmOcrProcessingInfo(Glm4VProcessingInfo):
    """ProcessingInfo of GLM-OCR."""

    ocr_prompts = ("glm-formula", "glm-table", "glm-text")
    placeholders = {"image": ("image_token_id", 59280), "video": ("video_token_id", 59281)}
    start_and_end = (59256, 59257)
    text_config_defaults = {"vocab_size": 59392, "hidden_size": 1024}
    style = GLM_4_6V
