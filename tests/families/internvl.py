"""InternVL in the parity suite."""

import json

from family import IMAGE_SIZES, VIDEO_SIZES, Family, patches_in_squares
from oracle import fast_tokenizer, randomise, sharpen, text_config

NAMED = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>",
}  # fmt: skip
SIZE = {"height": 56, "width": 56}


def build(seed, tie=False, text="qwen2", tiles=4, **vision):
    import transformers as tf

    words = fast_tokenizer(["<|im_end|>", *NAMED.values()], eos_token="<|im_end|>", pad_token="<|im_end|>")
    words._set_model_specific_special_tokens(NAMED)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = tf.InternVLConfig(
        vision_config=tf.InternVLVisionConfig(**{**shape, "image_size": [56, 56], **vision}),
        text_config={"model_type": text, **text_config(words, tie)},
        image_token_id=words.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=tie,
    )
    model = tf.InternVLForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.vision_tower)
    images = tf.GotOcr2ImageProcessor(size=SIZE, max_patches=tiles)
    videos = tf.InternVLVideoProcessor(size=SIZE)
    return model, tf.InternVLProcessor(images, words, videos, image_seq_length=4)


def ours(modality, media):
    """Use every frame of a video, as transformers does."""
    return (media, {"fps": 1.0, "do_sample_frames": False}) if modality == "video" else media


def finish(folder):
    """Write the number of rows per tile, as the Hub's checkpoints do."""
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": 4, "processor_class": "InternVLProcessor"}))


FAMILY = Family(
    "internvl",
    build,
    placeholders={"image": "<IMG_CONTEXT>", "video": "<video>"},
    sizes={"image": [(90, 130), (60, 60), (140, 70)], "video": [(3, 80, 100), (2, 56, 90), (4, 60, 60)]},
    grid={"image": IMAGE_SIZES, "video": VIDEO_SIZES},
    ours=ours,
    tensors=patches_in_squares(2, 14),
    finish=finish,
    variants={
        "tied": {"tie": True},
        "root mean square": {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": True},
        "last norm": {"use_mean_pooling": False},
        "llama": {"text": "llama", "tiles": 12},
    },
)
