"""Pixtral (as transformers has it, inside its LLaVA) and Mistral 3 in the parity suite."""

import json
from functools import partial

import torch
from family import IMAGE_SIZES, Family
from oracle import fast_tokenizer, randomise, text_config

SPECIALS = ["</s>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
GROWING = YARN | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.4}
KINDS = {"pixtral": ("Llava", 1), "mistral3": ("Mistral3", 2)}


def build(name, seed, tie=False, layer=-1, act="gelu", bias=None, text="mistral", **more):
    import transformers as tf

    stem, merge = KINDS[name]
    words = fast_tokenizer(SPECIALS, eos_token="</s>", pad_token="</s>")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    vision = {**shape, "model_type": "pixtral", "image_size": 112, "patch_size": 14, "hidden_act": act}
    options = {} if bias is None else {"multimodal_projector_bias": bias}
    config = getattr(tf, f"{stem}Config")(
        vision_config=vision,
        text_config={"model_type": text, **text_config(words, tie), "head_dim": 24, **more},
        image_token_index=words.convert_tokens_to_ids("[IMG]"),
        vision_feature_layer=layer,
        tie_word_embeddings=tie,
        **({"vision_feature_select_strategy": "full"} if stem == "Llava" else {"spatial_merge_size": merge}),
        **options,
    )
    model = getattr(tf, f"{stem}ForConditionalGeneration")(config).eval()
    randomise(model, seed)
    images = tf.PixtralImageProcessor(size={"longest_edge": 112}, patch_size={"height": 14, "width": 14})
    return model, tf.PixtralProcessor(images, words, patch_size=14, spatial_merge_size=merge)


def finish(merge, folder):
    """Write the spatial merge size, as the Hub's checkpoints do."""
    made = {"patch_size": 14, "spatial_merge_size": merge, "processor_class": "PixtralProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(made))


def tensors(merge, inputs, features):
    """Reassemble planes from squares of patches; transformers pads smaller images on the right and below."""
    for feature, plane in zip(features, inputs["pixel_values"], strict=True):
        _, h, w = feature.kwargs["grid"].data.tolist()
        patches = feature.kwargs["pixel_values"].data.view(h // merge, w // merge, merge, merge, 3, 14, 14)
        made = torch.zeros_like(plane)
        made[:, : h * 14, : w * 14] = patches.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, h * 14, w * 14)
        yield "pixel_values", made, plane


def refuses(modality, size):
    return False


def row(name, **more):
    merge = KINDS[name][1]
    return Family(
        name,
        partial(build, name),
        placeholders={"image": "[IMG]"},
        sizes={"image": [(90, 130), (60, 60), (40, 170)]},
        grid={"image": [size for size in IMAGE_SIZES if max(size) <= 112 * min(size)]},  # transformers rounds other sides to 0
        tensors=partial(tensors, merge),
        finish=partial(finish, merge),
        **more,
    )


FAMILIES = [
    row(
        "pixtral",
        variants={
            "tied": {"tie": True},
            "layer": {"layer": -2, "act": "silu", "bias": False},
            "llama": {"text": "llama"},
            "through transformers": {"text": "olmo"},
        },
    ),
    row(
        "mistral3",
        variants={
            "tied": {"tie": True},
            "bias": {"bias": True, "act": "silu"},
            "window": {"sliding_window": 9},
            "ministral3": {"text": "ministral3", "rope_parameters": GROWING},
        },
    ),
]
