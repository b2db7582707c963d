"""Qwen2-VL and Qwen2.5-VL in the parity suite."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from family import IMAGE_SIZES, VIDEO_SIZES, Family
from oracle import build_model, build_processor, load_oracle
from safetensors.torch import load_file, save_file

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


def saved_as_tarsier2(folder):
    """Rewrite the checkpoint as Tarsier2's: the keys of LLaVA's config, its names of the tower, limits of the size."""
    file, weights = folder / "config.json", folder / "model.safetensors"
    config = json.loads(file.read_text())
    ids = {f"{name}_token_index": config.pop(f"{name}_token_id") for name in ("image", "video")}
    named = {"architectures": ["TarsierForConditionalGeneration"], "model_type": "llava"}
    for part in ("text_config", "vision_config"):
        config[part]["model_type"] = "qwen2_vl"
    file.write_text(json.dumps(config | ids | named))
    stored = {}
    for name, tensor in load_file(weights).items():
        stored[name.replace("visual.", "vision_tower.") if name.startswith("visual.") else f"language_model.{name}"] = tensor
    save_file(stored, weights, {"format": "pt"})


def load_tarsier2(folder):
    """Load Qwen2-VL of transformers from a checkpoint of Tarsier2."""
    config = json.loads((folder / "config.json").read_text())
    ids = {f"{name}_token_id": config.pop(f"{name}_token_index") for name in ("image", "video")}
    config["text_config"]["model_type"], config["vision_config"]["model_type"] = "qwen2_vl_text", "qwen2_vl_vision"
    named = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
    with TemporaryDirectory() as place:
        shutil.copytree(folder, place, dirs_exist_ok=True)
        (Path(place) / "config.json").write_text(json.dumps(config | ids | named))
        stored = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            stored[name.replace("vision_tower.", "visual.").removeprefix("language_model.")] = tensor
        save_file(stored, Path(place) / "model.safetensors", {"format": "pt"})
        return load_oracle(place)


LATER = "the time positions of a long video exceed its rows and columns; transformers lets later text overlap them"
FAMILIES = [
    row("qwen2_vl"),
    row("qwen2_5_vl", own_positions=LATER),
    replace(
        row("qwen2_vl", finish=saved_as_tarsier2, load=load_tarsier2),
        name="tarsier2",
        variants={},
    ),
]
