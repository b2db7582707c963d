"""Idefics3 and SmolVLM in the parity suite."""

import json
from functools import partial

import torch
from family import IMAGE_SIZES, Family
from oracle import fast_tokenizer, randomise, sharpen, text_config

TAGS = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]  # other tags are plain text
SPECIALS = ["<image>", "<video>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TAGS]
JSON = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
FPS = 2.0
VIDEO_SIZES = [(1, 56, 56), (2, 90, 60), (3, 60, 90), (4, 28, 200), (8, 31, 300), (13, 64, 64)]
COUNTS = {1: "one", 2: "two", 3: "three", 4: "four", 8: "eight", 13: "thirteen"}


def build(kind, seed, tie=False, split=True, **vision):
    import transformers as tf
    from transformers.models.smolvlm import processing_smolvlm

    processing_smolvlm.num2words = COUNTS.get  # stands for a package that transformers does not install
    words = fast_tokenizer(SPECIALS, eos_token="<end_of_utterance>", pad_token="<end_of_utterance>")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = getattr(tf, f"{kind}Config")(
        vision_config={**shape, "image_size": 56, "patch_size": 14, **vision},
        text_config={"model_type": "llama", **text_config(words, tie)},
        image_token_id=words.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=tie,
    )
    model = getattr(tf, f"{kind}ForConditionalGeneration")(config).eval()
    randomise(model, seed)
    sharpen(model.model.vision_model)
    images = getattr(tf, f"{kind}ImageProcessor")(**JSON, do_image_splitting=split)
    if kind == "Idefics3":
        return model, tf.Idefics3Processor(images, words, image_seq_len=4)
    return model, tf.SmolVLMProcessor(images, words, tf.SmolVLMVideoProcessor(**JSON), image_seq_len=4)


def finish(kind, folder):
    """Write the number of rows per tile, as the Hub's checkpoints do."""
    made = {"image_seq_len": 4, "processor_class": f"{kind}Processor"}
    (folder / "processor_config.json").write_text(json.dumps(made))


def tensors(inputs, features):
    """Reassemble pieces from our patches, which are ordered in squares."""
    patches = torch.cat([feature.kwargs["pixel_values"].data for feature in features])
    squares = patches.view(-1, 2, 2, 2, 2, 3, 14, 14).permute(0, 5, 1, 3, 6, 2, 4, 7)
    yield "pixel_values", squares.reshape(inputs["pixel_values"].shape), inputs["pixel_values"]


def call(processor, text, data):
    """Pass videos as already sampled: every frame is used, at FPS."""
    if "video" not in data:
        images = {"images": [data["image"]]} if data else {}
        return dict(processor(text=[text], **images, return_tensors="pt"))
    metadata = [
        {"fps": FPS, "duration": len(c) / FPS, "total_num_frames": len(c), "frames_indices": list(range(len(c)))}
        for c in data["video"]
    ]
    return dict(processor(text=[text], videos=data["video"], video_metadata=metadata, return_tensors="pt"))


def ours(modality, media):
    return (media, {"fps": FPS, "do_sample_frames": False}) if modality == "video" else media


def prompt(placeholders, seed):
    """Write a prompt like chat templates: a space before a video, the question directly after it."""
    return f"def f{seed}(x): " + "and then ".join(placeholders) + "Return it" + " + x" * (seed % 5)


KEYS = "a key bias adds the same to all scores of a query"
SILENT = {f"model.vision_model.encoder.layers.{i}.self_attn.k_proj.bias": KEYS for i in range(3)}


def row(name, kind, **more):
    return Family(
        name,
        partial(build, kind),
        sizes={"image": [(90, 130), (60, 60), (140, 70)], "video": [(3, 80, 100), (2, 56, 90), (4, 60, 60)]},
        grid={"image": IMAGE_SIZES, "video": VIDEO_SIZES},
        prompt=prompt,
        ours=ours,
        call=call,
        tensors=tensors,
        finish=partial(finish, kind),
        silent=SILENT,
        **more,
    )


FAMILIES = [
    row(
        "idefics3",
        "Idefics3",
        placeholders={"image": "<image>"},
        variants={
            "tied": {"tie": True},
            "whole": {"split": False},
            "larger position table": {"image_size": 70},
            "smaller position table": {"image_size": 42},
        },
    ),
    row("smolvlm", "SmolVLM", placeholders={"image": "<image>", "video": "<video>"}, cases=["", "i", "v", "ii", "iii"]),
]
