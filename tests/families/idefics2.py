"""Idefics2 in the parity suite."""

import json

import torch
from family import IMAGE_SIZES, Family
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config

SPECIALS = ["<image>", "<fake_token_around_image>", "<end_of_utterance>"]
PATCH, ROWS = 14, 5


def build(seed, tie=False, split=True, width=64, shortest=42, longest=112, **text):
    ensure_torchvision()
    import transformers as tf

    words = fast_tokenizer(SPECIALS, eos_token="<end_of_utterance>", pad_token="<end_of_utterance>")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    resampler = {"resampler_n_latents": ROWS, "resampler_depth": 2, "resampler_n_heads": 4, "resampler_head_dim": 24}
    config = tf.Idefics2Config(
        vision_config={**shape, "image_size": 112, "patch_size": PATCH},
        perceiver_config={"hidden_size": width, "rms_norm_eps": 1e-3, "num_key_value_heads": 2, **resampler},
        text_config={"model_type": "mistral", **text_config(words, tie, **text)},
        image_token_id=words.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=tie,
    )
    model = tf.Idefics2ForConditionalGeneration(config).eval()
    randomise(model, seed)
    images = tf.Idefics2ImageProcessor(size={"shortest_edge": shortest, "longest_edge": longest}, do_image_splitting=split)
    return model, tf.Idefics2Processor(images, words, image_seq_len=ROWS)


def finish(folder):
    made = {"image_seq_len": ROWS, "processor_class": "Idefics2Processor"}
    (folder / "processor_config.json").write_text(json.dumps(made))


def tensors(inputs, features):
    """Reassemble images from our patches, and cut transformers' padded images to whole patches."""
    grids = torch.cat([feature.kwargs["grids"].data for feature in features])
    patches = torch.cat([feature.kwargs["pixel_values"].data for feature in features]).split(
        [h * w for _, h, w in grids.tolist()]
    )
    masks, images = inputs["pixel_attention_mask"].flatten(0, 1), inputs["pixel_values"].flatten(0, 1)
    yield "grids", grids[:, 1:], torch.stack((masks[:, :, 0].sum(1), masks[:, 0].sum(1)), 1) // PATCH
    for mine, theirs, (_, h, w) in zip(patches, images, grids.tolist(), strict=True):
        planes = mine.view(h, w, 3, PATCH, PATCH).permute(2, 0, 3, 1, 4).reshape(3, h * PATCH, w * PATCH)
        yield "pixel_values", planes, theirs[:, : h * PATCH, : w * PATCH]


def call(processor, text, data):
    images = {"images": [data["image"]]} if data.get("image") else {}
    return dict(processor(text=[text], **images, return_tensors="pt"))


def prompt(placeholders, seed):
    """Write images with or without text between them, and text, a space or a tag after the last one."""
    between = ("", " and ", "then")[seed % 3]
    return (
        f"def f{seed}(x):" + between.join(placeholders) + ("shutil's path", " return it", "<a>")[seed % 3] + " + x" * (seed % 5)
    )


def refuses(modality, size):
    """Return True for images of one line or column: they have no quarters, and transformers divides by zero."""
    return min(size) < 2


KEYS = "a key bias adds the same to all scores of a query"
FAMILY = Family(
    "idefics2",
    build,
    placeholders={"image": "<image>"},
    sizes={"image": [(90, 131), (60, 60), (240, 70), (224, 224)]},
    grid={"image": IMAGE_SIZES},
    refuses=refuses,
    prompt=prompt,
    call=call,
    tensors=tensors,
    finish=finish,
    silent={f"model.vision_model.encoder.layers.{i}.self_attn.k_proj.bias": KEYS for i in range(3)},
    variants={
        "tied": {"tie": True},
        "whole": {"split": False},
        "default width": {"width": 4096},
        "windows": {"sliding_window": 7},
        "shortest above longest": {"shortest": 126},
        "above the position table": {"longest": 168, "split": False},
    },
    fullest={"image": [(224, 224)]},
)
