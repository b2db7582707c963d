"""PaliGemma and PaliGemma 2 in the parity suite."""

from functools import partial

import torch
from family import IMAGE_SIZES, LAYOUTS, Family, patches_in_squares
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config

SIDE, PATCH = 56, 14
TOKENS = (SIDE // PATCH) ** 2
CAPS = {"attn_logit_softcapping": 10.0, "final_logit_softcapping": 8.0, "query_pre_attn_scalar": 24, "sliding_window": 20}


def build(kind, seed, tie=False):
    ensure_torchvision()
    import transformers as tf

    words = fast_tokenizer(["<bos>", "<eos>", "<image>"], eos_token="<eos>", pad_token="<eos>", bos_token="<bos>")
    words.add_tokens(
        [tf.AddedToken("\n" * count, normalized=False) for count in range(2, 7)]
    )  # a run of line breaks is one token, as published
    images = tf.SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    images.image_seq_length = TOKENS
    processor = tf.PaliGemmaProcessor(images, words)
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    vision = {"model_type": "siglip_vision_model", "image_size": SIDE, "patch_size": PATCH, "vision_use_head": False, **shape}
    caps = CAPS if kind == "gemma2" else {}
    config = tf.PaliGemmaConfig(
        vision_config={**vision, "projection_dim": 64},
        text_config={"model_type": kind, **text_config(words, tie, head_dim=16), **caps},
        image_token_index=words.convert_tokens_to_ids("<image>"),
        projection_dim=64,
        hidden_size=64,
        tie_word_embeddings=tie,
    )
    model = tf.PaliGemmaForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.vision_tower)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name and "vision_tower" not in name:
            parameter.data.sub_(1)  # the weight is stored minus 1
    return model, processor


def prompt(placeholders, seed):
    """Write no placeholders, or all of them first."""
    text = f"def f{seed}(x): return it" + " + x" * (seed % 5) + "\n" * (seed % 3)
    return "".join(placeholders) + text if seed % 2 else text


def call(processor, text, data):
    """Add BOS and a line break to a text alone, as beside an image; the published processor refuses it."""
    if not data.get("image"):
        words = processor.tokenizer
        ids = torch.tensor([[words.bos_token_id, *words(text + "\n")["input_ids"]]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    inputs = dict(processor(text=[text], images=[data["image"]], return_tensors="pt"))
    return {name: value for name, value in inputs.items() if name != "labels"}


KEYS = "a bias of the keys moves all scores of a row alike"


def row(name, kind, **more):
    return Family(
        name,
        partial(build, kind),
        placeholders={"image": "<image>"},
        sizes={"image": [(90, 130), (60, 60), (150, 40)]},
        grid={"image": IMAGE_SIZES},
        cases=("", "i", "i", "ii", "iii"),
        prompt=prompt,
        call=call,
        tensors=patches_in_squares(1, PATCH),
        prompt_attention="bidirectional_prompt",
        silent={f"model.vision_tower.encoder.layers.{i}.self_attn.k_proj.bias": KEYS for i in range(3)},
        layouts=LAYOUTS,
        **more,
    )


FAMILIES = [row("paligemma", "gemma", variants={"tied": {"tie": True}}), row("paligemma2", "gemma2")]
