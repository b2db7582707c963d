"""Export a trained tiny-vl as a Hub checkpoint: `python -m training.export`. Reads the trainer's last.safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from .batch import MEAN, STD
from .checkpoint import export_arguments, write_files
from .model import TEXT, VISION
from .tokens import CHAT_TEMPLATE, SPECIAL, token, tokenizer

POSITIONS = 2048
PIXELS = {"shortest_edge": 16 * 16 * 4, "longest_edge": 16 * 16 * 256}  # per image; at most 256 tokens


def config() -> dict[str, Any]:
    """Return config.json of `Qwen2_5_VLForConditionalGeneration`."""
    text = {k: v for k, v in TEXT.items() if k not in ("rope_theta", "mrope_section")}
    rope = {"rope_type": "default", "type": "mrope", "rope_theta": TEXT["rope_theta"], "mrope_section": TEXT["mrope_section"]}
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "dtype": "float32",
        "tie_word_embeddings": True,
        "image_token_id": token("<|image_pad|>"),
        "video_token_id": token("<|video_pad|>"),
        "vision_start_token_id": token("<|vision_start|>"),
        "vision_end_token_id": token("<|vision_end|>"),
        "text_config": text
        | {
            "model_type": "qwen2_5_vl_text",
            "vocab_size": tokenizer().get_vocab_size(),
            "max_position_embeddings": POSITIONS,
            "rope_parameters": rope,
            "hidden_act": "silu",
            "bos_token_id": token("<|endoftext|>"),
            "eos_token_id": token("<|im_end|>"),
            "tie_word_embeddings": True,
        },
        "vision_config": VISION | {"model_type": "qwen2_5_vl_vision", "hidden_act": "silu"},
    }


def preprocessor() -> dict[str, Any]:
    """Return preprocessor_config.json, for images and videos."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "size": PIXELS,
        "patch_size": VISION["patch_size"],
        "merge_size": VISION["spatial_merge_size"],
        "temporal_patch_size": VISION["temporal_patch_size"],
        "image_mean": [round(float(v), 8) for v in MEAN],
        "image_std": [round(float(v), 8) for v in STD],
    }


def write(source: Path, target: Path) -> None:
    """Write the five JSON files and the weights under their published names."""
    target.mkdir(parents=True, exist_ok=True)
    end = "<|im_end|>"
    files: dict[str, Any] = {
        "config.json": config(),
        "generation_config.json": {
            "eos_token_id": [token(end), token("<|endoftext|>")],
            "pad_token_id": token("<|endoftext|>"),
            "do_sample": False,
        },
        "preprocessor_config.json": preprocessor(),
        "video_preprocessor_config.json": preprocessor() | {"video_processor_type": "Qwen2VLVideoProcessor"},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end,
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": list(SPECIAL[1:]),
            "model_max_length": POSITIONS,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    del files["video_preprocessor_config.json"]["image_processor_type"]
    write_files(target, files, tokenizer())
    weights = {k.removeprefix("model.net."): v for k, v in load_file(source).items() if k.startswith("model.net.")}
    patch = weights["visual.patch_embed.proj.weight"]
    p, t = VISION["patch_size"], VISION["temporal_patch_size"]
    weights["visual.patch_embed.proj.weight"] = patch.view(-1, 3, t, p, p)
    save_file({k: v.contiguous() for k, v in weights.items()}, target / "model.safetensors", {"format": "pt"})
    print(f"{target}: {sum(v.numel() for v in weights.values()):,} parameters")


def main() -> None:
    args = export_arguments(__doc__, "tiny-vl").parse_args()
    write(args.source, args.target)


if __name__ == "__main__":
    main()
