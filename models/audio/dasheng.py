"""The packed Dasheng encoder: log-mel frames of items of many requests in one call.

The mel bands are normalised with stored statistics, a few frames of all bands make a patch, and patches attend within chunks of
10 s, each with its own positions. The publisher masks a patch that the last frame, which is centred on the end of the audio,
makes complete: no patch attends to it.

Source: arXiv 2406.06992 and the publisher's modelling file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...callers.errors import ConfigError
from ...checkpoints.config import positive_int
from ..interface import StepLimits
from ..layers.basic import TensorModule
from ..layers.builder import Builder
from ..layers.connectors import ProjectorSpec
from ..memory_formulas import SMALL, OpBytes
from ..vision.spec import TowerNames, TowerSpec
from ..vision.vit import VisionTower, tower_bytes

_DEFAULTS: Mapping[str, Any] = {
    "embed_dim": 768, "depth": 12, "num_heads": 12, "mlp_ratio": 4.0, "n_mels": 64, "target_length": 1012, "patch_size": 16,
    "patch_stride": 16, "input_channels": 1,
}  # fmt: skip
_EPS = 1e-5
_NAMES = TowerNames(post_norm="norm", scales=("ls1.gamma", "ls2.gamma"))


@dataclass(frozen=True)
class DashengSpec:
    """`patch`: frames of a patch. `chunk`: patches of a chunk. `tower`: the transformer layers, over rows."""

    mels: int
    patch: int
    chunk: int
    tower: TowerSpec

    def chunks(self, frames: int) -> tuple[list[int], list[int]]:
        """Return the patches of each chunk of an item that are attended to, and how many masked ones follow: 0 or 1.

        A lone patch is not masked.
        """
        patches, attended = frames // self.patch, (frames - 1) // self.patch
        rest = patches % self.chunk
        lengths = [self.chunk] * (patches // self.chunk) + ([rest] if rest else [])
        masked = [0] * len(lengths)
        if patches > attended and lengths[-1] > 1:
            masked[-1] = 1
            lengths[-1] -= 1
        return lengths, masked


def dasheng_spec(audio: Mapping[str, Any]) -> DashengSpec:
    """Read the raw `audio_encoder_config`.

    Raises:
        ConfigError: a value is not a positive integer, patches overlap or do not cover all bands, or there are several
            channels.
    """
    audio = {**_DEFAULTS, **audio}
    mels, width, heads = (positive_int(audio, key) for key in ("n_mels", "embed_dim", "num_heads"))
    sizes = [
        list(size) if isinstance(size, list | tuple) else [size] * 2 for size in (audio["patch_size"], audio["patch_stride"])
    ]
    (bands, patch), stride = sizes[0], sizes[1]
    if bands != mels or stride != sizes[0] or audio["input_channels"] != 1:
        raise ConfigError(
            f"audio_encoder_config has patches of {bands} x {patch} with a stride of {stride} over {mels} bands; only patches "
            "of all bands of one channel that do not overlap are supported"
        )
    tower = TowerSpec(
        depth=positive_int(audio, "depth"),
        width=width,
        heads=heads,
        inner=int(width * audio["mlp_ratio"]),
        patch_dim=0,
        qkv_bias=bool(audio.get("qkv_bias", True)),
        post_norm=True,
        layer_scale=bool(audio.get("init_values")),
        names=_NAMES,
    )
    chunk = positive_int(audio, "target_length") // positive_int({"patch_size": patch}, "patch_size")
    return DashengSpec(mels, patch, chunk, tower)


class DashengEncoder(TensorModule):
    """Log-mel frames of items, concatenated -> `[patches, width]` of all items; an incomplete last patch is dropped."""

    def __init__(self, spec: DashengSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, build, width = spec, Builder(self, dtype, device), spec.tower.width
        names = ("running_mean", "running_var", "weight", "bias")
        self.batch_norm = [build.stored(f"init_bn.{name}", spec.mels) for name in names]
        self.patches = (build.linear(["patch_embed.proj"], spec.mels * spec.patch, [width], True),)
        self.places = (
            build.stored("time_pos_embed", 1, width, 1, spec.chunk),
            build.stored("freq_pos_embed", 1, width, 1, 1),
        )
        self.tower = VisionTower(spec.tower, dtype, device)

    def forward(self, features: Tensor, frames: Sequence[int]) -> Tensor:
        """Encode `features` `[frames, mels]`, the frames of all items; `frames`: number of frames of each item."""
        spec = self.spec
        chunks = [spec.chunks(count) for count in frames]
        lengths, masked = ([n for part in parts for n in part] for parts in zip(*chunks, strict=True))
        whole = torch.cat([item[: len(item) // spec.patch * spec.patch] for item in features.split(list(frames))])
        mean, variance, weight, bias = (part.weight for part in self.batch_norm)
        whole = whole.to(mean.dtype).sub_(mean).mul_((variance + _EPS).rsqrt() * weight).add_(bias)
        (patch,) = self.patches
        x = patch(whole.view(-1, spec.patch, spec.mels).transpose(1, 2).flatten(1))
        del whole
        times, bands = (table_part.weight.flatten(1)[0].view(spec.tower.width, -1).T for table_part in self.places)
        table = times + bands
        for part in x.split([count_of_item + more for count_of_item, more in zip(lengths, masked, strict=True)]):
            part.add_(table[: len(part)])
        return self.tower(x, [(1, 1, count) for count in lengths], masked)[-1]


def dasheng_bytes(c: DashengSpec, frames: int, projector: ProjectorSpec, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in DashengEncoder and the projector after it for `frames` frames, features included."""
    ops, s, width = OpBytes(dtype, limits), dtype.itemsize, c.tower.width
    patches, numbers = frames // c.patch, c.mels * c.patch
    start = 2 * numbers * s + ops.linear(numbers, width, patches)  # frames, the same in patches, rows
    layers = tower_bytes(c.tower, patches, projector, dtype, limits) + patches * width * s  # the tower's input
    return SMALL + frames * c.mels * s + max(patches * start, layers) + c.chunk * width * s
