"""Input processing of Ernie-4.5-VL: images and videos at native resolution; timestamps are drawn onto frames of videos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ....callers.errors import ConfigError
from ....mm.embeddings import EmbeddingSpec
from ....mm.geometry import FrameSampling
from ....mm.types import EmbeddingItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem, VideoItem
from ....processors.bases.native import NativeResolutionInfo
from ....processors.interface import Span
from ....processors.patches import PatchSpec
from ....processors.spans import build_span

TEMPORAL_MERGE = 2  # frames that are merged to one temporal step
_PIXELS_PER_ROW = 28 * 28
_BLACK, _WHITE = (0, 0, 0), (255, 255, 255)


class Ernie45VLProcessingInfo(NativeResolutionInfo):
    """ProcessingInfo of Ernie-4.5-VL. An item's span includes its start and end tokens: the vision experts compute them too.

    A prompt may contain these tokens or leave them out.
    """

    rewrites_prompts = True
    placeholders = {"image": ("image_token_id", "im_patch_id", 100295), "video": ("video_token_id", 103367)}
    start_and_end: ClassVar[Mapping[str, tuple[int, int]]] = {"image": (101304, 101305), "video": (101306, 101307)}
    text_config_defaults = {"vocab_size": 103424, "hidden_size": 2560}
    patch_specs = {
        "image": PatchSpec(temporal=1, max_pixels=6177 * _PIXELS_PER_ROW),
        "video": PatchSpec(temporal=1, min_pixels=299 * _PIXELS_PER_ROW, max_pixels=1196 * _PIXELS_PER_ROW),
    }
    frame_sampling = FrameSampling(min_frames=16, max_frames=180)

    def preprocessor_json(self, modality: str) -> Mapping[str, Any]:
        """Return the JSON without `temporal_patch_size`, which counts the frames that the model merges: a patch covers one."""
        json = super().preprocessor_json(modality)
        if modality == "video" and json.get("temporal_patch_size", TEMPORAL_MERGE) != TEMPORAL_MERGE:
            raise ConfigError(f"temporal_patch_size is {json['temporal_patch_size']}; only {TEMPORAL_MERGE} is supported")
        return {key: value for key, value in json.items() if key != "temporal_patch_size"}

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        grid = super().geometry(header)
        return grid if header.frames is None else replace(grid, t=grid.t + grid.t % TEMPORAL_MERGE, merge_t=TEMPORAL_MERGE)

    def embeds_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        """Return the grid; for a video, its `t` counts frames."""
        grid = super().embeds_geometry(item)
        return replace(grid, merge_t=TEMPORAL_MERGE) if item.modality == "video" else grid

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Draw timestamps onto the frames of a video, and repeat the last frame if their number is odd."""
        if not isinstance(item, VideoItem):
            return super().process(item, dtype)
        frames, json = item.frames, self.preprocessor_json("video")
        if json.get("draw_on_frames", True):
            frames = draw_timestamps(frames, item.plan.timestamps, self._font(json.get("font") or "Roboto-Regular.ttf"))
        return super().process(
            replace(item, frames=torch.cat([frames, frames[-1:]]) if len(frames) % TEMPORAL_MERGE else frames), dtype
        )

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Drop the start and end token around a placeholder: the span writes them."""
        out: list[int] = []
        for token in ids:
            out.append(token)
            for modality, placeholder in self.placeholder_ids.items():
                first, last = self._start_and_end(modality)
                if out[-3:] == [first, placeholder, last]:
                    out[-3:] = [placeholder]
        return out

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        first, last = self._start_and_end(modality)
        return build_span([(first,), geometry.num_embeds, (last,)], self.placeholder_ids[modality])

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Return options that keep the number of frames even."""
        if modality == "image":
            return super().shrink_kwargs(modality, grid, rows)
        kwargs = dict(super().shrink_kwargs(modality, (grid[0] // TEMPORAL_MERGE, *grid[1:]), rows) or {})
        return kwargs | ({"num_frames": TEMPORAL_MERGE * kwargs["num_frames"]} if "num_frames" in kwargs else {})

    def _embedding_spec(self, modality: str) -> EmbeddingSpec:
        spec = super()._embedding_spec(modality)
        return replace(spec, merge_t=TEMPORAL_MERGE) if modality == "video" else spec

    def _start_and_end(self, modality: str) -> tuple[int, int]:
        first, last = self.start_and_end[modality]
        return self.config_token_id(f"{modality}_start_token_id", first), self.config_token_id(f"{modality}_end_token_id", last)

    def _font(self, name: str) -> Path:
        font = None if self.files.folder is None else self.files.folder / Path(name).name
        if font is None or not font.is_file():
            reason = f"timestamps are drawn onto video frames with the font {name}, which the checkpoint lacks"
            raise ConfigError(f"{reason}; add the file, or set draw_on_frames to false in the preprocessor's JSON")
        return font


def draw_timestamps(frames: Tensor, seconds: Sequence[float], font: Path) -> Tensor:
    """Draw the time of each frame of uint8 `[n, h, w, 3]` into its upper left corner, in black with a white outline.

    The text is as high as a tenth of the shorter side; frames that are too small for it are returned unchanged.
    """
    size = int(min(frames.shape[1:3]) * 0.1)
    if not size:
        return frames
    loaded, outline, drawn = _load_font(str(font), size), int(size * 0.1), []
    for frame, time in zip(frames.numpy(), seconds, strict=True):
        image = Image.fromarray(frame)
        draw = ImageDraw.Draw(image)
        draw.text((0, 0), timestamp_text(time), _BLACK, loaded, stroke_width=outline, stroke_fill=_WHITE)
        drawn.append(np.asarray(image))
    return torch.from_numpy(np.stack(drawn))


def timestamp_text(seconds: float) -> str:
    """Return `"time: hh:mm:ss.ss"`."""
    minutes, rest = divmod(seconds, 60)
    return f"time: {int(minutes // 60):02d}:{int(minutes % 60):02d}:{rest:05.2f}"


@lru_cache(maxsize=16)
def _load_font(font: str, size: int) -> ImageFont.FreeTypeFont:
    try:
        return ImageFont.truetype(font, size)
    except OSError:
        raise ConfigError(f"{font} is not a readable font; download it again") from None
