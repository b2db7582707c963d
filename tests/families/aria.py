"""Aria in the parity suite."""

import torch
from family import IMAGE_SIZES, Family
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config

SPECIALS = ["<|img|>", "<|im_end|>"]
PATCH, QUERIES = 70, {49: 4, 196: 16}  # an image of 490 or 980 pixels has 49 or 196 patches


def build(seed, tie=False, split=False, largest=490, **more):
    ensure_torchvision()
    import transformers as tf

    words = fast_tokenizer(
        SPECIALS, eos_token="<|im_end|>", pad_token="<|im_end|>", extra_special_tokens={"image_token": "<|img|>"}
    )
    shape = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
    experts = {"moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 2, "intermediate_size": 32}
    config = tf.AriaConfig(
        vision_config={"model_type": "idefics3_vision", **shape, "image_size": 980, "patch_size": PATCH},
        text_config={"model_type": "aria_text", **text_config(words, tie, **experts)},
        projector_patch_to_query_dict=QUERIES,
        image_token_index=words.image_token_id,
        tie_word_embeddings=tie,
        **more,
    )
    model = tf.AriaForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.vision_tower)
    images = tf.AriaImageProcessor(max_image_size=largest, split_image=split)
    return model, tf.AriaProcessor(images, words)


def call(processor, text, data):
    """Process one image after the other: transformers gives all images of a prompt the rows of the one with the most crops."""
    images, each = processor.image_processor, []
    for one in data.get("image", ()):
        each.append(images(one, return_tensors="pt"))
        rows = len(each[-1]["pixel_values"]) * QUERIES[(images.max_image_size // PATCH) ** 2]
        text = text.replace("<|img|>", "<row>" * rows, 1)
    inputs = dict(processor.tokenizer(text.replace("<row>", "<|img|>"), return_tensors="pt"))
    return inputs | {name: torch.cat([one[name] for one in each]) for name in ("pixel_values", "pixel_mask") if each}


def tensors(inputs, features):
    """Reassemble crops from our patches, and cut transformers' padded ones to the patches that its mask keeps."""
    ordered = sorted(features, key=lambda feature: feature.range.offset)
    grids = torch.cat([feature.kwargs["grids"].data for feature in ordered]).tolist()
    patches = torch.cat([feature.kwargs["pixel_values"].data for feature in ordered]).split([h * w for _, h, w in grids])
    for mine, theirs, mask, (_, h, w) in zip(patches, inputs["pixel_values"], inputs["pixel_mask"], grids, strict=True):
        kept = mask.unfold(0, PATCH, PATCH).unfold(1, PATCH, PATCH).flatten(2).any(2)
        yield "grids", torch.tensor([h, w]), torch.stack((kept[:, 0].sum(), kept[0].sum()))
        planes = mine.view(h, w, 3, PATCH, PATCH).permute(2, 0, 3, 1, 4).reshape(3, h * PATCH, w * PATCH)
        yield "pixel_values", planes, theirs[:, : h * PATCH, : w * PATCH]


KEYS = "a key bias adds the same to all scores of a query"
FAMILY = Family(
    "aria",
    build,
    placeholders={"image": "<|img|>"},
    sizes={"image": [(90, 130), (60, 60), (500, 1100), (200, 40)]},
    grid={"image": IMAGE_SIZES},
    call=call,
    tensors=tensors,
    silent={
        **{f"model.vision_tower.encoder.layers.{i}.self_attn.k_proj.bias": KEYS for i in range(3)},
        "model.vision_tower.post_layernorm": "the projector reads the state before this norm, as in the published model",
    },
    variants={
        "tied": {"tie": True},
        "crops": {"split": True},
        "large": {"largest": 980},
        "earlier layer": {"vision_feature_layer": -2},
    },
    fullest={"image": [(980, 980)]},
)
