"""BLIP-2 in the parity suite: with OPT, and with another decoder."""

import json

import torch
from family import Family, patches_in_squares
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config

SIDE, PATCH, QUERIES = 56, 14, 6
KEYS = "a bias of the keys moves all scores of a row alike"
FIRST, LAST = (f"qformer.encoder.layer.{i}.attention." for i in range(2))
FAINT = (
    *(f"vision_model.encoder.layers.{i}.layer_norm2.bias" for i in (1, 2)), "qformer.layernorm.bias",
    *(f"{FIRST}{part}.bias" for part in ("attention.query", "attention.value", "output.dense")),
    f"{LAST}attention.query", f"{LAST}attention.key.weight",
)  # fmt: skip


def build(seed, kind="opt", tie=False):
    ensure_torchvision()
    import transformers as tf

    words = fast_tokenizer(["<bos>", "<eos>", "<image>"], eos_token="<eos>", pad_token="<eos>", bos_token="<bos>")
    images = tf.BlipImageProcessor(size={"height": SIDE, "width": SIDE})
    processor = tf.Blip2Processor(images, words, num_query_tokens=QUERIES)
    keys = {"ffn_dim": 128, "num_key_value_heads": 4} if kind == "opt" else {}
    text = text_config(words, tie, **keys)
    config = tf.Blip2Config(
        vision_config={
            "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": SIDE,
            "patch_size": PATCH,
        },
        qformer_config={
            "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32,
        },
        text_config={"model_type": kind, **text},
        num_query_tokens=QUERIES,
        image_token_index=words.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=tie,
    )  # fmt: skip
    model = tf.Blip2ForConditionalGeneration(config).eval()
    randomise(model, seed)
    for name, parameter in model.named_parameters():
        if "vision_model" in name and name.endswith("qkv.weight"):
            parameter.data[: 2 * parameter.shape[1]].mul_(3)
        elif "qformer" in name and name.endswith(("query.weight", "key.weight")):
            parameter.data.mul_(2 if "cross" in name else 4)
        elif "qformer" in name and "value" in name:
            parameter.data.mul_(2)
    return model, processor


def finish(folder):
    (folder / "processor_config.json").write_text(json.dumps({"num_query_tokens": QUERIES}))


def prompt(placeholders, seed):
    """Write no placeholders: the published processor puts them before the prompt."""
    return f"def f{seed}(x): return it" + " + x" * (seed % 5)


def call(processor, text, data):
    """Put as many placeholders before the prompt as its images have queries; the published processor writes those of one."""
    if not data.get("image"):
        return dict(processor(text=[text], return_tensors="pt"))
    inputs = dict(processor(text=[text], images=data["image"], return_tensors="pt"))
    first = inputs["input_ids"][:, :QUERIES].repeat(1, len(data["image"]))
    ids = torch.cat([first, inputs["input_ids"][:, QUERIES:]], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": inputs["pixel_values"]}


def run(model, inputs, answer, positions):
    """Run the decoder alone where there is no image: the published class needs one in every call."""
    ids, tail = inputs["input_ids"], torch.tensor([answer[:-1]], dtype=torch.long)
    with torch.inference_mode():
        if "pixel_values" in inputs:
            first = model(**inputs, use_cache=True).language_model_outputs
        else:
            first = model.language_model(input_ids=ids, use_cache=True)
        if not tail.numel():
            return first.logits[0].float()
        mask = torch.ones(1, ids.shape[1] + tail.shape[1], dtype=torch.long)
        rest = model.language_model(input_ids=tail, past_key_values=first.past_key_values, attention_mask=mask)
    return torch.cat([first.logits[0], rest.logits[0]]).float()


FAMILY = Family(
    "blip2",
    build,
    placeholders={"image": "<image>"},
    sizes={"image": [(90, 130), (60, 60), (150, 40)]},
    prompt=prompt,
    call=call,
    finish=finish,
    run=run,
    tensors=patches_in_squares(1, PATCH),
    variants={"tied": {"tie": True}, "llama": {"kind": "llama"}},
    silent={
        **{f"language_model.model.decoder.layers.{i}.self_attn.k_proj.bias": KEYS for i in range(3)},
        **dict.fromkeys(FAINT, "each query transformer layer norms its sums, which leaves little of what was added before"),
        **{f"{layer}attention.key.bias": KEYS for layer in (FIRST, LAST, FIRST.replace(".attention", ".crossattention"))},
    },
)
