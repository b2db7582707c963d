"""GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR in the parity suite."""

from functools import partial

import torch
from family import IMAGE_SIZES, VIDEO_SIZES, Family, as_sampled, call_sampled, run_oracle
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config

SPECIALS = ("<|endoftext|>", *(f"<|{part}|>" for part in (
    "begin_of_image", "end_of_image", "begin_of_video", "end_of_video", "image", "video",
)))  # fmt: skip
IDS = ("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id", "image_token_id")
AREAS = {"image": (2 * 56 * 56, 2 * 140 * 140), "video": (4 * 56 * 56, 8 * 84 * 84)}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
MIXTURE = {"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3, "routed_scaling_factor": 1.5}


def build(kind, seed, tie=False, head_dim=16, **more):
    ensure_torchvision()
    import transformers as tf

    words = fast_tokenizer(SPECIALS, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    ids = dict(zip((*IDS, "video_token_id"), words.convert_tokens_to_ids(SPECIALS[1:]), strict=True))
    rope = {**ROPE, "mrope_section": [head_dim // 8, head_dim // 16, head_dim // 16]}
    text = text_config(words, tie, head_dim=head_dim) | {"rope_parameters": rope}
    if kind in ("Glm4v", "Glm46V"):
        del text["head_dim"]
    text |= MIXTURE | more if kind == "Glm4vMoe" else {}
    called = {"GlmOcr": "glm_ocr", "Glm4vMoe": "glm4v_moe"}.get(kind, "glm4v")
    vision = {"depth": 3, "hidden_size": 48, "num_heads": 4, "intermediate_size": 96, "out_hidden_size": 64}
    config = getattr(tf, f"{kind}Config")(
        text_config={"model_type": f"{called}_text", **text},
        vision_config={"model_type": f"{called}_vision", "image_size": 70, **vision},
        tie_word_embeddings=tie,
        **ids,
    )
    model = getattr(tf, f"{kind}ForConditionalGeneration")(config).eval()
    randomise(model, seed)
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.copy_(torch.rand(buffer.shape, generator=torch.Generator().manual_seed(seed)) * 0.4)
    stem = "Glm4v" if kind in ("Glm4v", "Glm4vMoe") else "Glm46V"
    image, video = ({"shortest_edge": least, "longest_edge": most} for least, most in AREAS.values())
    return model, getattr(tf, f"{stem}Processor")(
        image_processor=getattr(tf, f"{stem}ImageProcessor")(size=image),
        tokenizer=words,
        video_processor=getattr(tf, f"{stem}VideoProcessor")(size=video),
    )


def run(model, inputs, answer, positions):
    """Tell the oracle which placeholders are images and which videos; it confuses them in a prompt with both."""
    kinds = inputs["mm_token_type_ids"]
    model.model.get_placeholder_mask = lambda *_, **__: ((kinds == 1)[..., None], (kinds == 2)[..., None])
    try:
        return run_oracle(model, inputs, answer, positions)
    finally:
        del model.model.get_placeholder_mask


def refuses(modality, size):
    """Return whether the ratio is refused; sides below one square of patches are enlarged first."""
    *_, height, width = size
    grown = max(28 / height, 28 / width, 1.0)
    height, width = int(height * grown), int(width * grown)
    return max(height, width) > 200 * min(height, width)


def row(name, kind, **more):
    return Family(
        name,
        partial(build, kind),
        placeholders={m: f"<|begin_of_{m}|><|{m}|><|end_of_{m}|>" for m in ("image", "video")},
        sizes={"image": [(90, 130), (60, 60), (140, 70)], "video": [(6, 80, 100), (4, 56, 90), (3, 60, 60)]},
        grid={"image": [*IMAGE_SIZES, (2, 500)], "video": [size for size in VIDEO_SIZES if size[0] > 1]},
        refuses=refuses,
        ours=as_sampled,
        call=call_sampled,
        run=run,
        **more,
    )


FAMILIES = [
    row("glm4v", "Glm4v", variants={"tied": {"tie": True}}),
    row("glm46v", "Glm46V"),
    row("glm4v_moe", "Glm4vMoe", variants={"wide heads": {"head_dim": 32}, "groups": {"n_group": 4, "topk_group": 2}}),
    row("glm_ocr", "GlmOcr", variants={"wide heads": {"head_dim": 32}}),
]
