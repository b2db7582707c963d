"""Nemotron 3 Omni in the parity suite. transformers' forward takes one kind of media per prompt, so `run` puts the rows in."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import torch
from family import FPS, RATE, Family, as_sampled
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config
from radio import ARGS, PATCH, reset_scales
from safetensors.torch import load_file, save_file
from sensorium.processors.images import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

BANDS, LEAST, MOST = 16, 36, 100
WORDS = ["<image>", "<video>", "<img>", "</img>", "<so_start>", "<so_embedding>", "<so_end>", "<eos>"]
VISION = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": PATCH, "mlp_ratio": 1.5,
    "num_cls_tokens": 3, "num_registers": 1, "max_img_size": 64, "args": {"min_num_patches": LEAST, "max_num_patches": MOST},
    "model_type": "radio",
}  # fmt: skip
AUDIO = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "num_mel_bins": BANDS,
    "subsampling_conv_channels": 8, "projection_hidden_size": 40, "projection_bias": False, "max_position_embeddings": 400,
}  # fmt: skip
TEXT = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "M-*M", "num_hidden_layers": 4, "head_dim": 24,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48, "n_shared_experts": 1,
}  # fmt: skip


def processor_of(words, config):
    import transformers as tf

    image = {"patch_size": PATCH, "min_num_patches": LEAST, "max_num_patches": MOST, "max_model_len": 4096}
    video = {"norm_mean": OPENAI_CLIP_MEAN, "norm_std": OPENAI_CLIP_STD, "video_target_num_patches": MOST}
    processor = tf.NemotronH_Omni_Reasoning_V3Processor(
        image_processor=tf.NemotronH_Omni_Reasoning_V3ImageProcessor(**image),
        video_processor=tf.NemotronH_Omni_Reasoning_V3VideoProcessor(**video, patch_size=PATCH),
        tokenizer=words,
        feature_extractor=tf.ParakeetFeatureExtractor(feature_size=BANDS),
        video_temporal_patch_dim=config.video_temporal_patch_size,
    )
    processor.video_pruning_rate = config.video_pruning_rate
    return processor


def build(seed, frames=2, pruned=0.0, sound=None, **text):
    ensure_torchvision()
    import transformers as tf

    words = fast_tokenizer(WORDS, eos_token="<eos>", pad_token="<eos>")
    ids = {f"{name}_token_id": words.convert_tokens_to_ids(token) for name, token in PLACEHOLDERS.items()}
    config = tf.AutoConfig.for_model(
        "nemotron_h_omni",
        text_config=text_config(words, **TEXT | text),
        vision_config=VISION | {"video_temporal_patch_size": frames},
        audio_config=AUDIO | (sound or {}),
        vision_hidden_size=VISION["hidden_size"],
        projector_hidden_size=80,
        video_temporal_patch_size=frames,
        video_pruning_rate=pruned,
        **ids,
    )
    model = tf.NemotronH_Omni_Reasoning_V3(config).eval()
    randomise(model, seed)
    for name, parameter in model.audio_tower.named_parameters():
        if "q_proj" in name or "k_proj" in name:  # squared ReLUs amplify the rounding of sharper attention
            parameter.data.mul_(2)
    for name, parameter in model.named_parameters():
        if name.endswith((".D", "lambda1")):  # near 0, the norm after it amplifies the rounding of small sums
            parameter.data.add_(2 if name.endswith(".D") else 1)
        elif "mixer.out_proj" in name:  # Mamba's layers amplify the rounding of log-mel frames
            parameter.data.mul_(0.5)
    return model, processor_of(words, config)


def load(folder):
    """Load both. In memory, transformers splits RADIO's queries, keys and values, which no checkpoint does."""
    ensure_torchvision()
    import transformers as tf

    hub = folder / HUB
    config = tf.AutoConfig.from_pretrained(hub if hub.is_dir() else folder)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    model = tf.NemotronH_Omni_Reasoning_V3.from_pretrained(folder, config=config, **plain).eval()
    model.state_dict = lambda: load_file(folder / "model.safetensors")
    return model, processor_of(tf.PreTrainedTokenizerFast.from_pretrained(folder), config)


def publish(folder):
    """Rewrite config.json as its publisher does, and leave out the scales, which that model does not have."""
    config = json.loads((folder / "config.json").read_text())
    (folder / HUB).mkdir(exist_ok=True)
    (folder / HUB / "config.json").write_text(json.dumps(config))
    for name, published in LEGACY.items():
        config[published] = config.pop(name)
    for key in config["vision_config"].keys() & {"max_img_size", "num_cls_tokens", "num_registers", "layerscale_value"}:
        del config["vision_config"][key]
    config["vision_config"]["args"] |= ARGS
    config["architectures"] = ["NemotronH_Nano_Omni_Reasoning_V3"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layer_scale" not in name}
    kept["sound_encoder.encoder.feature_extractor.window"] = torch.zeros(400)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def build_published(seed):
    model, processor = build(seed)
    reset_scales(model)
    return model, processor


def call(processor, text, data):
    """Process each item alone: the class takes one video, and the padding of shorter audio changes its last row."""
    views, sounds, media = [], [], {name: iter(values) for name, values in data.items()}
    pieces = []
    for piece in re.split("(<image>|<video>|<so_embedding>)", text):
        if piece == "<image>":
            inputs = processor.image_processor([next(media["image"])], return_tensors="pt")
            views.append(inputs)
            piece = processor.replace_image_token(inputs, 0)
        elif piece == "<video>":
            frames = next(media["video"])
            inputs = processor.video_processor([frames.copy()], do_sample_frames=False, return_tensors="pt")
            times = SimpleNamespace(fps=FPS, frames_indices=list(range(len(frames))))
            piece = processor.replace_video_token(inputs, 0, num_frames=len(frames), video_metadata=times)
            texts = None
            if processor.video_pruning_rate:
                texts, piece = pruned_text(processor, piece, int(inputs["num_tokens"][0]))
            views.append({"pixel_values_videos": inputs["pixel_values_videos"], "texts": texts})
        elif piece == "<so_embedding>":
            features, mask, counts = processor._process_audio([next(media["audio"])], {"sampling_rate": RATE})
            sounds.append({"input_features": features, "input_features_mask": mask})
            piece = processor.replace_audio_token({"num_tokens": counts}, 0)
        pieces.append(piece)
    ids = processor.tokenizer("".join(pieces), return_tensors="pt")["input_ids"]
    return {"input_ids": ids, "views": views, "sounds": sounds, "joined": processor.video_temporal_patch_dim}


def pruned_text(processor, piece, each):
    """Return the ids of the text of each group of frames, and placeholders for them and for the rows that are kept."""
    parts = [re.sub("(<image>)+", "", part) for part in piece.split("\n")]
    texts = [processor.tokenizer("\n" * (i > 0) + part)["input_ids"] for i, part in enumerate(parts)]
    kept = max(each, int(each * len(texts) * (1 - processor.video_pruning_rate)))
    return texts, "<image>" * (kept + sum(map(len, texts)))


def prune(model, groups, texts):
    """Return each group's text, those of its rows `[n, hidden]` that transformers' rule keeps, and the token after them."""
    from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import compute_retention_mask

    shape = (len(groups), len(groups[0]), 1)
    rate = model.config.video_pruning_rate
    kept = compute_retention_mask(video_embeds=torch.cat(groups), thw=shape, spatial_merge_size=1, q=rate)
    words = [model.get_input_embeddings()(torch.tensor(text)) for text in texts]
    masks = kept.split(len(groups[0]))
    return [torch.cat((text[:-1], rows[mask], text[-1:])) for text, rows, mask in zip(words, groups, masks, strict=True)]


def run(model, inputs, answer, positions):
    """Return the logits of the prompt and of the answer after it."""
    ids, config = inputs["input_ids"], model.config
    model.vision_model.config.dtype = model.dtype  # get_image_features casts to it
    model.audio_tower.config._attn_implementation = "sdpa"  # in float64, the other one makes NaN of rows of padding
    with torch.inference_mode():
        embeds = model.get_input_embeddings()(ids)
        rows = []
        for view in inputs["views"]:
            if "pixel_values" in view:
                rows += model.get_image_features(**view, return_dict=True).pooler_output
                continue
            groups = [*model.get_video_features(view["pixel_values_videos"], return_dict=True).pooler_output]
            rows += groups if view["texts"] is None else prune(model, groups, view["texts"])
        if rows:
            embeds[ids == config.image_token_id] = torch.cat(rows)
        heard = [model.get_audio_features(**sound, return_dict=True).pooler_output for sound in inputs["sounds"]]
        if heard:
            embeds[ids == config.audio_token_id] = torch.cat(heard)
        first = model.language_model(inputs_embeds=embeds, use_cache=True)
        if len(answer) < 2:
            return first.logits[0].float()
        tail = torch.tensor([answer[:-1]])
        rest = model.language_model(input_ids=tail, past_key_values=first.past_key_values)
    return torch.cat([first.logits[0], rest.logits[0]]).float()


def in_squares(planes):
    """Cut `[n, dim, h, w]` into patches, in squares of two by two: `[n * patches, dim * PATCH^2]`."""
    cut = planes.unflatten(3, (-1, 2, PATCH)).unflatten(2, (-1, 2, PATCH))  # [n, dim, lines, 2, PATCH, columns, 2, PATCH]
    return cut.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, planes.shape[1] * PATCH**2)


def as_ours(view, frames):
    if "pixel_values" in view:
        (tall, wide), patches = view["image_grid_hw"][0].tolist(), view["pixel_values"]
        return patches.view(tall // 2, 2, wide // 2, 2, -1).transpose(1, 2).reshape(len(patches), -1)
    planes = view["pixel_values_videos"]
    planes = torch.cat((planes, planes[-1:].expand(-len(planes) % frames, -1, -1, -1)))
    return in_squares(planes.unflatten(0, (-1, frames)).flatten(1, 2))


def tensors(inputs, features):
    ordered = sorted(features, key=lambda feature: feature.range.offset)
    seen = [feature for feature in ordered if feature.modality != "audio"]
    for feature, view in zip(seen, inputs["views"], strict=True):
        yield "pixel_values", feature.kwargs["pixel_values"].data, as_ours(view, inputs["joined"])
    heard = [feature for feature in ordered if feature.modality == "audio"]
    for feature, sound in zip(heard, inputs["sounds"], strict=True):
        yield (
            "input_features",
            feature.kwargs["input_features"].data,
            sound["input_features"][0][sound["input_features_mask"][0]],
        )


def is_too_long(modality, size):
    """Return True for an image that would have no row of patches, for which the published rule divides by zero."""
    counts = [round(side / PATCH + 0.5) for side in size[-2:]]
    return modality == "image" and math.sqrt(MOST / math.prod(counts)) * min(counts) < 1 <= math.prod(counts) / MOST


def give(modality, media):
    return (media, RATE) if modality == "audio" else as_sampled(modality, media)


HUB = "hub"
LEGACY = {
    "image_token_id": "img_context_token_id", "video_token_id": "video_context_token_id", "text_config": "llm_config",
    "audio_token_id": "sound_context_token_id", "audio_config": "sound_config", "vision_hidden_size": "vit_hidden_size",
}  # fmt: skip
PLACEHOLDERS = {"image": "<image>", "video": "<video>", "audio": "<so_embedding>"}
SCALES = {f"vision_model.encoder.layer.{i}.layer_scale": "it is 1 and not stored" for i in range(3)}
KEYS = "a key bias adds the same to all scores of a query"
ROW = Family(
    "nemotron_omni",
    build,
    placeholders=PLACEHOLDERS,
    sizes={
        "image": [(90, 130), (60, 60), (140, 40)],
        "video": [(3, 80, 100), (2, 50, 90), (4, 60, 60)],
        "audio": [(9_000,), (20_480,), (5_000,)],
    },
    refuses=is_too_long,
    ours=give,
    call=call,
    run=run,
    tensors=tensors,
    load=load,
    silent={f"vision_model.encoder.layer.{i}.attention.k_proj.bias": KEYS for i in range(VISION["num_hidden_layers"])},
    fullest={"audio": [(63_840,)]},
    variants={
        "experts": {"hybrid_override_pattern": "M-*ME", "num_hidden_layers": 5},
        "norm of multi-token prediction": {"num_nextn_predict_layers": 1},
        "biases": {"sound": {"projection_bias": True}},
        "frames joined in threes": {"frames": 3},
        "pruned": {"pruned": 0.6},
    },
)
FAMILIES = [
    ROW,
    replace(
        ROW, name="nemotron_omni_published", build=build_published, finish=publish, variants={}, silent=ROW.silent | SCALES
    ),
]
