"""Qwen3-VL and Qwen3.5, dense and with experts, in the parity suite."""

import json
import shutil
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from family import IMAGE_SIZES, VIDEO_SIZES, Family, as_sampled, call_sampled
from oracle import fast_tokenizer, load_oracle, randomise, text_config
from safetensors.torch import load_file, save_file

SPECIALS = ("<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
NOISY = {
    "tolerance": 1e-3,
    "tolerance_note": "a change of the embeddings by one float32 rounding changes transformers' own logits by up to 0.0017",
}
AREAS = {"image": (64 * 64, 160 * 160), "video": (64 * 64 * 4, 96 * 96 * 8)}


def build(kind, seed, tie=False, patch=16):
    import transformers as tf

    words = fast_tokenizer(SPECIALS, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    ids = dict(zip(SPECIALS, words.convert_tokens_to_ids(SPECIALS), strict=True))
    text = text_config(words, tie, head_dim=16, num_hidden_layers=4)
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0}
    if "_5" in kind:
        text |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
        text["layer_types"] = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
        text["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    if kind == "_5Moe":
        text |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40}
    if kind == "VLMoe":
        text |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]}
    vision = {"depth": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "out_hidden_size": 64}
    vision |= {"patch_size": patch, "num_position_embeddings": 36}
    if "VL" in kind:
        vision["deepstack_visual_indexes"] = [0, 2]
    config = getattr(tf, f"Qwen3{kind}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tie,
    )
    model = getattr(tf, f"Qwen3{kind}ForConditionalGeneration")(config).eval()
    randomise(model, seed)
    for name, parameter in model.named_parameters():
        if "_5" in kind and "language_model" in name and "norm.weight" in name and ".linear_attn." not in name:
            parameter.data.sub_(1)  # the weight is stored minus 1
        if name.endswith("dt_bias"):
            parameter.data.mul_(5)  # decays that differ by far between heads
    image, video = ({"shortest_edge": least, "longest_edge": most} for least, most in AREAS.values())
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": patch}
    return model, tf.Qwen3VLProcessor(
        image_processor=tf.Qwen2VLImageProcessor(size=image, **half),
        tokenizer=words,
        video_processor=tf.Qwen3VLVideoProcessor(size=video, cap_pixels_per_frame=False, **half),
    )


def refuses(modality, size):
    return modality == "image" and max(size) > 200 * min(size)


def row(name, kind, **more):
    return Family(
        name,
        partial(build, kind),
        placeholders={m: f"<|vision_start|><|{m}_pad|><|vision_end|>" for m in ("image", "video")},
        sizes={"image": [(90, 130), (60, 60), (140, 70)], "video": [(6, 80, 100), (4, 56, 90), (3, 60, 60)]},
        grid={"image": [*IMAGE_SIZES, (2, 500)], "video": [size for size in VIDEO_SIZES if size[0] > 1]},
        refuses=refuses,
        ours=as_sampled,
        call=call_sampled,
        **more,
    )


def saved_as_interns2(folder):
    """Rewrite the checkpoint as Intern-S2-Preview's, with a tensor of its encoder of time series."""
    config = json.loads((folder / "config.json").read_text())
    named = {"architectures": ["InternS2PreviewForConditionalGeneration"], "model_type": "interns2_preview"}
    (folder / "config.json").write_text(json.dumps(config | named))
    weights = folder / "model.safetensors"
    save_file({**load_file(weights), "model.time_series.conv.weight": torch.ones(3, 3)}, weights, {"format": "pt"})


def load_interns2(folder):
    """Load Qwen3.5 with experts of transformers from a checkpoint of Intern-S2-Preview."""
    config = json.loads((folder / "config.json").read_text())
    named = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    with TemporaryDirectory() as place:
        shutil.copytree(folder, place, dirs_exist_ok=True)
        (Path(place) / "config.json").write_text(json.dumps(config | named))
        stored = load_file(folder / "model.safetensors")
        del stored["model.time_series.conv.weight"]
        save_file(stored, Path(place) / "model.safetensors", {"format": "pt"})
        return load_oracle(place)


FAMILIES = [
    row("qwen3_vl", "VL", variants={"tied": {"tie": True}, "small patches": {"patch": 8}}),
    row("qwen3_vl_moe", "VLMoe"),
    row("qwen3_5", "_5", **NOISY),
    row("qwen3_5_moe", "_5Moe", half=(0.2, 0.2), **NOISY),  # in half precision some rows take another expert
    row("interns2_preview", "_5Moe", half=(0.2, 0.2), finish=saved_as_interns2, load=load_interns2, **NOISY),
]
