"""LLaVA-NeXT-Video in the parity suite."""

import json

import torch
from family import IMAGE_SIZES, LAYOUTS, Family
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config

TILE, PATCH = 28, 7
GRIDS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
VISION = {
    "model_type": "clip_vision_model", "projection_dim": 32, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
    "num_attention_heads": 4, "image_size": TILE, "patch_size": PATCH,
}  # fmt: skip
CHOSEN = {"patch_size": PATCH, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
SLIVERS = [(2, 100), (3, 200), (3, 100)]  # unpadding leaves nothing of their tiles


def build(seed, tie=False, text="llama", layer=-2, mode="average", **more):
    ensure_torchvision()
    import transformers as tf

    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
    words = fast_tokenizer(specials, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|im_start|>")
    config = tf.LlavaNextVideoConfig(
        vision_config=VISION,
        text_config={"model_type": text, **text_config(words, tie, **more)},
        image_token_index=words.convert_tokens_to_ids("<image>"),
        video_token_index=words.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=GRIDS,
        tie_word_embeddings=tie,
        vision_feature_layer=layer,
        spatial_pool_mode=mode,
    )
    model = tf.LlavaNextVideoForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.vision_tower)
    size = {"size": {"shortest_edge": TILE}, "crop_size": {"height": TILE, "width": TILE}}
    images = tf.LlavaNextImageProcessor(**size, image_grid_pinpoints=GRIDS)
    return model, tf.LlavaNextVideoProcessor(tf.LlavaNextVideoVideoProcessor(**size), images, words, **CHOSEN)


def finish(folder):
    (folder / "processor_config.json").write_text(json.dumps(CHOSEN))


def planes(feature):
    pieces, h, w = feature.kwargs["grid"].data.tolist()
    cut = feature.kwargs["pixel_values"].data.view(pieces, h, w, 3, PATCH, PATCH)
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(pieces, 3, h * PATCH, w * PATCH)


def tensors(inputs, features):
    seen = {"image": 0, "video": 0}
    for feature in features:
        name = "pixel_values" if feature.modality == "image" else "pixel_values_videos"
        theirs, ours = inputs[name][seen[feature.modality]], planes(feature)
        seen[feature.modality] += 1
        yield name, ours, torch.as_tensor(theirs)[: len(ours)]


UNUSED = "layers after the last selected one are not used"
FAMILY = Family(
    "llava_next_video",
    build,
    placeholders={"image": "<image>", "video": "<video>"},
    sizes={"image": [(90, 130), (60, 60), (40, 170)], "video": [(3, 40, 60), (5, 30, 30), (2, 70, 20)]},
    grid={"image": IMAGE_SIZES, "video": [(1, 56, 56), (2, 90, 60), (3, 60, 90), (6, 80, 100), (13, 64, 64)]},
    cases=("", "i", "v", "ii", "ivi", "iiv"),
    tensors=tensors,
    finish=finish,
    fullest={"image": SLIVERS},
    silent={
        "model.vision_tower.post_layernorm": "the tower's last hidden states are not used",
        "model.vision_tower.encoder.layers.3": UNUSED,
        **{
            f"model.vision_tower.encoder.layers.{i}.self_attn.k_proj.bias": "a key bias adds the same to all scores of a query"
            for i in range(4)
        },
    },
    variants={
        "maximum, mistral": {"mode": "max", "text": "mistral", "sliding_window": None},
        "tied, two layers": {"tie": True, "layer": [-3, -2]},
    },
    layouts=LAYOUTS,
)
