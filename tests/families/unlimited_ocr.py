"""Unlimited-OCR in the parity suite. A patch is one pixel; an answer reads its last 20 tokens."""

import json

import torch
from family import IMAGE_SIZES, Family
from oracle import fast_tokenizer, randomise, text_config

WHOLE, TILE, WINDOW = 64, 40, 20


def build(seed, tie=False, **text):
    import transformers as tf

    words = fast_tokenizer(["<|im_end|>", "<image>"], eos_token="<|im_end|>", pad_token="<|im_end|>")
    mixture = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2}
    config = tf.UnlimitedOcrConfig(
        vision_config={
            "sam_config": {
                "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "mlp_dim": 48, "global_attn_indexes": [1],
                "image_size": WHOLE, "patch_size": 1, "output_channels": 16, "downsample_channels": [24, 48], "window_size": 14,
            },
            "encoder_config": {
                "hidden_size": 48, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 48,
                "patch_size": 4,
            },
        },
        text_config=text_config(words, tie, sliding_window=WINDOW, num_key_value_heads=4, **mixture, **text),
        image_token_id=words.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=tie,
    )  # fmt: skip
    model = tf.UnlimitedOcrForConditionalGeneration(config).eval()
    randomise(model, seed)
    for name, p in model.model.vision_tower.named_parameters():
        if "qkv" in name or "rel_pos" in name or "q_proj" in name or "k_proj" in name:
            p.data.mul_(1.5)  # without large scores, attention over thousands of rows is a plain mean
    images = tf.UnlimitedOcrImageProcessor(size={"height": WHOLE, "width": WHOLE}, tile_size=TILE, max_patches=6)
    return model, tf.UnlimitedOcrProcessor(images, words, patch_size=1)


def tensors(inputs, features):
    """Compare our patches, row by row, with the oracle's whole planes."""
    ordered = sorted(features, key=lambda feature: feature.range.offset)
    for name, side in (("pixel_values", WHOLE), ("pixel_values_local", TILE)):
        patches = torch.cat([feature.kwargs[name].data for feature in ordered])
        theirs = inputs.get(name, patches.new_empty(0, 3, side, side))
        theirs = torch.stack(list(theirs)) if isinstance(theirs, list) else theirs
        yield name, patches.view(-1, side, side, 3).permute(0, 3, 1, 2), theirs


def refuses(modality, size):
    return round(min(size) * WHOLE / max(size)) == 0


def write_long(placeholders, seed):
    """Write so much text that four prompts without an image need more memory than the longest with one."""
    return f"def f{seed}(x):" + " and ".join(placeholders) + " return it" + " + x" * (40 + seed % 5)


def finish(folder):
    """Write the numbers from which the processor counts tokens."""
    said = {"patch_size": 1, "downsample_ratio": 4, "processor_class": "UnlimitedOcrProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(said))


FAMILY = Family(
    "unlimited_ocr",
    build,
    placeholders={"image": "<image>"},
    sizes={"image": [(40, 40), (40, 30), (30, 40), (38, 38), (20, 40), (90, 50)]},
    grid={"image": IMAGE_SIZES},
    refuses=refuses,
    cases=["", "ii", "", "", "", "i"],
    prompt=write_long,
    tensors=tensors,
    finish=finish,
    variants={"tied": {"tie": True}, "full attention": {"layer_types": ["full_attention"] * 3}},
    silent={
        f"model.vision_tower.vision_encoder.encoder.layers.{i}.self_attn.k_proj.bias": "moves all scores of a row alike"
        for i in range(2)
    },
    fullest={"image": [(40, 30), (30, 40)]},
    options={"max_model_len": 2560},
)
