"""Policies that do not cut: the image is resized, cropped or padded to one view."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ...callers.errors import ConfigError, InputError
from .plan import CropPad, CropPlan, Resize, Size, Step, TiledView, TilingPolicy
from .sizes import check_size, fit, middle, nearest_multiple, round_up

_MAX_SQUARE = 1 << 24  # pixels of a padded image


@dataclass(frozen=True)
class FixedSize:
    """Resize to one size, whatever the aspect ratio."""

    size: Size

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        return CropPlan((TiledView((Resize.to(self.size),)),))


@dataclass(frozen=True)
class KeptSize:
    """Keep the image as it is, and leave out what is right of and below the last whole patch. Rule: Pixtral without do_resize.

    Sides of more than `longest` pixels, and sides whose number of whole patches is no multiple of `merge`, are refused.
    """

    patch: int
    merge: int
    longest: int

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        tall, wide = (side // self.patch for side in (height, width))
        if not tall * wide or tall % self.merge or wide % self.merge or max(height, width) > self.longest:
            sides = f"at least {self.patch * self.merge} and at most {self.longest} pixels"
            counts = f", with a multiple of {self.merge} patches of {self.patch} pixels" if self.merge > 1 else ""
            raise InputError(
                f"this model does not resize images (do_resize=false); give sides of {sides}{counts}, not {width}x{height}. "
                f"Pixels beyond the last whole patch are cut off",
                code="unsupported",
            )
        return CropPlan((TiledView((CropPad(0, 0, tall * self.patch, wide * self.patch),)),))


@dataclass(frozen=True)
class CenterCrop:
    """Resize the shorter side to `shortest`, keeping the aspect ratio, then crop the center to `crop`. Rule: CLIP.

    `shortest` None: crop without resizing; what is outside a smaller image is black.
    """

    shortest: int | None
    crop: Size

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        if self.shortest is None:
            window = CropPad.window(self.crop, middle(height, self.crop[0]), middle(width, self.crop[1]))
            return CropPlan((TiledView((window,)),))
        tall, wide = self.shortest, int(self.shortest * width / height)
        if width <= height:
            tall, wide = int(self.shortest * height / width), self.shortest
        window = CropPad.window(self.crop, middle(tall, self.crop[0]), middle(wide, self.crop[1]))
        return CropPlan((TiledView((Resize(tall, wide), window)),))


@dataclass(frozen=True)
class PaddedSquare:
    """Pad to a square in color `fill`, then resize. Rule: LLaVA ("pad").

    An image whose square would have more than `_MAX_SQUARE` pixels is resized before it is padded. `size` None: do not resize.
    """

    size: Size | None
    fill: tuple[int, int, int]

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        side = max(height, width)
        if self.size is None and side**2 > _MAX_SQUARE:
            raise InputError(
                f"its sides {width}x{height} make a square of more than {_MAX_SQUARE:,} pixels, and this model does not resize "
                f"images (do_resize=false); make it smaller"
            )
        first, (tall, wide) = Resize.to(fit(height, width, self.size or (side, side))), self.size or (side, side)
        if side**2 > _MAX_SQUARE:
            window = CropPad(-((tall - first.height) // 2), -((wide - first.width) // 2), tall, wide, self.fill)
            return CropPlan((TiledView((first, window)),))
        window = CropPad(-((side - height) // 2), -((side - width) // 2), side, side, self.fill)
        return CropPlan((TiledView((window, Resize(tall, wide)) if self.size else (window,)),))


@dataclass(frozen=True)
class PaddedPage:
    """Shrink to fit into `size`, keeping the aspect ratio, and put the image in the middle of a page of that size.

    Rule: Nemotron-Parse. Smaller images keep their size.
    """

    size: Size
    fill: tuple[int, int, int] = (255, 255, 255)

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        tall, wide, ratio = height, width, width / height
        if tall > self.size[0]:
            tall, wide = self.size[0], int(self.size[0] * ratio)
        if wide > self.size[1]:
            tall, wide = int(self.size[1] / ratio), self.size[1]
        if not tall * wide:
            raise InputError(f"its sides {width}x{height} differ too much for a page; crop it first")
        window = CropPad.window(self.size, -((self.size[0] - tall) // 2), -((self.size[1] - wide) // 2), self.fill)
        return CropPlan((TiledView((Resize(tall, wide), window)),))


@dataclass(frozen=True)
class BoundedResize:
    """Shrink to fit into `max_size`, keeping the aspect ratio; sides are rounded up to multiples of `multiple`. Rule: Pixtral.

    `nearest`: round the shrunk sides to the nearest pixel, else floor them.
    """

    max_size: Size
    multiple: Size
    nearest: bool = False

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        ratio = max(1.0, height / self.max_size[0], width / self.max_size[1])
        if ratio > 1:
            rounded = round if self.nearest else math.floor
            height, width = rounded(height / ratio), rounded(width / ratio)
        tall, wide = (round_up(max(1, side), step) for side, step in zip((height, width), self.multiple, strict=True))
        return CropPlan((TiledView((Resize(tall, wide),)),))


@dataclass(frozen=True)
class BoundedSides:
    """Scale the longer side to at most `longest` and, if that allows it, the shorter side to at least `shortest`. Rule: BAGEL.

    Sides are rounded to the nearest multiples of `multiple`. If an image then has more than `max_pixels`, both sides shrink by
    the ratio of the two numbers of pixels, not by its root.
    """

    multiple: int
    longest: int
    shortest: int
    max_pixels: int

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        scale = max(min(self.longest / max(height, width), 1.0), self.shortest / min(height, width))
        tall, wide = self._scaled((height, width), scale)
        if tall * wide > self.max_pixels:
            tall, wide = self._scaled((tall, wide), self.max_pixels / (tall * wide))
        if max(tall, wide) > self.longest:
            tall, wide = self._scaled((tall, wide), self.longest / max(tall, wide))
        return CropPlan((TiledView((Resize(tall, wide),)),))

    def _scaled(self, size: Size, scale: float) -> Size:
        tall, wide = (nearest_multiple(round(side * scale), self.multiple) for side in size)
        return tall, wide


@dataclass(frozen=True)
class Successive:
    """Apply the steps of several policies of one view in turn, each to the result of the one before. Rule: BAGEL."""

    policies: tuple[TilingPolicy, ...]

    def plan(self, height: int, width: int) -> CropPlan:
        steps: tuple[Step, ...] = ()
        for policy in self.policies:
            (view,) = policy.plan(height, width).views
            steps += view.steps
            height, width = view.tile_size
        return CropPlan((TiledView(steps),))


@dataclass(frozen=True)
class PatchLimit:
    """Scale to at most `max_patches` patches; sides are rounded up to multiples of `patch` pixels. Rule: SigLIP 2 (NaFlex)."""

    patch: int
    max_patches: int

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        least, most = 1e-6, 100.0  # bounds and precision of the published search
        while most - least >= 1e-5:
            scale = (least + most) / 2
            tall, wide = (round_up(side * scale, self.patch) for side in (height, width))
            fits = (tall // self.patch) * (wide // self.patch) <= self.max_patches
            least, most = (scale, most) if fits else (least, scale)
        return CropPlan((TiledView((Resize(round_up(height * least, self.patch), round_up(width * least, self.patch)),)),))


@dataclass(frozen=True)
class BoundedPatches:
    """Scale to between `min_patches` and `max_patches` patches of `patch` pixels, if that is possible. Rule: Isaac.

    Sides are rounded up to multiples of `multiple` pixels. Images are enlarged at most 100 times.
    """

    patch: int
    multiple: int
    min_patches: int
    max_patches: int

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        scale, count = 1.0, self._patches(height, width, 1.0)
        if count < self.min_patches:
            scale = self._search(1.0, 100.0, lambda factor: self._patches(height, width, factor) < self.min_patches)[1]
        elif count > self.max_patches:
            scale = self._search(1e-6, 1.0, lambda factor: self._patches(height, width, factor) <= self.max_patches)[0]
        tall, wide = (round_up(side * scale, self.multiple) for side in (height, width))
        return CropPlan((TiledView((Resize(tall, wide),)),))

    def _patches(self, height: int, width: int, scale: float) -> int:
        tall, wide = (round_up(side * scale, self.multiple) // self.patch for side in (height, width))
        return tall * wide

    def _search(self, least: float, most: float, is_low: Callable[[float], bool]) -> tuple[float, float]:
        """Return two scales, of which only the first is low, with the precision of the published search."""
        while most - least >= 1e-5:
            scale = (least + most) / 2
            least, most = (scale, most) if is_low(scale) else (least, scale)
        return least, most


@dataclass(frozen=True)
class PatchRange:
    """Resize to a grid of `min_patches` to `max_patches` patches near the image's own; its sides are multiples of `multiple`.

    Rule: Nemotron-Nano-VL.
    """

    patch: int
    multiple: int
    min_patches: int
    max_patches: int

    def __post_init__(self) -> None:
        if self.max_patches < 2 * self.min_patches:  # so that no rounding makes less than `min_patches`
            limits = f"{self.min_patches} to {self.max_patches} patches"
            raise ConfigError(f"images of {limits} are requested; give a maximum of at least {2 * self.min_patches}")

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        tall, wide = (round(side / self.patch + 0.5) for side in (height, width))
        factor = min(math.sqrt(self.max_patches / (tall * wide)), 1.0)
        tall, wide = math.floor(factor * tall), math.floor(factor * wide)
        if not tall * wide:
            raise InputError(f"its sides {width}x{height} differ too much for {self.max_patches:,} patches; crop it first")
        if tall * wide < self.min_patches:
            factor = math.sqrt(self.min_patches / (tall * wide))
            tall, wide = math.ceil(factor * tall), math.ceil(factor * wide)
        tall = self._rounded(tall, wide)
        wide = self._rounded(wide, tall)
        return CropPlan((TiledView((Resize(tall * self.patch, wide * self.patch),)),))

    def _rounded(self, side: int, other: int) -> int:
        """Round a side up to a multiple if the grid stays within the maximum, else down."""
        up = -(-side // self.multiple) * self.multiple
        return up if up == side or up * other <= self.max_patches else max(self.multiple, up - self.multiple)


@dataclass(frozen=True)
class PatchTarget:
    """Resize to about `patches` patches, keeping the aspect ratio; sides are multiples of `multiple` patches.

    Rule: Nemotron-Nano-VL, for frames of videos.
    """

    patch: int
    multiple: int
    patches: int

    def plan(self, height: int, width: int) -> CropPlan:
        check_size(height, width)
        grid = [max(round(math.sqrt(ratio)), 1) for ratio in (self.patches * height / width, self.patches * width / height)]
        up = [-(-side // self.multiple) * self.multiple for side in grid]
        down = [max(self.multiple, side // self.multiple * self.multiple) for side in grid]
        tall, wide = up if up[0] * up[1] <= self.patches else down
        return CropPlan((TiledView((Resize(tall * self.patch, wide * self.patch),)),))
