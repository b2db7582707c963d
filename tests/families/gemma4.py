"""Gemma 4 in the parity suite: images, videos and audio, small encoders with clipped linear layers."""

from dataclasses import replace
from functools import partial

import torch
from family import AUDIO_SIZES, IMAGE_SIZES, RATE, VIDEO_SIZES, Family, as_sampled, call_sampled, give, run_oracle
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config

NAMED = {
    "boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>",
    "boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>",
}  # fmt: skip
LAYERS = ["sliding_attention"] * 2 + ["full_attention", "sliding_attention", "full_attention"]
PATCH = 4
LARGE_TEXT = {
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48, "attention_k_eq_v": True,
    "num_global_key_value_heads": 1, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
}  # fmt: skip


def make_words():
    special = ["<bos>", "<eos>", *NAMED.values(), "<|video|>"]
    words = fast_tokenizer(special, eos_token="<eos>", pad_token="<eos>", bos_token="<bos>")
    words._set_model_specific_special_tokens(NAMED)
    return words


def token_ids(words):
    return {
        "boi_token_id": words.boi_token_id,
        "eoi_token_id": words.eoi_token_id,
        "image_token_id": words.image_token_id,
        "video_token_id": words.convert_tokens_to_ids("<|video|>"),
        "boa_token_id": words.boa_token_id,
        "eoa_token_index": words.eoa_token_id,
        "audio_token_id": words.audio_token_id,
    }


def randomise_decoder(model, seed):
    randomise(model, seed)
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            parameter.data.mul_(0.4)  # scores are not scaled by the width of a head
    for token in (model.config.image_token_id, model.config.audio_token_id, model.config.video_token_id):
        model.lm_head.weight.data[token] = 0  # in an answer, the class would read it as the padding token


def randomise_buffers(model, seed):
    generator = torch.Generator().manual_seed(seed)
    bounds = {"layer_scalar": (0.5, 1.0), "std_bias": (-0.2, 0.2), "std_scale": (0.5, 1.5)}
    bounds |= {"put_min": (-2.5, -1.5), "put_max": (1.5, 2.5)}
    for name, buffer in model.named_buffers():
        for end, between in bounds.items():
            if name.endswith(end):
                buffer.uniform_(*between, generator=generator)


def build(seed, tie=False, standardize=False, hears=True, keys=4, **text):
    ensure_torchvision()
    import transformers as tf

    words = make_words()
    sizes = {
        "head_dim": 16, "global_head_dim": 24, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "sliding_window": 20,
        "layer_types": LAYERS, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 700,
        "final_logit_softcapping": 8.0,
    }  # fmt: skip
    vision = {
        "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": keys, "head_dim": 16, "patch_size": PATCH, "position_embedding_size": 300,
        "use_clipped_linears": True,
        "standardize": standardize,
    }  # fmt: skip
    audio = {
        "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "subsampling_conv_channels": [24, 6],
        "output_proj_dims": 40, "use_clipped_linears": True,
    }  # fmt: skip
    config = tf.Gemma4Config(
        text_config=tf.Gemma4TextConfig(**text_config(words, tie, **{**sizes, **text})),
        vision_config=tf.Gemma4VisionConfig(**vision),
        audio_config=tf.Gemma4AudioConfig(**audio) if hears else None,
        **token_ids(words),
        tie_word_embeddings=tie,
    )
    model = tf.Gemma4ForConditionalGeneration(config).eval()
    randomise_decoder(model, seed)
    randomise_buffers(model, seed)
    images = tf.Gemma4ImageProcessor(patch_size=PATCH, max_soft_tokens=70)
    videos = tf.Gemma4VideoProcessor(patch_size=PATCH, max_soft_tokens=70)
    sounds = tf.Gemma4AudioFeatureExtractor(feature_size=24)
    return model, tf.Gemma4Processor(sounds, images, words, videos)


def build_unified(seed, tie=False, **text):
    ensure_torchvision()
    import transformers as tf

    words, samples = make_words(), 160
    sizes = {
        "head_dim": 16, "global_head_dim": 24, "num_hidden_layers": 5, "sliding_window": 20, "layer_types": list(LAYERS),
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 8.0,
    }  # fmt: skip
    vision = {"patch_size": PATCH, "mm_embed_dim": 48, "mm_posemb_size": 80, "output_proj_dims": 48}
    config = tf.Gemma4UnifiedConfig(
        text_config=tf.Gemma4UnifiedTextConfig(**text_config(words, tie, **{**sizes, **text})),
        vision_config=tf.Gemma4UnifiedVisionConfig(**vision),
        audio_config=tf.Gemma4UnifiedAudioConfig(audio_embed_dim=samples),
        **token_ids(words),
        tie_word_embeddings=tie,
    )
    model = tf.Gemma4UnifiedForConditionalGeneration(config).eval()
    randomise_decoder(model, seed)
    randomise_buffers(model, seed)
    images = tf.Gemma4UnifiedImageProcessor(patch_size=PATCH, max_soft_tokens=70)
    videos = tf.Gemma4UnifiedVideoProcessor(patch_size=PATCH, max_soft_tokens=70)
    sounds = tf.Gemma4UnifiedAudioFeatureExtractor(feature_size=samples, audio_samples_per_token=samples)
    return model, tf.Gemma4UnifiedProcessor(sounds, images, words, videos)


def tensors(inputs, features):
    """Yield the patches of images and frames without padding, in the order of the squares, and the frames of audio."""
    sounds, frames = 0, {"pixel_values": 0, "pixel_values_videos": 0}
    for feature in sorted(features, key=lambda one: one.range.offset):
        ours = feature.kwargs
        if feature.modality == "audio":
            valid = inputs["input_features_mask"][sounds]
            yield "input_features", ours["input_features"].data, inputs["input_features"][sounds][valid]
            sounds += 1
            continue
        name = "pixel_values" if feature.modality == "image" else "pixel_values_videos"
        count, h, w = ours[f"{feature.modality}_grid_thw"].data.tolist()
        theirs = inputs[name][frames[name] : frames[name] + count, : h * w]
        squares = theirs.reshape(count, h // 3, 3, w // 3, 3, PATCH, PATCH, 3).permute(0, 1, 3, 2, 4, 7, 5, 6)
        yield name, ours[name].data, 2 * squares.reshape(count * h * w, -1) - 1
        frames[name] += count


def unified_tensors(inputs, features):
    """Yield the whole squares of images and frames without padding, and the frames of audio."""
    sounds, frames = 0, {"pixel_values": 0, "pixel_values_videos": 0}
    for feature in sorted(features, key=lambda one: one.range.offset):
        ours = feature.kwargs
        if feature.modality == "audio":
            yield (
                "input_features",
                ours["input_features"].data,
                inputs["input_features"][sounds][inputs["input_features_mask"][sounds]],
            )
            sounds += 1
            continue
        name = "pixel_values" if feature.modality == "image" else "pixel_values_videos"
        count, h, w = ours[f"{feature.modality}_grid_thw"].data.tolist()
        theirs = inputs[name][frames[name] : frames[name] + count, : h * w]
        yield name, ours[name].data, theirs.unflatten(-1, (3 * PATCH, 3 * PATCH, 3)).movedim(-1, 2).reshape(count * h * w, -1)
        frames[name] += count


def run_unified(model, inputs, answer, positions):
    """Run the oracle with the masks of its `generate`; those of its `forward` alone are bidirectional in every layer."""
    ids = inputs["input_ids"]
    masks = model.create_masks_for_generate(
        model.config,
        inputs_embeds=model.get_input_embeddings()(ids),
        attention_mask=None,
        past_key_values=None,
        position_ids=torch.arange(ids.shape[1])[None],
        mm_token_type_ids=inputs["mm_token_type_ids"],
    )
    return run_oracle(model, {**inputs, "attention_mask": masks}, answer, positions)


def call(processor, text, data):
    audio = {"audio": data["audio"], "sampling_rate": RATE} if "audio" in data else {}
    return call_sampled(partial(processor, **audio), text, data)


def prompt(placeholders, seed):
    """Write a prompt without spaces before its placeholders: the time of a video's first frame follows the text."""
    return f"def f{seed}(x):" + " and".join(placeholders) + " return it" + " + x" * (seed % 5)


def ours(modality, media):
    return as_sampled(modality, media) if modality == "video" else give(modality, media)


SMALL = Family(
    "gemma4",
    build,
    placeholders={"image": "<|image|>", "video": "<|video|>", "audio": "<|audio|>"},
    sizes={
        "image": [(90, 130), (60, 60), (150, 40)],
        "video": [(2, 60, 90), (3, 90, 60), (1, 44, 130)],
        "audio": [(9000,), (4001,), (20_234,)],
    },
    grid={"image": IMAGE_SIZES, "video": VIDEO_SIZES, "audio": AUDIO_SIZES},
    refuses=lambda modality, size: modality == "audio" and size[0] <= 160,
    prompt=prompt,
    ours=ours,
    call=call,
    tensors=tensors,
    tensor_tolerance=1e-4,
    variants={"tied": {"tie": True}, "standardised rows": {"standardize": True}, "grouped keys of the tower": {"keys": 2}},
)

LARGE = replace(
    SMALL,
    name="gemma4_large",
    build=partial(build, **LARGE_TEXT, hears=False, standardize=True),
    placeholders={"image": "<|image|>", "video": "<|video|>"},
    prompt_attention="bidirectional_windows",
    variants={},
    half=(0.2, 0.1),  # some rows take another expert
)
UNIFIED = replace(
    SMALL,
    name="gemma4_unified",
    build=build_unified,
    prompt_attention="bidirectional_windows",
    refuses=lambda modality, size: False,
    run=run_unified,
    tensors=unified_tensors,
    variants={"tied": {"tie": True}, "values of their own": {"attention_k_eq_v": False}},
)
FAMILIES = [SMALL, LARGE, UNIFIED]
"""The second row has what larger published checkpoints have: experts, keys as values, no per-layer inputs, no audio."""
