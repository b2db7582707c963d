"""Ovis2 in the parity suite."""

import json

from family import IMAGE_SIZES, Family, patches_in_squares
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config

MARKS = ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
PATCH, STRIDE, SIDE = 7, 2, 56
ROWS = (SIDE // PATCH // STRIDE) ** 2


def build(seed, tie=False, bias=False, cut=True, text="qwen2"):
    ensure_torchvision()
    import transformers as tf

    words = fast_tokenizer(["<image>", "<IMG_ATOM>", *MARKS, "<|im_end|>"], eos_token="<|im_end|>", pad_token="<|im_end|>")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes = {"image_size": SIDE, "patch_size": PATCH, "hidden_stride": STRIDE, "vocab_size": 77}
    own = text_config(words, tie)
    config = tf.Ovis2Config(
        vision_config={**shape, **sizes, "qkv_bias": bias, "mlp_bias": bias},
        text_config={"model_type": text, **own},
        image_token_id=words.convert_tokens_to_ids("<IMG_ATOM>"),
        visual_indicator_token_ids=words.convert_tokens_to_ids(MARKS),
        hidden_size=own["hidden_size"],
        vocab_size=own["vocab_size"],
        tie_word_embeddings=tie,
    )
    model = tf.Ovis2ForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.vision_tower)
    images = tf.Ovis2ImageProcessor(size={"height": SIDE, "width": SIDE}, crop_to_patches=cut, max_patches=6)
    return model, tf.Ovis2Processor(images, words, image_seq_length=ROWS)


def finish(folder):
    made = {"image_seq_length": ROWS, "processor_class": "Ovis2Processor"}
    (folder / "processor_config.json").write_text(json.dumps(made))


FAMILY = Family(
    "ovis2",
    build,
    placeholders={"image": "<image>"},
    sizes={"image": [(90, 130), (50, 50), (140, 70), (30, 200)]},
    grid={"image": IMAGE_SIZES},
    tensors=patches_in_squares(STRIDE, PATCH),
    finish=finish,
    variants={"tied": {"tie": True}, "biases": {"bias": True}, "whole": {"cut": False}, "llama": {"text": "llama"}},
    fullest={"image": [(140, 70)]},
)
