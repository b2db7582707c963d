"""MiniCPM-V 4.6 and 4.7, and MiniCPM-OCR, in the parity suite."""

from dataclasses import replace
from functools import partial

import torch
from family import Family, as_sampled, call_sampled, rope_index
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config

TAGS = {"image_start_token": "<image>", "image_end_token": "</image>", "slice_start_token": "<slice>"}
TAGS |= {"slice_end_token": "</slice>", "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"}
TAGS |= {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
PATCH = 14
NOISY = {  # as for Qwen3.5, whose decoder this is
    "tolerance": 1e-3,
    "tolerance_note": "a change of the embeddings by one float32 rounding changes transformers' own logits by up to 0.0017",
    "half": (0.2, 0.05),
}


def build(seed, tie=False, mode="16x", cut=1, kind="MiniCPMV4_6", upsize=None, **text):
    ensure_torchvision()
    import transformers as tf

    names = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "extra_special_tokens": TAGS}
    words = fast_tokenizer([*TAGS.values(), "<|im_end|>"], **names)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    text = {"model_type": "qwen3_5_text", **text_config(words, tie, head_dim=16, **text)}
    text |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
    text["layer_types"] = ["linear_attention", "full_attention", "linear_attention"]
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    }
    marks = {}
    if kind == "MiniCPMV4_7":
        tags = {
            name.replace("_token", "_id"): tag for name, tag in TAGS.items() if name.startswith(("image_s", "image_e", "slice"))
        }
        marks = {name: words.convert_tokens_to_ids(tag) for name, tag in tags.items()} | {"newline_id": words.encode("\n")[-1]}
    config = getattr(tf, f"{kind}Config")(
        vision_config={**shape, "image_size": 70, "patch_size": PATCH},
        text_config=text,
        insert_layer_id=cut,
        downsample_mode=mode,
        image_token_id=words.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=words.convert_tokens_to_ids("<|video_pad|>"),
        tie_word_embeddings=tie,
        **marks,
    )
    model = getattr(tf, f"{kind}ForConditionalGeneration")(config).eval()
    randomise(model, seed)
    for name, parameter in model.named_parameters():
        if "language_model" in name and "norm.weight" in name and ".linear_attn." not in name:
            parameter.data.sub_(1)  # the weight is stored minus 1
    size = {"scale_resolution": 112, "downsample_mode": mode}
    small = {"small_image_upsize": upsize} if upsize else {}
    pixels = "MiniCPMV4_6" if kind == "MiniCPMV4_7" else kind
    images = getattr(tf, f"{pixels}ImageProcessor")(max_slice_nums=6, **small, **size)
    videos = getattr(tf, f"{pixels}VideoProcessor")(max_slice_nums=2, **size)
    return model, getattr(tf, f"{kind}Processor")(images, videos, words)


def tensors(inputs, features):
    """Put our patches, which come in squares, into the strips of transformers."""
    for modality, name in (("image", ""), ("video", "_videos")):
        items = [feature for feature in features if feature.modality == modality]
        if not items:
            continue
        grids = torch.cat([item.kwargs["grids"].data for item in items])
        yield "target_sizes", grids[:, 1:], inputs[f"target_sizes{name}"]
        patches = torch.cat([item.kwargs["pixel_values"].data for item in items]).split([h * w for _, h, w in grids.tolist()])
        strips = []
        for mine, (_, h, w) in zip(patches, grids.tolist(), strict=True):
            rows = mine.view(h // 2, w // 2, 2, 2, -1).transpose(1, 2).reshape(h * w, 3, PATCH, PATCH)
            strips.append(rows.permute(1, 2, 0, 3).flatten(2))
        yield "pixel_values", torch.cat(strips, -1)[None], inputs[f"pixel_values{name}"]


def write_lines(placeholders, seed):
    """Write a prompt with a newline, with several, or with none after an item."""
    return f"def f{seed}(x):" + ("\n", " and ", "\n\n")[seed % 3].join([*placeholders, " return it"]) + " + x" * (seed % 5)


KEYS = "a key bias adds the same to all scores of a query"
TOWER = "model.vision_tower."
LAYERS = [*(f"{TOWER}encoder.layers.{i}." for i in range(4)), f"{TOWER}vit_merger."]
V46 = Family(
    "minicpmv4_6",
    build,
    placeholders={"image": "<|image_pad|>", "video": "<|video_pad|>"},
    sizes={"image": [(90, 131), (60, 60), (240, 170), (224, 224)], "video": [(2, 80, 100), (3, 150, 90), (1, 60, 60)]},
    ours=as_sampled,
    call=call_sampled,
    tensors=tensors,
    oracle_positions=lambda model, inputs: torch.arange(inputs["input_ids"].shape[1]).expand(3, -1),
    silent={f"{layer}self_attn.k_proj.bias": KEYS for layer in LAYERS},
    variants={"tied": {"tie": True}, "4x": {"mode": "4x"}, "late merge": {"cut": 2}},
    fullest={"image": [(240, 170)]},
    fullest_items=20,
    **NOISY,
)
OCR = replace(
    V46,
    name="minicpm_ocr",
    build=partial(build, kind="MiniCPMOcr", upsize="never"),
    variants={
        "tied": {"tie": True},
        "4x": {"mode": "4x"},
        "4x, enlarged": {"mode": "4x", "upsize": "always"},
        "4x, by letters": {"mode": "4x", "upsize": "adaptive"},
    },
)
V47 = replace(
    V46,
    name="minicpmv4_7",
    build=partial(build, kind="MiniCPMV4_7"),
    prompt=write_lines,
    oracle_positions=rope_index,
    variants={"tied": {"tie": True}, "4x": {"mode": "4x"}},
)
FAMILIES = [V46, OCR, V47]
