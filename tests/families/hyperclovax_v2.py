"""HyperCLOVA X SEED Think in the parity suite."""

from family import IMAGE_SIZES, VIDEO_SIZES, Family, is_sliver
from oracle import build_processor, ensure_torchvision, randomise, text_config, token_ids

VISION = {
    "model_type": "qwen2_5_vl_vision", "depth": 4, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4,
    "patch_size": 14, "out_hidden_size": 48, "window_size": 56, "fullatt_block_indexes": [1, 3],
}  # fmt: skip
SCALES = {"attention_multiplier": 0.2, "embedding_multiplier": 1.5, "residual_multiplier": 0.7, "logits_scaling": 1.4}


def build(seed, tie=True, text="hyperclovax", **changes):
    ensure_torchvision()
    import transformers as tf

    ids, words = token_ids(), build_processor("qwen2_5_vl").tokenizer
    scales = SCALES if text == "hyperclovax" else {}
    config = tf.HyperCLOVAXVisionV2Config(
        text_config={"model_type": text, **text_config(words, tie, **(scales | changes))},
        vision_config=VISION,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        tie_word_embeddings=tie,
    )
    model = tf.HyperCLOVAXVisionV2ForConditionalGeneration(config).eval()
    randomise(model, seed)
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    size = {"size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}}
    images, videos = tf.Qwen2VLImageProcessor(**size), tf.Qwen2VLVideoProcessor(**size, cap_pixels_per_frame=False)
    return model, tf.HyperCLOVAXVisionV2Processor(images, words, videos)


MARKED = "<|vision_start|><|{}_pad|><|vision_end|>"
FAMILY = Family(
    "hyperclovax_v2",
    build,
    placeholders={"image": MARKED.format("image"), "video": MARKED.format("video")},
    sizes={"image": [(90, 130), (60, 60), (140, 70)], "video": [(6, 80, 100), (4, 56, 90), (3, 60, 60)]},
    grid={"image": [*IMAGE_SIZES, (2, 500)], "video": VIDEO_SIZES},
    refuses=is_sliver,
    oracle_positions=lambda model, inputs: None,
    variants={
        "a head": {"tie": False},
        "no norms after": {"use_post_norm": False},
        "default scales": {"attention_multiplier": None, "embedding_multiplier": 1.0, "logits_scaling": 1.0},
    },
    layouts={
        "the publisher's": [
            ("model.language_model.", "model.language_model.model."),
            ("model.projector.", "model.vision_projector."),
            ("lm_head.", "model.language_model.lm_head."),
        ],
        "vLLM's names": [
            ("model.language_model.", "language_model.model."),
            ("model.projector.", "mm_projector."),
            ("model.vision_model.", "vision_model."),
            ("lm_head.", "language_model.lm_head."),
        ],
    },
)
