"""PaddleOCR-VL in the parity suite."""

import json
from pathlib import Path

from family import IMAGE_SIZES, Family, rows_in_squares
from oracle import fast_tokenizer, randomise, text_config

SPECIALS = ("<|endoftext|>", "<|im_end|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>", "<|video_pad|>")
AREA = {"shortest_edge": 56 * 56, "longest_edge": 140 * 140}
PATCH = 14


def build(seed, tie=True):
    import transformers as tf

    named = {"image_token": "<|IMAGE_PLACEHOLDER|>"}
    words = fast_tokenizer(SPECIALS, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_specific_special_tokens=named)
    ids = dict(zip(SPECIALS, words.convert_tokens_to_ids(SPECIALS), strict=True))
    text = text_config(words, tie, head_dim=16, use_bias=False)
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = tf.PaddleOCRVLConfig(
        text_config=text,
        vision_config=vision | {"image_size": 70, "patch_size": PATCH, "spatial_merge_size": 2},
        image_token_id=ids["<|IMAGE_PLACEHOLDER|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|IMAGE_START|>"],
        vision_end_token_id=ids["<|IMAGE_END|>"],
        tie_word_embeddings=tie,
    )
    model = tf.PaddleOCRVLForConditionalGeneration(config).eval()
    randomise(model, seed)
    images = tf.PaddleOCRVLImageProcessor(size=AREA, patch_size=PATCH, merge_size=2, temporal_patch_size=1)
    return model, tf.PaddleOCRVLProcessor(image_processor=images, tokenizer=words)


def flatten(folder: Path):
    """Move text_config to the top level of config.json, as in the first published checkpoints."""
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    (folder / "config.json").write_text(json.dumps({**text, **config}))


def refuses(modality, size):
    return max(size) > 200 * min(size) and min(size) >= 28


def row(name, **more):
    return Family(
        name,
        build,
        placeholders={"image": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"},
        sizes={"image": [(90, 130), (60, 60), (140, 70)]},
        grid={"image": IMAGE_SIZES},
        refuses=refuses,
        tensors=rows_in_squares,
        **more,
    )


FAMILIES = [
    row("paddleocr_vl", variants={"own head": {"tie": False}}),
    row("paddleocr_vl_flat", finish=flatten),
]
