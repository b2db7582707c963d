"""What Ernie-4.5-VL is fed: pictures, and clips with times drawn onto their frames, between marks. Knows no model."""

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

from ..mm.embeddings import EmbeddingSpec
from ..mm.errors import ConfigError
from ..mm.geometry import SamplingPolicy
from ..mm.types import EmbeddingItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem, VideoItem
from .base import build_span
from .interface import Span
from .native import NativeInfo
from .patches import PatchSpec

PAIR = 2  # frames that are joined to one step of positions
_AREA = 28 * 28  # pixels of an embedding
_BLACK, _WHITE = (0, 0, 0), (255, 255, 255)


class Ernie45VLProcessingInfo(NativeInfo):
    """ProcessingInfo of Ernie-4.5-VL. An item's marks are part of it: they go to the experts of pictures, too.

    A prompt may leave the marks out, they are written in any case.
    """

    slots = {"image": ("image_token_id", "im_patch_id", 100295), "video": ("video_token_id", 103367)}
    marks: ClassVar[Mapping[str, tuple[int, int]]] = {"image": (101304, 101305), "video": (101306, 101307)}
    published = {"vocab_size": 103424, "hidden_size": 2560}
    patches = {
        "image": PatchSpec(temporal=1, max_pixels=6177 * _AREA),
        "video": PatchSpec(temporal=1, min_pixels=299 * _AREA, max_pixels=1196 * _AREA),
    }
    frames = SamplingPolicy(min_frames=16, max_frames=180)

    def json(self, modality: str) -> Mapping[str, Any]:
        """A patch is of one frame, what the JSON calls its frames are those that the model joins."""
        given = super().json(modality)
        if modality == "video" and given.get("temporal_patch_size", PAIR) != PAIR:
            raise ConfigError(f"temporal_patch_size is {given['temporal_patch_size']}; only {PAIR} is supported")
        return {key: value for key, value in given.items() if key != "temporal_patch_size"}

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        grid = super().geometry(header)
        return grid if header.frames is None else replace(grid, t=grid.t + grid.t % PAIR, merge_t=PAIR)

    def rows_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        """A clip's grid counts its frames."""
        grid = super().rows_geometry(item)
        return replace(grid, merge_t=PAIR) if item.modality == "video" else grid

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """As of every family of its kind; the last of an odd number of frames comes twice."""
        if not isinstance(item, VideoItem):
            return super().process(item, dtype)
        frames, json = item.frames, self.json("video")
        if json.get("draw_on_frames", True):
            frames = stamped(frames, item.plan.timestamps, self._font(json.get("font") or "Roboto-Regular.ttf"))
        return super().process(replace(item, frames=torch.cat([frames, frames[-1:]]) if len(frames) % PAIR else frames), dtype)

    def prompt_ids(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Marks right around a slot are the item's own."""
        out: list[int] = []
        for token in ids:
            out.append(token)
            for modality, slot in self.slot_ids.items():
                first, last = self._marks(modality)
                if out[-3:] == [first, slot, last]:
                    out[-3:] = [slot]
        return out

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        first, last = self._marks(modality)
        return build_span([(first,), geometry.num_embeds, (last,)], self.slot_ids[modality])

    def shrink_options(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Frames go in pairs."""
        if modality == "image":
            return super().shrink_options(modality, grid, rows)
        given = dict(super().shrink_options(modality, (grid[0] // PAIR, *grid[1:]), rows) or {})
        return given | ({"num_frames": PAIR * given["num_frames"]} if "num_frames" in given else {})

    def _row_spec(self, modality: str) -> EmbeddingSpec:
        spec = super()._row_spec(modality)
        return replace(spec, merge_t=PAIR) if modality == "video" else spec

    def _marks(self, modality: str) -> tuple[int, int]:
        first, last = self.marks[modality]
        return self.token(f"{modality}_start_token_id", first), self.token(f"{modality}_end_token_id", last)

    def _font(self, name: str) -> Path:
        font = None if self.files.folder is None else self.files.folder / Path(name).name
        if font is None or not font.is_file():
            reason = f"frames of clips get their times drawn onto them, with a font that the checkpoint lacks: {name}"
            raise ConfigError(f"{reason}; add the file, or set draw_on_frames to false in the preprocessor's JSON")
        return font


def stamped(frames: Tensor, seconds: Sequence[float], font: Path) -> Tensor:
    """uint8 `[n, h, w, 3]`, each with its time in its upper left corner: black with a white border, a tenth of a side high.

    Frames too small for any letter stay as they are.
    """
    size = int(min(frames.shape[1:3]) * 0.1)
    if not size:
        return frames
    letters, border, shown = _letters(str(font), size), int(size * 0.1), []
    for frame, time in zip(frames.numpy(), seconds, strict=True):
        image = Image.fromarray(frame)
        draw = ImageDraw.Draw(image)
        draw.text((0, 0), clock(time), _BLACK, letters, stroke_width=border, stroke_fill=_WHITE)
        shown.append(np.asarray(image))
    return torch.from_numpy(np.stack(shown))


def clock(seconds: float) -> str:
    """`"time: hh:mm:ss.ss"`."""
    minutes, rest = divmod(seconds, 60)
    return f"time: {int(minutes // 60):02d}:{int(minutes % 60):02d}:{rest:05.2f}"


@lru_cache(maxsize=16)
def _letters(font: str, size: int) -> ImageFont.FreeTypeFont:
    try:
        return ImageFont.truetype(font, size)
    except OSError:
        raise ConfigError(f"{font} is no font that can be read; download it again") from None
