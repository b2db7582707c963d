"""EXAONE 4.5 in the parity suite."""

from family import IMAGE_SIZES, VIDEO_SIZES, Family, is_sliver
from oracle import build_processor, ensure_torchvision, randomise, text_config, token_ids

VISION = {
    "depth": 4, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_key_value_heads": 2, "patch_size": 14,
    "out_hidden_size": 64, "window_size": 56, "fullatt_block_indexes": [1, 3],
}  # fmt: skip
WINDOWS = {"sliding_window": 20, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}


def build(seed, tie=False, **vision):
    ensure_torchvision()
    import transformers as tf

    ids, words = token_ids(), build_processor("qwen2_5_vl").tokenizer
    config = tf.Exaone4_5_Config(
        text_config={"model_type": "exaone4", **text_config(words, tie, **WINDOWS)},
        vision_config=VISION | vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        tie_word_embeddings=tie,
    )
    model = tf.Exaone4_5_ForConditionalGeneration(config).eval()
    randomise(model, seed)
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    size = {"size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}}
    images, videos = tf.Qwen2VLImageProcessor(**size), tf.Qwen2VLVideoProcessor(**size, cap_pixels_per_frame=False)
    return model, tf.Exaone4_5_Processor(images, words, videos)


MARKED = "<|vision_start|><|{}_pad|><|vision_end|>"
FAMILY = Family(
    "exaone4_5",
    build,
    placeholders={"image": MARKED.format("image"), "video": MARKED.format("video")},
    sizes={"image": [(90, 130), (60, 60), (140, 70)], "video": [(6, 80, 100), (4, 56, 90), (3, 60, 60)]},
    grid={"image": [*IMAGE_SIZES, (2, 500)], "video": VIDEO_SIZES},
    refuses=is_sliver,
    oracle_positions=lambda model, inputs: None,
    variants={"tied": {"tie": True}, "one kv head": {"num_key_value_heads": 1}, "as many": {"num_key_value_heads": 4}},
)
