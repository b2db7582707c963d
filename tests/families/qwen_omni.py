"""The thinkers of Qwen2.5-Omni and Qwen3-Omni in the parity suite, with audio windows of 0.4 s and 2 s."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from family import AUDIO_SIZES, IMAGE_SIZES, VIDEO_SIZES, Family
from oracle import fast_tokenizer, randomise, sharpen, text_config
from sensorium import Media

FPS = 2.0
AREAS = {"image": (64 * 64, 160 * 160), "video": (64 * 64, 96 * 96)}
MARKED = {"image": "<|vision_start|><|image_pad|><|vision_end|>", "video": "<|vision_start|><|video_pad|><|vision_end|>"}
MARKED["audio"] = "<|audio_start|><|audio_pad|><|audio_end|>"
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NAMED = {f"{m}_token": f"<|{m}_pad|>" for m in MARKED}
NAMED |= {
    f"{m}_{side}_token": f"<|{m}_{name}|>" for m in ("vision", "audio") for side, name in (("bos", "start"), ("eos", "end"))
}


def tokens():
    controls = [*CONTROLS, *NAMED.values()]
    words = fast_tokenizer(controls, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=NAMED)
    return words, dict(zip(controls, words.convert_tokens_to_ids(controls), strict=True))


def common(words, ids, key):
    named = {f"{m}_token_{key}": ids[f"<|{m}_pad|>"] for m in MARKED}
    marks = {f"{m}_{side}_token_id": ids[f"<|{m}_{side}|>"] for m in ("vision", "audio") for side in ("start", "end")}
    return named | marks | {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}


def processor(kind, words, mels, patch, extractor, **pixels):
    import transformers as tf

    image, video = ({"shortest_edge": least, "longest_edge": most} for least, most in AREAS.values())
    return getattr(tf, kind)(
        image_processor=tf.Qwen2VLImageProcessor(size=image, patch_size=patch, **pixels),
        video_processor=tf.Qwen2VLVideoProcessor(size=video, patch_size=patch, cap_pixels_per_frame=False, **pixels),
        feature_extractor=tf.WhisperFeatureExtractor(feature_size=mels, chunk_length=extractor),
        tokenizer=words,
    )


def build_2_5(seed, tie=False, mels=24, heads=4, window=20):
    import transformers as tf

    words, ids = tokens()
    text = text_config(words, tie, rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4})
    vision = {"depth": 3, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "out_hidden_size": 64}
    vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    audio = {"d_model": 64, "encoder_layers": 3, "encoder_attention_heads": heads, "encoder_ffn_dim": 96}
    audio |= {"num_mel_bins": mels, "n_window": window, "output_dim": 64}
    config = tf.Qwen2_5OmniThinkerConfig(
        text_config=text, vision_config=vision, audio_config=audio, tie_word_embeddings=tie, **common(words, ids, "index")
    )
    model = tf.Qwen2_5OmniThinkerForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.audio_tower)
    return model, processor("Qwen2_5OmniProcessor", words, mels, 14, 30)


def build_3(seed, tie=False, mels=24, heads=4):
    import transformers as tf

    words, ids = tokens()
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}
    text = text_config(words, tie, head_dim=16, num_hidden_layers=4, rope_parameters=rope)
    text |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]}
    vision = {"depth": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "out_hidden_size": 64}
    vision |= {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}
    audio = {"d_model": 64, "encoder_layers": 3, "encoder_attention_heads": heads, "encoder_ffn_dim": 96}
    audio |= {"num_mel_bins": mels, "downsample_hidden_size": 16, "n_window_infer": 200, "output_dim": 64}
    config = tf.Qwen3OmniMoeThinkerConfig(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        position_id_per_seconds=13,
        tie_word_embeddings=tie,
        **common(words, ids, "id"),
    )
    model = tf.Qwen3OmniMoeThinkerForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.audio_tower)
    return model, processor("Qwen3OmniMoeProcessor", words, mels, 16, 30, image_mean=[0.5] * 3, image_std=[0.5] * 3)


def call(processor, text, data):
    """Pass videos as already sampled. The processors read the limits of a frame's area from the call only."""
    least, most = AREAS["video"]
    options = {"fps": FPS, "do_sample_frames": False, "size": {"shortest_edge": least, "longest_edge": most}}
    names = {"image": "images", "video": "videos", "audio": "audio"}
    media = {names[modality]: values for modality, values in data.items() if values}
    more = {"videos_kwargs": options} if "video" in data else {}
    return dict(processor(text=[text], **media, **more, return_tensors="pt"))


def ours(modality, media):
    if modality == "audio":
        return media, 16_000
    least, most = AREAS["video"]
    frames = (media, {"fps": FPS, "do_sample_frames": False})
    return Media(frames, min_pixels=least, max_pixels=most) if modality == "video" else media


def audio_track(video):
    """Return noise as long as the video."""
    rng = np.random.default_rng(int(video.sum()))
    return rng.normal(0, 0.1, int(len(video) / FPS * 16_000)).astype(np.float32)


def call_together(processor, text, data):
    """Pass the audio tracks of videos as audio, in the order of the text."""
    least, most = AREAS["video"]
    videos, items = iter(range(len(data.get("video", ())))), iter(data.get("audio", ()))
    order = [next(videos) if name == "video" else None for name in re.findall(r"<.(video|audio)_pad.>", text)]
    audio = [next(items) if one is None else audio_track(data["video"][one]) for one in order]
    more = {"images": data["image"]} if "image" in data else {}
    if "video" in data:
        options = {"fps": FPS, "do_sample_frames": False, "size": {"shortest_edge": least, "longest_edge": most}}
        more |= {"videos": data["video"], "videos_kwargs": options, "audio_from_video_indices": order}
    heard = {"audio": audio} if audio else {}
    return dict(processor(text=[text], **heard, **more, load_audio_from_video=True, return_tensors="pt"))


def ours_together(modality, media):
    given = ours(modality, media)
    if modality != "video":
        return given
    frames, metadata = given.data
    return replace(given, data=(frames, metadata | {"audio": (audio_track(media), 16_000)}))


def request_together(text, data):
    return {"prompt": text, "multi_modal_data": data, "mm_processor_kwargs": {"use_audio_in_video": True}}


def refuses(modality, size):
    return max(size[-2:]) > 200 * min(size[-2:]) if modality != "audio" else False


def tensors(inputs, features):
    """Compare frames without padding; the oracle pads all audio of a prompt to one length."""
    for modality, names in (
        ("image", ("pixel_values", "image_grid_thw")),
        ("video", ("pixel_values_videos", "video_grid_thw")),
    ):
        own = [feature.kwargs for feature in features if feature.modality == modality]
        for name in names if own else ():
            yield name, torch.cat([torch.as_tensor(one[name].data).flatten() for one in own]), inputs[name].flatten()
    for number, feature in enumerate(one for one in features if one.modality == "audio"):
        frames = feature.kwargs["input_features"].data
        yield "audio_frames", feature.kwargs["audio_frames"].data, inputs["feature_attention_mask"][number].sum()
        yield "input_features", frames, inputs["input_features"][number, :, : len(frames)].T


def positions(model, inputs, together=False):
    rule = model.model.get_rope_index
    given = {name: inputs.get(name) for name in ("input_ids", "image_grid_thw", "video_grid_thw", "attention_mask")}
    mask = inputs.get("feature_attention_mask")
    seconds = inputs.get("video_second_per_grid")
    more = {"audio_seqlens": None if mask is None else mask.sum(1)}
    more["second_per_grids"] = None if seconds is None else torch.as_tensor(seconds)
    return rule(**given, **more, use_audio_in_video=together)[0][:, 0].long()


def row(name, build, **more):
    return Family(
        name,
        build,
        sizes={
            "image": [(90, 130), (60, 60), (140, 70)],
            "video": [(6, 80, 100), (4, 56, 90), (3, 60, 60)],
            "audio": [(30_080,), (9120,), (61_120,)],
        },
        grid={"image": [*IMAGE_SIZES, (2, 500)], "video": VIDEO_SIZES, "audio": AUDIO_SIZES},
        refuses=refuses,
        tensors=tensors,
        layouts=LAYOUTS,
        fullest={"image": [(150, 150), (140, 150), (150, 140)]},
        **{"placeholders": MARKED, "ours": ours, "call": call, "oracle_positions": positions} | more,
    )


def together(name, build, cases, **more):
    """Return a row for videos with their audio tracks. In Qwen3's oracle, several audio items of a prompt affect each other."""
    placeholders = {modality: MARKED[modality] for modality in ("image", "video")}
    asked = {"ours": ours_together, "call": call_together, "request": request_together}
    return row(
        name, build, placeholders=placeholders, cases=cases, oracle_positions=partial(positions, together=True), **asked, **more
    )


# names in a full checkpoint, which also has a talker
WHOLE = [("visual.", "thinker.visual."), ("audio_tower.", "thinker.audio_tower."), ("model.", "thinker.model.")]
LAYOUTS = {"whole": [*WHOLE, ("lm_head.", "thinker.lm_head.")]}

UNUSED = {"model.audio_tower.audio_bos_eos_token.": "the published model does not use it either"}
KEYS = {f"model.audio_tower.layers.{i}.self_attn.k_proj.bias": "adds the same to all scores of a row" for i in range(3)}
TIED = {"tied": {"tie": True}}

FAMILIES = [
    row(
        "qwen2_5_omni",
        build_2_5,
        cases=["", "i", "v", "a", "ii", "avia"],
        silent=UNUSED,
        variants=TIED | {"more bands": {"mels": 80, "heads": 2, "window": 50}},
    ),
    together("qwen2_5_omni_together", build_2_5, ["", "v", "v", "v", "iv", "vv"], silent=UNUSED),
    row(
        "qwen3_omni",
        build_3,
        cases=["", "i", "v", "a", "ii", "aivi"],
        silent=KEYS,
        variants=TIED | {"more bands": {"mels": 80, "heads": 2}},
    ),
    together(
        "qwen3_omni_together", build_3, ["", "v", "v", "vi", "iv"], silent=KEYS, half=(0.1, 0.04)
    ),  # rounding changes some choices of experts
]
