"""Aya Vision and Cohere2-Vision in the parity suite.

The oracle's head applies the text config's `logit_scale`, as the published models do; transformers 5 leaves it out.
"""

from functools import partial

from family import IMAGE_SIZES, Family, load_oracle, patches_in_squares
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config

BEGIN, END, PATCH, BREAK = (f"<|{name}|>" for name in ("START_OF_IMG", "END_OF_IMG", "IMG_PATCH", "IMG_LINE_BREAK"))
SPECIALS = [BEGIN, END, PATCH, BREAK, "<|END_OF_TURN_TOKEN|>"]
WINDOWS = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.75,
}
SIZE = {"height": 28, "width": 28}


def build(name, seed, text="cohere2", image_token=None, tiles=4, **more):
    ensure_torchvision()
    import transformers as tf

    named = {"boi_token": BEGIN, "eoi_token": END, "image_token": PATCH, "img_line_break_token": BREAK}
    specials = [*SPECIALS, *([image_token] if image_token else [])]
    words = fast_tokenizer(specials, eos_token=SPECIALS[-1], pad_token=SPECIALS[-1], extra_special_tokens=named)
    shape = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
    is_aya = name == "aya_vision"
    config = (tf.AyaVisionConfig if is_aya else tf.Cohere2VisionConfig)(
        vision_config={
            "model_type": "siglip_vision_model",
            **shape,
            "image_size": 28,
            "patch_size": 7,
            "vision_use_head": False,
        },
        text_config={"model_type": text, **text_config(words, True, **(WINDOWS if text == "cohere2" else {}))},
        alignment_intermediate_size=96,
        image_token_id=words.convert_tokens_to_ids(PATCH),
        **more,
    )
    model = getattr(tf, f"{'AyaVision' if is_aya else 'Cohere2Vision'}ForConditionalGeneration")(config).eval()
    randomise(model, seed)
    sharpen(model.model.vision_tower)
    if is_aya:
        images = tf.GotOcr2ImageProcessor(size=SIZE, max_patches=tiles, crop_to_patches=True)
        return model, tf.AyaVisionProcessor(images, words, patch_size=7, img_size=28, downsample_factor=2)
    images = tf.Cohere2VisionImageProcessor(size=SIZE, max_patches=tiles, patch_size=2)
    return model, tf.Cohere2VisionProcessor(images, words)


def load(folder):
    model, processor = load_oracle(folder)
    scale = getattr(model.config.text_config, "logit_scale", 1.0)
    model.lm_head.register_forward_hook(lambda head, given, logits: logits * scale)
    return model, processor


def call_aya(processor, text, data):
    """Give the processor the tile's size, which processor_config.json has in a checkpoint."""
    processor.img_size, processor.patch_size = 28, 14
    return dict(processor(text=[text], **({"images": data["image"]} if data.get("image") else {}), return_tensors="pt"))


def call_cohere(processor, text, data):
    """Give the processor the number of rows along a tile's side, which a checkpoint has in processor_config.json."""
    processor.patch_size = 2
    return dict(processor(text=[text], **({"images": data["image"]} if data.get("image") else {}), return_tensors="pt"))


KEYS = "a key bias adds the same to all scores of a query"
SILENT = {f"model.vision_tower.encoder.layers.{i}.self_attn.k_proj.bias": KEYS for i in range(3)}
SHARED = {
    "sizes": {"image": [(90, 130), (60, 60), (28, 20), (40, 100)]},
    "grid": {"image": IMAGE_SIZES},
    "tensors": patches_in_squares(2, 7),
    "fullest": {"image": [(56, 56)]},
    "load": load,
}
FAMILIES = [
    Family(
        "aya_vision",
        partial(build, "aya_vision"),
        placeholders={"image": "<image>"},
        call=call_aya,
        silent=SILENT | {"model.vision_tower.post_layernorm": "the projector reads the state before this norm"},
        variants={
            "token": {"image_token": "<image>"},
            "earlier layer": {"vision_feature_layer": -2},
            "llama": {"text": "llama", "tiles": 12},
        },
        **SHARED,
    ),
    Family(
        "cohere2_vision",
        partial(build, "cohere2_vision"),
        placeholders={"image": PATCH},
        call=call_cohere,
        silent=SILENT,
        variants={"llama": {"text": "llama", "tiles": 12}},
        **SHARED,
    ),
]
