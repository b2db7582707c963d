"""The reasoner of Cosmos 3 Edge in the parity suite, stored beside tensors of a generator."""

from functools import partial

import torch
from family import IMAGE_SIZES, VIDEO_SIZES, Family, as_sampled, call_sampled
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config
from safetensors.torch import load_file, save_file

SPECIALS = ("<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
AREAS = {"image": (64 * 64, 160 * 160), "video": (64 * 64 * 4, 96 * 96 * 8)}
VISION = {
    "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 3, "patch_size": 16,
    "num_patches": 36,
}  # fmt: skip
GENERATOR = (
    "layers.0.self_attn.add_q_proj.weight", "layers.0.self_attn.to_add_out.weight",
    "layers.0.self_attn.k_norm_und_for_gen.weight", "layers.0.mlp_moe_gen.up_proj.weight", "norm_moe_gen.weight",
    "proj_in.weight", "time_embedder.linear_1.weight", "action_modality_embed", "action_proj_out.fc.weight",
)  # fmt: skip
KEYS = "adds the same to the scores of all keys of a query"


def build(seed, tie=False, patch=16, bias=False):
    ensure_torchvision()
    import transformers as tf

    words = fast_tokenizer(SPECIALS, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    ids = dict(zip(SPECIALS, words.convert_tokens_to_ids(SPECIALS), strict=True))
    text = text_config(words, tie, head_dim=16, attention_bias=bias, mlp_bias=bias)
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0}
    config = tf.Cosmos3EdgeConfig(
        text_config=text,
        vision_config={**VISION, "patch_size": patch},
        projector_hidden_size=80,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tie,
    )
    model = tf.Cosmos3EdgeForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.visual)
    image, video = ({"shortest_edge": least, "longest_edge": most} for least, most in AREAS.values())
    return model, tf.Cosmos3EdgeProcessor(
        image_processor=tf.Cosmos3EdgeImageProcessor(size=image, patch_size=patch),
        tokenizer=words,
        video_processor=tf.Cosmos3EdgeVideoProcessor(size=video, patch_size=patch),
    )


def add_generator(folder):
    """Store tensors of a generator, too, and check that the reasoner's have the flat names."""
    file = folder / "model.safetensors"
    stored = load_file(file)
    assert "layers.0.self_attn.to_q.weight" in stored
    save_file(stored | {name: torch.ones(3, 3) for name in GENERATOR}, file, {"format": "pt"})


def call(processor, text, data):
    return call_sampled(partial(processor, return_metadata=True, return_mm_token_type_ids=True), text, data)


def tensors(inputs, features):
    """Compare patches; the oracle's hold their numbers pixel by pixel, ours channel by channel."""
    for name in ("pixel_values", "pixel_values_videos"):
        ours = [feature.kwargs[name].data for feature in features if name in feature.kwargs]
        if ours:
            theirs = inputs[name]
            side = round((theirs.shape[1] / 3) ** 0.5)
            yield name, torch.cat(ours), theirs.view(-1, side, side, 3).permute(0, 3, 1, 2).flatten(1)


def refuses(modality, size):
    """Return True for sides that differ by more than 200:1 after both are scaled up."""
    height, width = size[-2:]
    scale = max(1, 32 / min(height, width))
    return max(int(height * scale), int(width * scale)) > 200 * min(int(height * scale), int(width * scale))


FAMILY = Family(
    "cosmos3_edge",
    build,
    placeholders={m: f"<|vision_start|><|{m}_pad|><|vision_end|>" for m in ("image", "video")},
    sizes={"image": [(90, 130), (60, 60), (140, 70)], "video": [(6, 80, 100), (4, 56, 90), (3, 60, 60)]},
    grid={"image": [*IMAGE_SIZES, (2, 500), (7, 31), (31, 33)], "video": [*VIDEO_SIZES, (2, 9, 30)]},
    refuses=refuses,
    ours=as_sampled,
    call=call,
    tensors=tensors,
    finish=add_generator,
    silent={f"model.visual.encoder.layers.{i}.self_attn.k_proj.bias": KEYS for i in range(3)},
    variants={"small patches": {"patch": 8}, "biases": {"bias": True}},
)
