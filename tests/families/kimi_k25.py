"""Kimi-K2.5 in the parity suite."""

import json
import math
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
from family import IMAGE_SIZES, VIDEO_SIZES, Family, run_oracle
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config
from PIL import Image
from safetensors.torch import load_file, save_file

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


def saved_as_kimi_vl(folder):
    """Rewrite the checkpoint as Kimi-VL's, which has no class in transformers: the published keys and names of tensors."""
    file, weights = folder / "config.json", folder / "model.safetensors"
    config = json.loads(file.read_text())
    vision = {VL_KEYS.get(key, key): value for key, value in config["vision_config"].items() if key in VL_VISION}
    made = {"architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl", "vision_config": vision}
    text = {key: value for key, value in config["text_config"].items() if value is not None}
    file.write_text(json.dumps({**made, "text_config": text, "media_placeholder_token_id": config["image_token_id"]}))
    published = {}
    for name, tensor in load_file(weights).items():
        published[renamed(name, VL_NAMES)] = tensor
    save_file(published, weights, {"format": "pt"})
    limits = {"in_token_limit": VL_LIMIT, "merge_kernel_size": [2, 2], "patch_size": 14, "pad_input": True}
    mean = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps({**limits, **mean}))


def renamed(name, pairs):
    for old, new in pairs:
        name = name.replace(old, new)
    return name


def load_kimi_vl(folder):
    """Load the oracle, Kimi-K2.5 of transformers, from a checkpoint of Kimi-VL."""
    import transformers as tf

    config = json.loads((folder / "config.json").read_text())
    vision = {{new: old for old, new in VL_KEYS.items()}.get(key, key): value for key, value in config["vision_config"].items()}
    made = tf.Kimi_K25Config(
        text_config=config["text_config"],
        vision_config={"model_type": "kimi_k25_vision", **vision},
        projection_hidden_size=vision["hidden_size"],
        image_token_id=config["media_placeholder_token_id"],
        tie_word_embeddings=False,
    )
    back = [(new, old) for old, new in VL_NAMES]
    stored = {renamed(name, back): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    with TemporaryDirectory() as place:
        made.save_pretrained(place)
        save_file(stored, f"{place}/model.safetensors", {"format": "pt"})
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model = tf.Kimi_K25ForConditionalGeneration.from_pretrained(place, dtype=torch.float32, **plain).eval()
    words = tf.PreTrainedTokenizerFast.from_pretrained(folder)
    return model, SimpleNamespace(tokenizer=words, limits=json.loads((folder / "preprocessor_config.json").read_text()))


def call_kimi_vl(processor, text, data):
    """Do what the published processor does: shrink with Pillow, pad with black or crop, cut into patches row by row.

    It reads no other keys of the preprocessor's JSON than those that are read here.
    """
    from torchvision.transforms.functional import center_crop, normalize, to_tensor

    patches, grids = [], []
    for image in data.get("image", ()):
        wide, tall = image.size
        if (wide // 14) * (tall // 14) > VL_LIMIT:
            scale = math.sqrt(VL_LIMIT / ((wide // 14) * (tall // 14)))
            image = image.resize((int(wide * scale), int(tall * scale)), Image.Resampling.BICUBIC)
        if processor.limits.get("pad_input", False):
            whole = Image.new("RGB", tuple(-(-side // 28) * 28 for side in image.size))
            whole.paste(image)
        else:
            whole = center_crop(image, [image.size[1] // 14 * 14, image.size[0] // 14 * 14])
        pixels = normalize(to_tensor(whole), processor.limits["image_mean"], processor.limits["image_std"])
        grids.append((1, pixels.shape[1] // 14, pixels.shape[2] // 14))
        patches.append(pixels.view(3, grids[-1][1], 14, grids[-1][2], 14).permute(1, 3, 0, 2, 4).reshape(-1, 3, 14, 14))
        text = text.replace(PAD, "<row>" * (grids[-1][1] * grids[-1][2] // 4), 1)
    inputs = dict(processor.tokenizer(text.replace("<row>", PAD), return_tensors="pt"))
    return inputs | ({"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)} if grids else {})


def kimi_vl_tensors(inputs, features):
    ordered = sorted(features, key=lambda feature: feature.range.offset)
    for ours, theirs in (("pixel_values", "pixel_values"), ("grid_thw", "image_grid_thw")):
        yield ours, torch.cat([one.kwargs[ours].data.flatten() for one in ordered]), inputs[theirs].flatten()


PAD, VL_LIMIT = "<|media_pad|>", 100
VL_KEYS = {"pos_emb_height": "init_pos_emb_height", "pos_emb_width": "init_pos_emb_width"}
VL_VISION = {
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "patch_size", "merge_kernel_size", *VL_KEYS
}  # fmt: skip
VL_NAMES = [  # as transformers stores Kimi-K2.5's -> as Kimi-VL's are published
    ("language_model.model.blocks.", "language_model.model.layers."),
    ("model.mm_projector.pre_norm.", "multi_modal_projector.pre_norm."),
    ("mm_projector.proj.0.", "multi_modal_projector.linear_1."),
    ("mm_projector.proj.2.", "multi_modal_projector.linear_2."),
    ("vision_tower.encoder.patch_embed.proj.", "vision_tower.patch_embed.proj."),
]
PUBLISHED = [  # transformers writes other names and reads both
    ("language_model.model.blocks.", "language_model.model.layers."),
    ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
    ("model.mm_projector.", "mm_projector."),
]
FAMILIES = [
    Family(
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
        half=(0.15, 0.04),  # rows take other experts: transformers' own class is off by 0.11 in bfloat16
        variants={"tied": {"tie": True}},
        layouts={"as published": PUBLISHED},
        fullest={"vision_chunk": [(4, 90, 120), (8, 112, 84), (4, 56, 112)]},
    ),
    Family(
        "kimi_vl",
        build,
        placeholders={"image": PAD},
        sizes={"image": [(90, 130), (60, 60), (200, 300), (28, 84)]},
        grid={"image": IMAGE_SIZES},
        call=call_kimi_vl,
        tensors=kimi_vl_tensors,
        run=run,
        finish=saved_as_kimi_vl,
        load=load_kimi_vl,
        half=(0.1, 0.04),
        fullest={"image": [(112, 112)]},
    ),
]
