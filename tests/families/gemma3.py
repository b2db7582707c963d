"""Gemma 3 in the parity suite."""

import json
from dataclasses import replace
from functools import partial

from family import IMAGE_SIZES, LAYOUTS, Family, patches_in_squares
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config

NAMED = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
SIDE, PATCH = 84, 14
SCAN = {
    "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20, "pan_and_scan_max_num_crops": 3,
    "pan_and_scan_min_ratio_to_activate": 1.3,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def build(seed, tie=False, side=SIDE, **text):
    ensure_torchvision()
    import transformers as tf

    words = fast_tokenizer(["<bos>", "<eos>", *NAMED.values()], eos_token="<eos>", pad_token="<eos>", bos_token="<bos>")
    words._set_model_specific_special_tokens(NAMED)
    words.add_tokens(
        [tf.AddedToken("\n" * count, normalized=False) for count in range(2, 7)]
    )  # a run of line breaks is one token, as published
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes = {"head_dim": 16, "sliding_window": 7, "layer_types": LAYERS, "query_pre_attn_scalar": 24}
    config = tf.Gemma3Config(
        vision_config=tf.SiglipVisionConfig(image_size=side, patch_size=PATCH, vision_use_head=False, **shape),
        text_config=tf.Gemma3TextConfig(**text_config(words, tie, **{**sizes, **text})),
        mm_tokens_per_image=9,
        boi_token_index=words.boi_token_id,
        eoi_token_index=words.eoi_token_id,
        image_token_index=words.image_token_id,
        tie_word_embeddings=tie,
    )
    model = tf.Gemma3ForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.vision_tower)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name and "vision_tower" not in name:
            parameter.data.sub_(1)  # the weight is stored minus 1
    images = tf.Gemma3ImageProcessor(size={"height": side, "width": side}, **SCAN)
    return model, tf.Gemma3Processor(images, words, image_seq_length=9)


def prompt(placeholders, seed):
    """Write prompts with and without line breaks around images, and with images side by side."""
    around = "\n" * (seed % 3)
    between = "" if seed % 2 else f" and{around}"
    return f"def f{seed}(x):{around}" + between.join(placeholders) + f"{around} return it" + " + x" * (seed % 5)


def call(processor, text, data):
    images = {"images": data["image"], **SCAN} if data.get("image") else {}
    return dict(processor(text=[text], **images, return_tensors="pt"))


def finish(folder):
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": 9, "processor_class": "Gemma3Processor"}))


KEYS = "a key bias adds the same to all scores of a query"
EVEN = Family(
    "gemma3",
    build,
    placeholders={"image": "<start_of_image>"},
    sizes={"image": [(90, 130), (60, 60), (150, 40)]},
    grid={"image": IMAGE_SIZES},
    prompt=prompt,
    call=call,
    tensors=patches_in_squares(2, PATCH),
    finish=finish,
    prompt_attention="bidirectional_items",
    silent={f"model.vision_tower.encoder.layers.{i}.self_attn.k_proj.bias": KEYS for i in range(3)},
    variants={
        "tied": {"tie": True},
        "scaled positions": {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    },
    layouts=LAYOUTS,
)
FAMILIES = [
    EVEN,
    # 7 x 7 patches in 3 x 3 squares: the last row and column are left out
    replace(
        EVEN, name="gemma3_odd", build=partial(build, side=98), tensors=patches_in_squares(1, PATCH), variants={}, layouts={}
    ),
]
