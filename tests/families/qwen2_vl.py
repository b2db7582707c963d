"""Qwen2-VL and Qwen2.5-VL in the parity suite."""

from functools import partial
from typing import Any

from family import IMAGE_SIZES, VIDEO_SIZES, Family
from oracle import build_model, build_processor

MARKED = "<|vision_start|><|{}_pad|><|vision_end|>"


def build(name: str, seed: int, **variant: Any) -> tuple[Any, Any]:
    return build_model(name, seed, **variant), build_processor(name, **variant)


def refuses(modality, size):
    return max(size[-2:]) > 200 * min(size[-2:])


def row(name: str, **more: Any) -> Family:
    return Family(
        name,
        partial(build, name),
        placeholders={"image": MARKED.format("image"), "video": MARKED.format("video")},
        sizes={"image": [(90, 130), (60, 60), (140, 70)], "video": [(6, 80, 100), (4, 56, 90), (3, 60, 60)]},
        grid={"image": [*IMAGE_SIZES, (2, 500)], "video": VIDEO_SIZES},
        refuses=refuses,
        variants={
            "tied": {"tie": True},
            "one kv head": {"kv_heads": 1, "heads": 2, "vision_heads": 2},
            "wide heads": {"hidden": 128, "heads": 2, "kv_heads": 2, "full_attention": (0, 1, 2, 3), "patch": 8, "window": 32},
        },
        **more,
    )


LATER = "the time positions of a long video exceed its rows and columns; transformers lets later text overlap them"
FAMILIES = [row("qwen2_vl"), row("qwen2_5_vl", own_positions=LATER)]
