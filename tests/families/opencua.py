"""OpenCUA in the parity suite, in its publisher's layout.

transformers has no class for it; the oracle is its Qwen2.5-VL, whose three position axes are given the same numbers.
"""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from family import IMAGE_SIZES, Family, is_sliver, run_oracle
from oracle import build_model, build_processor, load_oracle, token_ids
from safetensors.torch import load_file, save_file

NAMES = (("visual.", "vision_tower."), ("model.", "language_model.model."), ("lm_head.", "language_model.lm_head."))
MROPE = {"rope_type": "default", "type": "mrope", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}


def build(seed, **variant):
    return build_model("qwen2_5_vl", seed, **variant), build_processor("qwen2_5_vl", **variant)


def finish(folder):
    """Rewrite the checkpoint in the layout of OpenCUA: its keys of config.json and its names of tensors."""
    file, weights = folder / "config.json", folder / "model.safetensors"
    config = json.loads(file.read_text())
    config["text_config"] |= {"model_type": "qwen2", "rope_parameters": None, "rope_theta": 10000.0}
    named = {"architectures": ["OpenCUAForConditionalGeneration"], "model_type": "opencua"}
    kept = {name: config[name] for name in ("text_config", "vision_config", "tie_word_embeddings")}
    file.write_text(json.dumps({**kept, **named, "media_placeholder_token_id": config["image_token_id"]}))
    stored = {}
    for name, tensor in load_file(weights).items():
        old, new = next(pair for pair in NAMES if name.startswith(pair[0]))
        stored[new + name.removeprefix(old)] = tensor
    save_file(stored, weights, {"format": "pt"})


def load(folder):
    """Load Qwen2.5-VL of transformers from a checkpoint of OpenCUA."""
    config, ids = json.loads((folder / "config.json").read_text()), token_ids()
    config["text_config"] |= {"model_type": "qwen2_5_vl_text", "rope_parameters": MROPE}
    named = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    named |= {f"{name}_token_id": ids[f"<|{name}_pad|>"] for name in ("image", "video")}
    with TemporaryDirectory() as place:
        shutil.copytree(folder, place, dirs_exist_ok=True)
        (Path(place) / "config.json").write_text(json.dumps(config | named))
        stored = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            old, new = next(pair for pair in NAMES if name.startswith(pair[1]))
            stored[old + name.removeprefix(new)] = tensor
        save_file(stored, Path(place) / "model.safetensors", {"format": "pt"})
        return load_oracle(place)


def run(model, inputs, answer, positions):
    """Run the oracle with the same position on its three axes."""
    count = inputs["input_ids"].shape[1] + len(answer)
    return run_oracle(model, inputs, answer, torch.arange(count).expand(3, -1))


FAMILY = Family(
    "opencua",
    build,
    placeholders={"image": "<|image_pad|>"},
    sizes={"image": [(90, 130), (60, 60), (140, 70)]},
    grid={"image": [*IMAGE_SIZES, (2, 500)]},
    refuses=is_sliver,
    oracle_positions=lambda model, inputs: None,
    run=run,
    finish=finish,
    load=load,
    variants={"tied": {"tie": True}, "one kv head": {"kv_heads": 1}},
)
