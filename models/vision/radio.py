"""RADIO, NVIDIA's image encoder (arXiv 2312.06709, 2412.07679), from the config of its publisher's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...callers.errors import ConfigError
from ...checkpoints.config import positive_int, require
from .spec import BLOCKS, TableSpec, TowerSpec

_SHAPES = {"small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16), "huge": (1280, 32, 16)}
"""timm's name of a vision transformer -> width, layers, heads."""

_NAMES = replace(
    BLOCKS,
    patch="patch_generator.embedder",
    video_patch="patch_generator.video_embedder",
    table="patch_generator.pos_embed",
    class_token="patch_generator.cls_token.token",
    post_norm="norm",
    scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
)
RADIO_PREFIX = "radio_model.model."
"""Prefix of the tower's names, below the prefix of the encoder."""

RADIO_UNUSED = ("radio_model.input_conditioner.", "radio_model.summary_idxs")
"""Prefixes of tensors beside the tower's. The processor normalises pixels, and config.json names the summary's tokens."""


def radio_spec(vision: Mapping[str, Any], min_frame: int, merge: int = 1, keep_first: bool = False) -> TowerSpec:
    """Read the tower from the publisher's vision config: its shape follows from `args.model`, unless keys state it.

    `min_frame`: as in TowerSpec. `keep_first`: the learned rows at the start of each frame are part of the result.

    Raises:
        ConfigError: the shape is unknown, or a size is not a positive integer.
    """
    args = require(vision, "args")
    name = str(args.get("model"))
    sizes = _SHAPES.get(name.removeprefix("vit_").partition("_")[0])
    if sizes is None and "hidden_size" not in vision:
        raise ConfigError(f"model {name!r} in args of vision_config is not supported; known are vit_{', vit_'.join(_SHAPES)}")
    shape = {**dict(zip(("hidden_size", "num_hidden_layers", "num_attention_heads"), sizes or (), strict=False)), **vision}
    patch, width = positive_int({"patch_size": 16} | shape, "patch_size"), positive_int(shape, "hidden_size")
    largest = positive_int({"cpe_max_size": 2048} | args, "cpe_max_size")
    joined = positive_int({"video_temporal_patch_size": 1} | shape, "video_temporal_patch_size")
    if joined > 1 and not vision.get("separate_video_embedder", True):
        raise ConfigError("separate_video_embedder in vision_config is false, which is not supported with joined frames")
    return TowerSpec(
        depth=positive_int(shape, "num_hidden_layers"),
        width=width,
        heads=positive_int(shape, "num_attention_heads"),
        inner=positive_int({"intermediate_size": 4 * width} | shape, "intermediate_size"),
        patch_dim=3 * patch**2,
        merge=merge,
        patch_bias=False,
        table=TableSpec(round(largest / patch), "square"),
        registers=_first_rows(args),
        keep_class=keep_first,
        joined_frames=joined,
        layer_scale="layerscale_value" in vision,  # a key of transformers' config, whose class has scales
        min_frame=min_frame,
        post_norm=bool(args.get("model_norm", False)),
        names=_NAMES,
    )


def summary_rows(vision: Mapping[str, Any]) -> list[int]:
    """Return the class rows, of each frame's first rows, that make up its summary: one per teacher's name, or the only one."""
    args, first = require(vision, "args"), dict[str, int]()
    if not args.get("cls_token_per_teacher", True):
        return [0]
    for row, teacher in enumerate(args.get("teachers") or ()):
        if teacher.get("use_summary", True):
            first.setdefault(require(teacher, "name"), row)
    return [*first.values()] or [0]


def _first_rows(args: Mapping[str, Any]) -> int:
    """Return the class rows, one per teacher, and the registers, which fill them up to a multiple."""
    teachers = {require(teacher, "name") for teacher in args.get("teachers") or ()}
    tokens = max(1, len(teachers)) if args.get("cls_token_per_teacher", True) else 1
    if args.get("cpe_num_registers"):
        return tokens + positive_int(args, "cpe_num_registers")
    multiple = args.get("register_multiple")
    return tokens + (positive_int(args, "register_multiple") - tokens % multiple if multiple else 0)
