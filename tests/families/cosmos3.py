"""The reasoner of Cosmos 3 in the parity suite, stored beside tensors of a generator."""

import torch
from family import IMAGE_SIZES, VIDEO_SIZES, Family, as_sampled, call_sampled
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config
from safetensors.torch import load_file, save_file

SPECIALS = ("<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
AREAS = {"image": (64 * 64, 160 * 160), "video": (64 * 64 * 4, 96 * 96 * 8)}
VISION = {
    "depth": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "out_hidden_size": 64, "patch_size": 16,
    "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2],
}  # fmt: skip
GENERATOR = (
    "layers.0.self_attn.add_q_proj.weight", "layers.0.self_attn.to_add_out.weight", "layers.0.self_attn.norm_added_q.weight",
    "layers.0.mlp_moe_gen.up_proj.weight", "norm_moe_gen.weight", "proj_in.weight", "time_embedder.linear_1.weight",
    "audio_modality_embed", "action_proj_out.weight",
)  # fmt: skip


def build(seed, tie=False):
    ensure_torchvision()
    import transformers as tf

    words = fast_tokenizer(SPECIALS, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    ids = dict(zip(SPECIALS, words.convert_tokens_to_ids(SPECIALS), strict=True))
    text = text_config(words, tie, head_dim=16, num_hidden_layers=4)
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0}
    config = tf.Cosmos3OmniConfig(
        text_config=text,
        vision_config=VISION,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tie,
    )
    model = tf.Cosmos3OmniForConditionalGeneration(config).eval()
    randomise(model, seed)
    image, video = ({"shortest_edge": least, "longest_edge": most} for least, most in AREAS.values())
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16}
    return model, tf.Qwen3VLProcessor(
        image_processor=tf.Qwen2VLImageProcessor(size=image, **half),
        tokenizer=words,
        video_processor=tf.Qwen3VLVideoProcessor(size=video, cap_pixels_per_frame=False, **half),
    )


def add_generator(folder):
    """Store tensors of a generator, too, and check that the reasoner's have the flat names."""
    file = folder / "model.safetensors"
    stored = load_file(file)
    assert "layers.0.self_attn.to_q.weight" in stored
    save_file(stored | {name: torch.ones(3, 3) for name in GENERATOR}, file, {"format": "pt"})


FAMILY = Family(
    "cosmos3",
    build,
    placeholders={m: f"<|vision_start|><|{m}_pad|><|vision_end|>" for m in ("image", "video")},
    sizes={"image": [(90, 130), (60, 60), (140, 70)], "video": [(6, 80, 100), (4, 56, 90), (3, 60, 60)]},
    grid={"image": [*IMAGE_SIZES, (2, 500)], "video": [size for size in VIDEO_SIZES if size[0] > 1]},
    refuses=lambda modality, size: modality == "image" and max(size) > 200 * min(size),
    ours=as_sampled,
    call=call_sampled,
    finish=add_generator,
    variants={"tied": {"tie": True}},
)
