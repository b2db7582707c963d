"""LFM2-VL in the parity suite."""

from family import IMAGE_SIZES, Family
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config

PATCH, TILE = 8, 64
TAGS = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
SPECIALS = ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", "<|im_end|>", *TAGS]


def build(seed, tie=True, text="lfm2", **changes):
    ensure_torchvision()
    import transformers as tf

    words = fast_tokenizer(SPECIALS, eos_token="<|im_end|>", pad_token="<|im_end|>")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    layers = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}
    if text == "lfm2_moe":
        layers |= {"num_dense_layers": 1, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    config = tf.Lfm2VlConfig(
        vision_config={**shape, "num_patches": 36, "patch_size": PATCH, "vision_use_head": False},
        text_config={"model_type": text, **text_config(words, tie, **(layers if "lfm2" in text else {}))},
        image_token_id=words.convert_tokens_to_ids("<image>"),
        projector_hidden_size=80,
        tie_word_embeddings=tie,
        **changes,
    )
    model = tf.Lfm2VlForConditionalGeneration(config).eval()
    randomise(model, seed)
    images = tf.Lfm2VlImageProcessor(
        encoder_patch_size=PATCH, tile_size=TILE, max_tiles=4, min_image_tokens=4, max_image_tokens=16
    )
    return model, tf.Lfm2VlProcessor(images, words)


def tensors(inputs, features):
    """Reassemble our views from squares of patches, and take transformers' padded patches apart."""
    shapes, theirs, at = inputs["spatial_shapes"].tolist(), inputs["pixel_values"], 0
    for feature in features:
        start, patches = 0, feature.kwargs["pixel_values"].data
        for tiles, h, w in feature.kwargs["grids"].data.tolist():
            for _ in range(tiles):
                own = patches[start : start + h * w].view(h // 2, w // 2, 2, 2, 3, PATCH, PATCH)
                own = own.permute(0, 2, 1, 3, 5, 6, 4).reshape(h * w, -1)
                assert shapes[at] == [h, w]
                yield "pixel_values", own, theirs[at, : h * w]
                start, at = start + h * w, at + 1


def call(processor, text, data):
    images = {"images": [data["image"]]} if data.get("image") else {}
    return dict(processor(text=[text], **images, return_tensors="pt"))


MORE = [(80, 90), (600, 70), (129, 127), (64, 512), (300, 300), (65, 66), (255, 900), (700, 180)]
SIZES = [*(size for size in IMAGE_SIZES if max(size) < 16 * min(size)), *MORE]
"""40 sizes. transformers cannot join the views of others."""
KEYS = "a key bias adds the same to all scores of a query"
FAMILY = Family(
    "lfm2_vl",
    build,
    placeholders={"image": "<image>"},
    sizes={"image": [(70, 90), (200, 150), (33, 40), (60, 260)]},
    grid={"image": SIZES},
    tensors=tensors,
    call=call,
    silent={f"model.vision_tower.encoder.layers.{i}.self_attn.k_proj.bias": KEYS for i in range(3)},
    variants={
        "experts": {"text": "lfm2_moe"},
        "no norm": {"projector_use_layernorm": False, "tie": False},
        "llama": {"text": "llama"},
    },
    fullest={"image": [(128, 128)]},
)
