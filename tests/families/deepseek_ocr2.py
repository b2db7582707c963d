"""DeepSeek-OCR 2 in the parity suite. A patch is one pixel: the model has queries for 64 x 64 and 48 x 48 patches only."""

import json

import torch
from family import IMAGE_SIZES, Family
from oracle import fast_tokenizer, randomise, text_config

TOP = {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5}


def build(seed, tie=False, text=(), **sam):
    import transformers as tf

    words = fast_tokenizer(["<|im_end|>", "<image>"], eos_token="<|im_end|>", pad_token="<|im_end|>")
    tower = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "mlp_dim": 48, "global_attn_indexes": [1]}
    shape = {"image_size": 64, "patch_size": 1, "output_channels": 16, "downsample_channels": [24, 48], "window_size": 14}
    encoder = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    mixture = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2}
    mixture |= {"mlp_layer_types": ["dense", "sparse", "sparse"], **dict(text)}
    config = tf.DeepseekOcr2Config(
        vision_config={
            "sam_config": {**tower, **shape, **sam},
            "encoder_config": {**encoder, "num_key_value_heads": 2, "vocab_size": len(words)},
        },
        text_config=text_config(words, tie, **mixture),
        image_token_id=words.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=tie,
    )
    model = tf.DeepseekOcr2ForConditionalGeneration(config).eval()
    randomise(model, seed)
    for name, p in model.model.vision_tower.named_parameters():
        if "qkv" in name or "rel_pos" in name or "q_proj" in name or "k_proj" in name:
            p.data.mul_(1.5)  # without large scores, attention over thousands of rows is a plain mean
    images = tf.DeepseekOcr2ImageProcessor(size={"height": 64, "width": 64}, tile_size=48)
    return model, tf.DeepseekOcr2Processor(images, words, patch_size=1)


def tensors(inputs, features):
    """Compare our patches, row by row, with the oracle's whole planes."""
    ordered = sorted(features, key=lambda feature: feature.range.offset)
    for name in ("pixel_values", "pixel_values_local"):
        patches = torch.cat([feature.kwargs[name].data for feature in ordered])
        theirs = inputs.get(name, patches.new_empty(0, 3, 48, 48))
        side = theirs.shape[-1]
        yield name, patches.view(-1, side, side, 3).permute(0, 3, 1, 2), theirs


def refuses(modality, size):
    return round(min(size) * 64 / max(size)) == 0


def write_long(placeholders, seed):
    """Write so much text that four prompts without an image need more memory than the longest with one."""
    return f"def f{seed}(x):" + " and ".join(placeholders) + " return it" + " + x" * (40 + seed % 5)


def finish(folder):
    """Write the numbers from which the processor counts tokens."""
    said = {"patch_size": 1, "downsample_ratio": 4, "processor_class": "DeepseekOcr2Processor"}
    (folder / "processor_config.json").write_text(json.dumps(said))


FAMILY = Family(
    "deepseek_ocr2",
    build,
    placeholders={"image": "<image>"},
    sizes={"image": [(47, 47), (40, 30), (30, 47), (44, 44), (20, 48), (90, 50)]},
    grid={"image": IMAGE_SIZES},
    refuses=refuses,
    cases=["", "ii", "", "", "", "i"],
    prompt=write_long,
    tensors=tensors,
    finish=finish,
    variants={
        "tied": {"tie": True},
        "groups": {"text": tuple(TOP.items())},
        "plain scores": {"use_rel_pos": False, "qkv_bias": False},
    },
    fullest={"image": [(40, 30), (30, 47)]},
    options={"max_model_len": 2304},
)
