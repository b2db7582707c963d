"""HunYuan-VL in the parity suite. transformers saves the publisher's names."""

import json

import torch
from family import Family, is_sliver, rows_in_squares
from oracle import fast_tokenizer, load_oracle, randomise, sharpen, text_config

SPECIALS = ("<eos>", "<start>", "<image>", "<end>")
NAMED = {"image_token": "<image>", "image_start_token": "<start>", "image_end_token": "<end>"}
ROPE = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0, "mrope_section": [2, 2, 2, 2]}


def one_axis_per_pair(rotary):
    """Select the axes of both halves of a head alike, as the publisher's code does; transformers 5.23 pairs two axes."""

    def select(angles):
        chunks = angles.split(rotary.mrope_section, -1)
        half = torch.cat([chunk[axis] for axis, chunk in enumerate(chunks)], -1)
        return torch.cat([half, half], -1)

    rotary.recomposition_frequencies = select


def build(seed, tie=True, **vision):
    import transformers as tf

    words = fast_tokenizer(SPECIALS, eos_token="<eos>", pad_token="<eos>", model_specific_special_tokens=NAMED)
    ids = dict(zip(SPECIALS, words.convert_tokens_to_ids(SPECIALS), strict=True))
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = tf.HunYuanVLConfig(
        text_config={**text_config(words, tie), "head_dim": 16, "rope_parameters": dict(ROPE)},
        vision_config={**shape, "patch_size": 14, "max_image_size": 140, "text_hidden_size": 64, **vision},
        image_token_id=ids["<image>"],
        im_start_id=ids["<start>"],
        im_end_id=ids["<end>"],
        tie_word_embeddings=tie,
    )
    model = tf.HunYuanVLForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.vision_tower)
    one_axis_per_pair(model.model.language_model.rotary_emb)
    size = {"shortest_edge": 56 * 56, "longest_edge": 196 * 196}
    images = tf.HunYuanVLImageProcessor(size=size, patch_size=14)
    return model, tf.HunYuanVLProcessor(image_processor=images, tokenizer=words)


def load(folder):
    model, processor = load_oracle(folder)
    one_axis_per_pair(model.model.language_model.rotary_emb)
    return model, processor


def flatten(folder):
    """Write the publisher's config: the text config at the top level, with its own names."""
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    rope = {**rope, "type": "xdrope", "xdrope_section": rope.pop("mrope_section")}
    text |= {"rope_scaling": rope, "rope_theta": rope.pop("rope_theta"), "attention_head_dim": text["head_dim"]}
    text |= {"num_experts": 1, "routed_scaling_factor": False, "use_cla": False}
    rope.pop("rope_type")
    (folder / "config.json").write_text(json.dumps({**text, **config, "model_type": "hunyuan_vl"}))


KEYS = "a key bias adds the same to all scores of a query"
SILENT = {f"model.vision_tower.layers.{i}.self_attn.k_proj.bias": KEYS for i in range(3)}
SILENT["model.vision_tower.patch_merger.image_sep"] = "no published code uses it"


def row(name, **more):
    return Family(
        name,
        build,
        placeholders={"image": "<start><image><end>"},
        sizes={"image": [(90, 130), (60, 60), (140, 70)]},
        refuses=is_sliver,
        tensors=rows_in_squares,
        load=load,
        silent=SILENT,
        fullest={"image": [(28, 1372), (29, 1370)]},
        **more,
    )


FAMILIES = [
    row("hunyuan_vl", variants={"own head": {"tie": False}}),
    row("hunyuan_vl_flat", finish=flatten),
]
