"""The shape of MobileNetV5, read from the section of config.json that names a model of timm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...callers.errors import ConfigError, short_repr
from ...checkpoints.config import positive_int, positive_number


@dataclass(frozen=True)
class EdgeSpec:
    """A convolution to `ratio` times the channels of the input, then a product to `width` channels (`er` in timm)."""

    width: int
    stride: int = 1
    ratio: float = 4
    kernel: int = 3


@dataclass(frozen=True)
class InvertedSpec:
    """Products to `ratio` times the channels and to `width` channels (`uir` in timm).

    `start`, `middle`: kernels of depthwise convolutions before and between them; 0: none.
    """

    width: int
    start: int = 0
    middle: int = 0
    stride: int = 1
    ratio: float = 2


@dataclass(frozen=True)
class MobileAttentionSpec:
    """Attention of `heads` queries per position to one key and value of `dim` numbers (`mqa` in timm).

    `kv_stride`: if above 1, keys and values are of a plane that a depthwise convolution of this stride made.
    """

    width: int
    heads: int
    dim: int
    kv_stride: int = 1
    kernel: int = 3
    stride: int = 1


BlockSpec = EdgeSpec | InvertedSpec | MobileAttentionSpec


def _repeated(count: int, *blocks: BlockSpec) -> tuple[BlockSpec, ...]:
    return blocks * count


_BLOCKS: Sequence[Sequence[BlockSpec]] = (
    (EdgeSpec(128, stride=2), *_repeated(2, EdgeSpec(128))),
    (InvertedSpec(256, 3, 5, 2, 6), *(InvertedSpec(256, start, ratio=4) for start in (5, 3, 5, 3))),
    (
        InvertedSpec(640, 5, 5, 2, 6),
        *_repeated(7, InvertedSpec(640, 5, ratio=4)),
        InvertedSpec(640, ratio=1),
        *_repeated(14, MobileAttentionSpec(640, 12, 64, kv_stride=2), InvertedSpec(640)),
    ),
    (InvertedSpec(1280, 5, 5, 2, 6), *_repeated(19, MobileAttentionSpec(1280, 16, 96), InvertedSpec(1280))),
)
"""The stages of `mobilenetv5_300m_enc`."""


@dataclass(frozen=True)
class MobileNetSpec:
    """`size`: side of an image in pixels. `side`: of the result in rows. `stem`: channels before the stages. `out`: per row."""

    stages: tuple[tuple[BlockSpec, ...], ...]
    size: int = 768
    side: int = 16
    stem: int = 64
    out: int = 2048

    @property
    def patch(self) -> int:
        """Pixels along a side of the patch of one row."""
        return self.size // self.side

    @property
    def patch_dim(self) -> int:
        return 3 * self.patch**2

    @property
    def fused_side(self) -> int:
        """Side of the plane of the last stage but one."""
        return self.size >> len(self.stages)

    @property
    def fused(self) -> int:
        """Channels of the last two stages together."""
        return sum(stage[-1].width for stage in self.stages[-2:])


def mobilenet_spec(vision: Mapping[str, Any]) -> MobileNetSpec:
    """Read the raw `vision_config` of a timm model, whose `model_args` may replace stages and sizes.

    Raises:
        ConfigError: the architecture, an argument or a block is unknown, or sizes do not divide.
    """
    if vision.get("architecture", "mobilenetv5_300m_enc") != "mobilenetv5_300m_enc":
        name = short_repr(vision["architecture"])
        raise ConfigError(f"architecture {name} of vision_config is not supported; known is mobilenetv5_300m_enc")
    args = {"block_args": None, "msfa_output_resolution": 16, "stem_size": 64, **(vision.get("model_args") or {})}
    if unknown := sorted(args.keys() - {"block_args", "msfa_output_resolution", "stem_size"}):
        raise ConfigError(f"model_args of vision_config has {', '.join(unknown)}, which is not supported; leave it out")
    blocks = args["block_args"]
    stages = tuple(map(tuple, _BLOCKS)) if blocks is None else tuple(tuple(map(_block_spec, stage)) for stage in blocks)
    size = (vision.get("pretrained_cfg") or {}).get("input_size") or (3, 768, 768)
    spec = MobileNetSpec(
        stages,
        positive_int({"input_size": size[-1]}, "input_size"),
        positive_int(args, "msfa_output_resolution"),
        positive_int(args, "stem_size"),
        positive_int(vision, "hidden_size"),
    )
    if len(stages) < 2 or any([block.stride for block in stage] != [2] + [1] * (len(stage) - 1) for stage in stages):
        raise ConfigError("block_args of vision_config must be two or more stages, in which only the first block has stride 2")
    if list(size) != [3, spec.size, spec.size] or spec.size % (2 << len(stages)) or spec.fused_side % spec.side:
        raise ConfigError(
            f"input_size of vision_config is {short_repr(size)}; it must be 3 channels of a square whose side divides by "
            f"{2 << len(stages)} and by {spec.side << len(stages)}"
        )
    inner = spec.stem
    for block in (block for stage in stages for block in stage):
        widths = (inner, block.width, expanded(inner, block))
        if any(width % 8 for width in widths):
            raise ConfigError(f"block_args of vision_config has widths {widths}; they must be multiples of 8")
        inner = block.width
    return spec


def _block_spec(args: Mapping[str, Any]) -> BlockSpec:
    """Read one block of timm's `block_args`; ConfigError if it is of another kind or has other options."""
    kernels = {"er": ("exp_kernel_size",), "uir": ("dw_kernel_size_start", "dw_kernel_size_mid"), "mqa": ("dw_kernel_size",)}
    kind = args.get("block_type")
    names = kernels.get(str(kind), ())
    ratio = ("num_heads", "key_dim", "value_dim", "kv_stride") if kind == "mqa" else ("exp_ratio",)
    allowed = {"block_type", "out_chs", "stride", *names, *ratio}
    others = {key: value for key, value in args.items() if key not in allowed and value}
    if not names or others:
        what = f"options {short_repr(others)}" if names else f"type {short_repr(kind)}"
        raise ConfigError(f"block_args of vision_config has a block with {what}, which this encoder does not support")
    width, stride = positive_int(args, "out_chs"), positive_int(args, "stride")
    if kind == "er":
        return EdgeSpec(width, stride, positive_number(args, "exp_ratio"), positive_int(args, names[0]))
    if kind == "uir":
        start, middle = (positive_int(args, name) if args.get(name) else 0 for name in names)
        return InvertedSpec(width, start, middle, stride, positive_number(args, "exp_ratio"))
    heads, dim, value, kv_stride = (positive_int(args, name) for name in ratio)
    if value != dim:
        raise ConfigError(f"block_args of vision_config has key_dim {dim} and value_dim {value}; they must be equal")
    return MobileAttentionSpec(width, heads, dim, kv_stride, positive_int(args, names[0]), stride)


def expanded(inner: int, block: BlockSpec) -> int:
    """Return the channels within a block that gets `inner` channels."""
    return inner if isinstance(block, MobileAttentionSpec) else int(inner * block.ratio)
