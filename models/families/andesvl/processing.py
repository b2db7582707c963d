"""Input processing of AndesVL: each image on a canvas of whole squares, near its own size. Source: modeling_andesvl.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ....callers.errors import InputError
from ....mm.tiling.plan import CropPad, CropPlan, Resize, Size, Step, TiledView
from ....mm.types import ItemGeometry
from ....processors.bases.text_placeholders import TextPlaceholders
from ....processors.bases.tiles import TiledInfo, TileSpec, positive_int_or
from ....processors.images import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD, read_pixel_spec
from ....processors.interface import Span
from ....processors.spans import build_span

_MERGE = 2  # patches along a side of a square
CHAT_TEMPLATE = """
{%- for m in messages -%}
  {{- '<|im_start|>' ~ m.role ~ '\\n' -}}
  {%- for part in ([{'type': 'text', 'text': m.content}] if m.content is string else m.content) -%}
    {%- if part.type == 'image' -%}{{ '<image>' }}
    {%- elif part.type == 'text' -%}{{ part.text }}
    {%- else -%}{{ raise_exception('this model takes text and images') }}{%- endif -%}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- if thinking -%}{{ '<think>' }}{%- endif -%}{%- endif -%}"""


@dataclass(frozen=True)
class PaddedCanvas:
    """The image in the middle of a canvas whose sides are multiples of `base`, in color `fill`.

    An image between the two areas keeps its size, up to less than `base` pixels a side. Others are resized so that the canvas
    has about the nearer area.

    Args:
        max_size: side of a square of the largest area. min_squares: squares of `base` pixels of the smallest area.
        max_side: longer sides are shrunk to it first.
    """

    base: int
    fill: tuple[int, int, int]
    max_size: int = 733
    min_squares: int = 4
    max_side: int = 4172

    def plan(self, height: int, width: int) -> CropPlan:
        steps = list[Step]()
        if max(height, width) > self.max_side:
            scale = self.max_side / max(height, width)
            height, width = int(height * scale), int(width * scale)
            steps.append(_resize(height, width))
        area = height * width
        if area > self.max_size**2:
            image, canvas = self._near_area(height, width, self.max_size**2)
        elif area < self.base**2 * self.min_squares:
            image, canvas = self._near_area(height, width, int(self.base * self.min_squares**0.5) ** 2)
        else:
            canvas = self._above(height), self._above(width)
            scale = min(canvas[1] / width, canvas[0] / height)
            image = int(height * scale), int(width * scale)
        top, left = (-((outer - inner) // 2) for outer, inner in zip(canvas, image, strict=True))
        return CropPlan((TiledView((*steps, _resize(*image), CropPad.window(canvas, top, left, self.fill))),))

    def _above(self, side: int) -> int:
        """Return the next multiple of `base` above a side, as the published code counts it."""
        return side + self.base - side % self.base

    def _near_area(self, height: int, width: int, area: int) -> tuple[Size, Size]:
        """Return the sizes of the resized image and of its canvas, which has about this area."""
        ratio = width / height
        sides = math.floor(math.sqrt(area / ratio)), math.floor(math.sqrt(area * ratio))
        tall, wide = (min(self._above(max(min(side, self.max_side), self.base)), self.max_side) for side in sides)
        scale = min(wide / width, tall / height)
        return (round(height * scale), round(width * scale)), (tall, wide)


def _resize(height: int, width: int) -> Resize:
    if not height * width:
        raise InputError("its sides differ too much: this model would resize it to no pixels; crop it first")
    return Resize(height, width)


class AndesVLProcessingInfo(TextPlaceholders, TiledInfo):
    """ProcessingInfo of AndesVL. Prompts spell an image as <image>."""

    modalities = ("image",)
    placeholders = {"image": ("image_token_id", "<|vision_pad|>")}
    placeholder_texts = {"image": "<image>"}
    valid_kwargs = {"image": ("resample",)}
    default_kwargs = {"resample": "pillow"}
    chat_template = CHAT_TEMPLATE

    def resolve_spec(self, modality: str) -> TileSpec:
        known = {key: self.files.image[key] for key in ("image_mean", "image_std") if self.files.image.get(key)}
        patch = positive_int_or(self.files.config.get("vision_config") or {}, "patch_size", 14)
        red, green, blue = (int(mean * 255) for mean in known.get("image_mean", OPENAI_CLIP_MEAN))
        tiling = PaddedCanvas(patch * _MERGE, (red, green, blue))
        spec = TileSpec(OPENAI_CLIP_MEAN, OPENAI_CLIP_STD, tiling=tiling, patch=patch, merge=_MERGE)
        return read_pixel_spec(known, spec, self.merged_kwargs[modality])

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        pieces = [self.encode("<img>"), geometry.num_embeds, self.encode("</img>")]
        return build_span(pieces, self.placeholder_ids["image"])
