"""GOT-OCR2 in the parity suite."""

import torch
from family import Family
from oracle import fast_tokenizer, randomise, text_config

SPECIALS = ("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<imgpad>")
SIDE, PATCH = 96, 4


def build(seed, tie=False, **sam):
    import transformers as tf

    words = fast_tokenizer(SPECIALS, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tower = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "mlp_dim": 48, "global_attn_indexes": [1]}
    shape = {"image_size": SIDE, "patch_size": PATCH, "output_channels": 16, "window_size": 14}
    config = tf.GotOcr2Config(
        vision_config={**tower, **shape, **sam},
        text_config={"model_type": "qwen2", **text_config(words, tie)},
        image_token_index=words.convert_tokens_to_ids("<imgpad>"),
        image_seq_length=36,
        tie_word_embeddings=tie,
    )
    model = tf.GotOcr2ForConditionalGeneration(config).eval()
    randomise(model, seed)
    for name, p in model.model.vision_tower.named_parameters():
        if "qkv" in name or "rel_pos" in name:
            p.data.mul_(1.5)  # without large scores, attention over many rows is a plain mean
    return model, tf.GotOcr2Processor(tf.GotOcr2ImageProcessor(size={"height": SIDE, "width": SIDE}), words)


def call(processor, text, data):
    """Cut images into tiles, and count the rows of each image, which transformers adds up for a whole prompt."""
    made = {}
    if "image" in data:
        made = dict(processor.image_processor(data["image"], crop_to_patches=True, return_tensors="pt"))
        for tiles in made.pop("num_patches").tolist():
            text = text.replace("<imgpad>", "<held>" * 36 * tiles, 1)
    return {"input_ids": processor.tokenizer(text.replace("<held>", "<imgpad>"), return_tensors="pt")["input_ids"], **made}


def tensors(inputs, features):
    ordered = sorted(features, key=lambda feature: feature.range.offset)
    patches = torch.cat([feature.kwargs["pixel_values"].data for feature in ordered])
    theirs, side = inputs["pixel_values"], SIDE // PATCH
    planes = patches.view(-1, side, side, 3, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
    yield "pixel_values", planes.reshape(theirs.shape), theirs


PUBLISHED = [
    *(
        (f"vision_tower.layers.{i}.layer_norm{n}.", f"model.vision_tower_high.blocks.{i}.norm{n}.")
        for i in range(3)
        for n in (1, 2)
    ),
    ("vision_tower.layers.", "model.vision_tower_high.blocks."),
    ("vision_tower.neck.conv1.", "model.vision_tower_high.neck.0."),
    ("vision_tower.neck.layer_norm1.", "model.vision_tower_high.neck.1."),
    ("vision_tower.neck.conv2.", "model.vision_tower_high.neck.2."),
    ("vision_tower.neck.layer_norm2.", "model.vision_tower_high.neck.3."),
    ("vision_tower.patch_embed.projection.", "model.vision_tower_high.patch_embed.proj."),
    ("vision_tower.", "model.vision_tower_high."),
    ("multi_modal_projector.conv_upsampler1.", "model.vision_tower_high.net_2."),
    ("multi_modal_projector.conv_upsampler2.", "model.vision_tower_high.net_3."),
    ("multi_modal_projector.multimodal_projector.", "model.mm_projector_vary."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
]

FAMILY = Family(
    "got_ocr2",
    build,
    placeholders={"image": "<imgpad>"},
    sizes={"image": [(90, 130), (60, 60), (140, 70)]},
    call=call,
    tensors=tensors,
    variants={"tied": {"tie": True}, "plain scores": {"use_rel_pos": False, "qkv_bias": False}},
    layouts={"the publisher's": PUBLISHED},
    request=lambda text, data: {
        "prompt": text,
        "multi_modal_data": data,
        "mm_processor_kwargs": {"crop_to_patches": True} if data else {},
    },
    options={"max_model_len": 2048},
)
