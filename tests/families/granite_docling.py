"""Granite Docling (500M) in the parity suite."""

import json

import torch
from family import Family
from oracle import fast_tokenizer, randomise, sharpen, text_config

TAGS = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]  # other tags are plain text
SPECIALS = ["<eos>", "<image>", "<fake_token_around_image>", "<global-img>", *TAGS]
MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 1.5}
SIZE = {"height": 80, "width": 80}


def build(seed, tie=False, router=None, **dense):
    import transformers as tf

    words = fast_tokenizer(SPECIALS, eos_token="<eos>", pad_token="<eos>")
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = tf.GraniteDoclingConfig(
        vision_config={
            **shape, "image_size": 80, "patch_size": 4, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 2],
        },
        text_config={**text_config(words, tie), **MULTIPLIERS, "intermediate_size": 512},
        image_token_id=words.convert_tokens_to_ids("<image>"),
        density_router_hidden_size=router,
        tie_word_embeddings=tie,
        pad_token_id=None,
    )  # fmt: skip
    model = tf.GraniteDoclingForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.vision_model)
    model.model.vision_model.connector.coarse.projection.weight.data.mul_(4)  # beside the fixed positions
    images = tf.GraniteDoclingImageProcessor(size=SIZE, max_patches=4, **dense)
    return model, tf.GraniteDoclingProcessor(images, words, image_seq_len=25)


def finish(folder):
    """Write the number of rows per tile, as the Hub's checkpoints do."""
    made = {"image_seq_len": 25, "processor_class": "GraniteDoclingProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(made))


def call(processor, text, data):
    images = {"images": [data["image"]]} if data else {}
    return dict(processor(text=[text], **images, return_tensors="pt"))


def tensors(inputs, features):
    """Reassemble tiles from our patches, which are ordered in squares."""
    patches = torch.cat([feature.kwargs["pixel_values"].data for feature in features])
    squares = patches.view(-1, 5, 5, 4, 4, 3, 4, 4).permute(0, 5, 1, 3, 6, 2, 4, 7)
    theirs = inputs["pixel_values"][0]
    yield "pixel_values", squares.reshape(theirs.shape), theirs


FINE = "the fine path is not used"
SILENT = {f"model.vision_model.encoder.layers.{i}.self_attn.k_proj.bias": "it adds the same to all scores" for i in range(4)}
SILENT["model.vision_model.connector.fine."] = FINE

FAMILY = Family(
    "granite_docling",
    build,
    placeholders={"image": "<image>"},
    sizes={"image": [(90, 130), (60, 60), (140, 70)]},
    call=call,
    tensors=tensors,
    finish=finish,
    silent=SILENT,
    fullest={"image": [(160, 160), (80, 160), (160, 80)]},
    variants={
        "tied": {"tie": True},
        "router": {"router": 8},
        "dense pages": {"dense_max_patches": 6, "dense_min_aspect": 1.2},
    },
    options={"max_model_len": 2048},
)
