"""LightOnOCR in the parity suite."""

import torch
from family import Family
from oracle import fast_tokenizer, randomise, text_config

SPECIALS = ["<|endoftext|>", "<|im_end|>", "<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"]
PATCH, EDGE = 14, 112


def build(seed, tie=True, act="silu", step=PATCH):
    import transformers as tf

    named = {"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"}
    words = fast_tokenizer(SPECIALS, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_specific_special_tokens=named)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = tf.LightOnOcrConfig(
        vision_config={**shape, "model_type": "pixtral", "image_size": EDGE, "patch_size": PATCH, "hidden_act": act},
        text_config={"model_type": "qwen3", **text_config(words, tie), "head_dim": 24},
        image_token_id=words.convert_tokens_to_ids("<|image_pad|>"),
        tie_word_embeddings=tie,
    )
    model = tf.LightOnOcrForConditionalGeneration(config).eval()
    randomise(model, seed)
    images = tf.PixtralImageProcessor(size={"longest_edge": EDGE}, patch_size={"height": step, "width": step})
    return model, tf.LightOnOcrProcessor(images, words)


def tensors(inputs, features):
    """Reassemble planes from patches; transformers pads smaller images on the right and below."""
    for feature, plane in zip(features, inputs["pixel_values"], strict=True):
        _, h, w = feature.kwargs["grid"].data.tolist()
        patches = feature.kwargs["pixel_values"].data.view(h, w, 3, PATCH, PATCH)
        made = torch.zeros_like(plane)
        made[:, : h * PATCH, : w * PATCH] = patches.permute(2, 0, 3, 1, 4).reshape(3, h * PATCH, w * PATCH)
        yield "pixel_values", made, plane


def refuses(modality, size):
    """Return whether the image is smaller than one square of patches; transformers makes no row of it, or fails."""
    shrink = max(1, *(side / EDGE for side in size))
    return any(int(side / shrink) <= PATCH for side in size)


FAMILY = Family(
    "lighton_ocr",
    build,
    placeholders={"image": "<|image_pad|>"},
    sizes={"image": [(90, 130), (60, 60), (100, 70)]},  # 6 x 8 patches, 5 x 5, 8 x 5
    refuses=refuses,
    tensors=tensors,
    fullest={"image": [(42, 42)]},  # 9 patches, 4 of which make a row
    variants={"own head": {"tie": False}, "gelu": {"act": "gelu"}, "even": {"step": 2 * PATCH}},
)
