"""Kimi-K2.5 in the parity suite."""

from types import SimpleNamespace

import torch
from family import IMAGE_SIZES, VIDEO_SIZES, Family, run_oracle
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config

FPS = 2.0
SPECIALS = (
    "<|im_end|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<|kimi_k25_video_placeholder|>",
)
BEGIN, CONTENT, END, IMAGE, VIDEO = SPECIALS[1:]
PLACEHOLDER = "<media>"
LIMITS = {"size": {"max_height": 12, "max_width": 12}, "max_patches": 100}


def build(seed, tie=False):
    ensure_torchvision()
    import transformers as tf
    from transformers.models.kimi_k25 import Kimi_K25ImageProcessor, Kimi_K25Processor, Kimi_K25VideoProcessor

    words = fast_tokenizer(SPECIALS, eos_token="<|im_end|>", pad_token="<|im_end|>")
    begin, _, end, image, video = words.convert_tokens_to_ids(SPECIALS[1:])
    text = text_config(words, tie, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16)
    text |= {"qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4}
    text |= {"topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 48}
    vision = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 96}
    config = tf.Kimi_K25Config(
        text_config={"model_type": "deepseek_v3", **text},
        vision_config={"model_type": "kimi_k25_vision", "pos_emb_height": 5, "pos_emb_width": 5, **vision},
        projection_hidden_size=48,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=begin,
        vision_end_token_id=end,
        tie_word_embeddings=tie,
    )
    model = tf.Kimi_K25ForConditionalGeneration(config).eval()
    randomise(model, seed)
    return model, Kimi_K25Processor(
        image_processor=Kimi_K25ImageProcessor(**LIMITS),
        tokenizer=words,
        video_processor=Kimi_K25VideoProcessor(**LIMITS),
    )


def written(text, media):
    """Write the placeholders: an image's stands between tags, a video's is expanded with its own."""
    for one in media:
        own = VIDEO if isinstance(one, tuple) or getattr(one, "ndim", 0) == 4 else f"{BEGIN}image{CONTENT}{IMAGE}{END}"
        text = text.replace(PLACEHOLDER, own, 1)
    return text


def call(processor, text, data):
    """Pass videos as already sampled: every frame is used, at FPS."""
    media = data.get("vision_chunk", [])
    images, videos = ([one for one in media if (getattr(one, "ndim", 0) == 4) == moving] for moving in (False, True))
    metadata = [{"fps": FPS, "total_num_frames": len(c), "frames_indices": list(range(len(c)))} for c in videos]
    timed = {"videos": videos, "video_metadata": metadata, "do_sample_frames": False} if videos else {}
    still = {"images": images} if images else {}
    return dict(processor(text=[written(text, media)], **still, **timed, return_tensors="pt"))


def ours(modality, media):
    moving = getattr(media, "ndim", 0) == 4
    return {"type": "video", "video": (media, {"fps": FPS, "do_sample_frames": False})} if moving else media


def request(text, data):
    media = data.get("vision_chunk", [])
    shown = [entry["video"] if isinstance(entry, dict) else entry for entry in media]
    return {"prompt": written(text, shown), "multi_modal_data": data}


def tensors(inputs, features):
    """Compare images and chunks of videos separately, as the oracle has them; ours are in the order of the prompt."""
    for kind, suffix in (("image", ""), ("video", "_videos")):
        found = [f.kwargs for f in features if (f.kwargs["grid_thw"].data[0] > 1) == (kind == "video")]
        if found:
            yield kind, torch.cat([one["pixel_values"].data for one in found]), inputs[f"pixel_values{suffix}"]
            yield f"{kind} grid", torch.stack([one["grid_thw"].data for one in found]), inputs[f"{kind}_grid_thw"]


def run(model, inputs, answer, positions):
    """Run the oracle's tower chunk by chunk: it cannot take chunks of several frames or of different lengths together.

    A step without pixels gets embeddings, because the oracle replaces placeholder tokens in an answer by token 0.
    """
    inner = model.model

    def one_by_one(pixels, grids, **options):
        parts = zip(pixels.split(grids.prod(-1).tolist()), grids, strict=True)
        pooled = [inner.vision_tower(part, grid_thw=grid[None]).pooler_output for part, grid in parts]
        return SimpleNamespace(pooler_output=[inner.mm_projector(rows).squeeze(1) for rows in pooled])

    def embedded(_, args, given):
        if given.get("pixel_values") is None and given.get("pixel_values_videos") is None:
            given["inputs_embeds"] = inner.get_input_embeddings()(given.pop("input_ids"))
        return args, given

    inner.get_image_features = one_by_one
    hook = inner.register_forward_pre_hook(embedded, with_kwargs=True)
    try:
        return run_oracle(model, inputs, answer, positions)
    finally:
        hook.remove()
        del inner.get_image_features


PUBLISHED = [  # transformers writes other names and reads both
    ("language_model.model.blocks.", "language_model.model.layers."),
    ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
    ("model.mm_projector.", "mm_projector."),
]
FAMILY = Family(
    "kimi_k25",
    build,
    placeholders={"vision_chunk": PLACEHOLDER},
    sizes={"vision_chunk": [(90, 130), (6, 80, 100), (60, 60), (8, 60, 60)]},
    grid={"vision_chunk": [*IMAGE_SIZES, *VIDEO_SIZES]},
    cases=["", "c", "c", "", "", "", "cc", "cccc"],  # prompts without items grow beside the longest one
    ours=ours,
    request=request,
    call=call,
    tensors=tensors,
    run=run,
    half=(0.1, 0.04),  # in float16 one row of 179 takes another expert; the others are off by 0.002
    variants={"tied": {"tie": True}},
    layouts={"as published": PUBLISHED},
    fullest={"vision_chunk": [(4, 90, 120), (8, 112, 84), (4, 56, 112)]},
)
