"""Mllama in the parity suite: an image has one token in the prompt."""

import torch
from family import Family
from oracle import fast_tokenizer, randomise, sharpen, text_config

VISION = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_global_layers": 2, "attention_heads": 4,
    "image_size": 56, "patch_size": 14, "intermediate_layers_indices": [0, 2], "vision_output_dim": 192, "max_num_tiles": 4,
}  # fmt: skip


def build(seed, cross=(1, 3), **vision):
    import transformers as tf

    specials = ["<bos>", "<eot>", "<|python_tag|>", "<|image|>"]
    words = fast_tokenizer(specials, eos_token="<eot>", pad_token="<eot>", bos_token="<bos>")
    image = words.convert_tokens_to_ids("<|image|>")
    config = tf.MllamaConfig(
        vision_config=VISION | vision,
        text_config=text_config(words, num_hidden_layers=4, cross_attention_layers=list(cross)) | {"vocab_size": image},
        image_token_index=image,
    )
    model = tf.MllamaForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.vision_model)
    for name, parameter in model.named_parameters():
        if name.endswith((".gate", "_gate", "gate_attn", "gate_ffn")):
            parameter.data.add_(0.7)
        if "tile" in name and parameter.ndim == 2:  # a row of it is a table
            parameter.data.mul_(0.5 * parameter.shape[1] ** 0.5)
    size = {"height": 56, "width": 56}
    return model, tf.MllamaProcessor(tf.MllamaImageProcessor(size=size, max_image_tiles=4), words)


def prompt(placeholders, seed):
    """Return a prompt whose images are adjacent or apart, in turns; some begin with one."""
    first, *rest = ["<|image|>"] * len(placeholders) or [""]
    between = ["" if (seed + place) % 3 else f" y{place} = " for place in range(len(rest))]
    images = first + "".join(text + image for text, image in zip(between, rest, strict=True))
    start = "" if seed % 4 == 3 else f"<bos>def f{seed}(x):"
    return start + images + ("<bos>" if images and not start else "") + " return it" + " + x" * (8 + seed % 5)


def tensors(inputs, features):
    """Compare the patches of tiles that are not padding."""
    for i, feature in enumerate(features):
        rows, columns = feature.kwargs["tiles"].data.tolist()
        tiles = feature.kwargs["pixel_values"].data.view(-1, 4, 4, 3, 14, 14).permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, 56, 56)
        assert len(tiles) == rows * columns == inputs["aspect_ratio_mask"][0, i].sum()
        yield "pixel_values", tiles, inputs["pixel_values"][0, i, : rows * columns]
        assert feature.range.length == 4 * 17


def run(model, inputs, answer, positions):
    """Run prompt and answer at once. The mask of the last prompt token is that of the answer."""
    ids = torch.cat([inputs["input_ids"], torch.tensor([answer[:-1]], dtype=torch.long)], 1)
    more = {name: inputs[name] for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask") if name in inputs}
    if "cross_attention_mask" in inputs:
        mask = inputs["cross_attention_mask"]
        more["cross_attention_mask"] = torch.cat([mask, mask[:, -1:].expand(-1, len(answer) - 1, -1, -1)], 1)
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False, **more).logits[0].float()


FAMILY = Family(
    "mllama",
    build,
    placeholders={"image": ""},
    sizes={"image": [(90, 130), (60, 50), (140, 40)]},
    cases=["", "i", "ii", "iii", "i", "ii"],
    prompt=prompt,
    tensors=tensors,
    run=run,
    variants={"first layer": {"cross": (0, 3)}},
    fullest={"image": [(90, 130)]},
    fullest_items=1,  # a prompt may have as many rows of images as tokens, or one image
)
