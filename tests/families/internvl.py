"""InternVL and Qianfan-OCR in the parity suite."""

import json

from family import IMAGE_SIZES, VIDEO_SIZES, Family, patches_in_squares
from oracle import fast_tokenizer, randomise, sharpen, text_config
from safetensors.torch import load_file, save_file

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


def build_qianfan(seed, tie=False, **vision):
    import transformers as tf

    named = {name: token for name, token in NAMED.items() if name != "video_token"}
    words = fast_tokenizer(["<|im_end|>", *named.values()], eos_token="<|im_end|>", pad_token="<|im_end|>")
    words._set_model_specific_special_tokens(named)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = tf.QianfanOCRConfig(
        vision_config={**shape, "image_size": [56, 56], **vision},
        text_config={"model_type": "qwen3", **text_config(words, tie), "head_dim": 16},
        image_token_id=words.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=tie,
    )
    model = tf.QianfanOCRForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.vision_tower)
    return model, tf.QianfanOCRProcessor(tf.GotOcr2ImageProcessor(size=SIZE, max_patches=4), words, image_seq_length=4)


def ours(modality, media):
    """Use every frame of a video, as transformers does."""
    return (media, {"fps": 1.0, "do_sample_frames": False}) if modality == "video" else media


def finish(folder, kind="InternVL"):
    """Write the number of rows per tile, as the Hub's checkpoints do."""
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": 4, "processor_class": f"{kind}Processor"}))


def finish_qianfan(folder):
    """Write the decoder's names as published: transformers 5.23 puts the tower's `encoder.` into them, too."""
    finish(folder, "QianfanOCR")
    stored = load_file(folder / "model.safetensors")
    renamed = {name.replace("language_model.model.encoder.", "language_model.model."): stored[name] for name in stored}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


INTERNVL = Family(
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
        "no positions": {"use_absolute_position_embeddings": False},
        "llama": {"text": "llama", "tiles": 12},
    },
)
QIANFAN = Family(
    "qianfan_ocr",  # transformers saves the publisher's names
    build_qianfan,
    placeholders={"image": "<image>"},
    sizes={"image": [(90, 130), (60, 60), (140, 70)]},
    tensors=patches_in_squares(2, 14),
    finish=finish_qianfan,
    silent={
        f"model.vision_tower.layers.{i}.attention.k_proj.bias": "a key bias adds the same to all scores of a query"
        for i in range(3)
    },
    variants={"tied": {"tie": True}, "norms": {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": False}},
)
FAMILIES = [INTERNVL, QIANFAN]
