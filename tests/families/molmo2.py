"""Molmo2 in the parity suite: images and videos, whose tokens see each other across the text between them."""

import torch
from family import IMAGE_SIZES, VIDEO_SIZES, Family, as_sampled, call_sampled
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config

MARKS = (
    "<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<low_res_im_start>", "<frame_start>", "<frame_end>", "<im_low>",
    "<|image|>", "<|video|>",
)  # fmt: skip
PATCH, SIDE = 4, 12  # pixels of a patch, patches along a side of a crop


def build(seed, norm_after=False, **text):
    ensure_torchvision()
    import transformers as tf

    words = fast_tokenizer(["<eos>", *MARKS], eos_token="<eos>", pad_token="<eos>")
    ids = dict(zip(MARKS, words.convert_tokens_to_ids(MARKS), strict=True))
    own = {**text_config(words), "head_dim": 16, "vocab_size": len(words) - len(MARKS), "additional_vocab_size": len(MARKS)}
    vision = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16}
    size = {"image_size": [PATCH * SIDE] * 2, "patch_size": PATCH, "num_key_value_heads": 4}
    config = tf.Molmo2Config(
        text_config={**own, "norm_after": norm_after, **text},
        vision_config={**vision, **size},
        adapter_config={
            "vision_feature_layer": [2, 0], "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
            "head_dim": 16, "intermediate_size": 96, "text_hidden_size": 64,
        },
        image_start_token_id=ids["<im_start>"],
        low_res_image_start_token_id=ids["<low_res_im_start>"],
        image_end_token_id=ids["<im_end>"],
        image_patch_id=ids["<im_patch>"],
        frame_start_token_id=ids["<frame_start>"],
        frame_end_token_id=ids["<frame_end>"],
    )  # fmt: skip
    model = tf.Molmo2ForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.vision_tower)
    square = {"size": {"height": PATCH * SIDE, "width": PATCH * SIDE}, "patch_size": PATCH}
    # the publisher always normalises frames; transformers' class does so only if it is asked to
    videos = tf.Molmo2VideoProcessor(**square, do_rescale=True, do_normalize=True)
    return model, tf.Molmo2Processor(tf.Molmo2ImageProcessor(**square), videos, words)


def tensors(inputs, features):
    """Pair the patches, whose channels come last in transformers, and the groups of patches without rows for marks."""
    name = "image" if "image_grids" in inputs else "video"
    theirs = inputs["pixel_values" if name == "image" else "pixel_values_videos"]
    ordered, first = sorted(features, key=lambda feature: feature.range.offset), 0
    patches = torch.cat([feature.kwargs["pixel_values"].data for feature in ordered])
    yield "pixel_values", patches.view(-1, 3, PATCH, PATCH).permute(0, 2, 3, 1).reshape(theirs.shape), theirs
    groups = []
    for feature in ordered:
        own = feature.kwargs["token_pooling"].data
        own = own[(own >= 0).any(1)]
        groups.append(torch.where(own >= 0, own + first, own))
        first += len(feature.kwargs["pixel_values"].data)
    yield "token_pooling", torch.cat(groups), inputs[f"{name}_token_pooling"]


KEYS = "a key bias adds the same to all scores of a query"
FAMILY = Family(
    "molmo2",
    build,
    placeholders={"image": "<|image|>", "video": "<|video|>"},
    sizes={"image": [(90, 130), (60, 60), (40, 150)], "video": [(3, 60, 80), (2, 56, 90), (4, 50, 50)]},
    grid={"image": IMAGE_SIZES, "video": VIDEO_SIZES},
    cases=["", "i", "v", "ii", "iii"],
    ours=as_sampled,
    call=call_sampled,
    tensors=tensors,
    prompt_attention="bidirectional_media",
    silent={
        "model.multi_modal_projector.image_pooling_2d.k_proj.bias": KEYS,
        **{f"model.vision_tower.layers.{i}.self_attn.k_proj.bias": KEYS for i in range(3)},
    },
    fullest={"image": [(200, 400)]},
    fullest_items=2,
    variants={
        "norms after": {"norm_after": True, "qk_norm_type": "olmo"},
        "scaled positions in some layers": {
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64},
            "rope_scaling_layers": [1],
        },
    },
)
