"""Small random checkpoints that speak, with transformers' whole models as oracles."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import family
import torch
from oracle import randomise, save_checkpoint

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}{% elif c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif c['type'] == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}<|im_start|>"
)
QWEN3_TEMPLATE = TEMPLATE.replace("{{ m['role'] }} ", "{{ m['role'][0] + '\\n' }}") + "{{ 'a\\n' }}"
"""A role is one token, its first letter, as published roles are one token each."""
WAVE = {
    "codebook_size": 76, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 9,
    "intermediate_size": 48, "num_hidden_layers": 3, "num_quantizers": 4, "upsample_rates": [3, 2],
    "upsampling_ratios": [2, 2], "decoder_dim": 16,
}  # fmt: skip
FLOW = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "ff_mult": 2, "emb_dim": 20, "head_dim": 16,
    "block_size": 6, "look_ahead_layers": [1], "look_backward_layers": [0, 2], "repeats": 2, "num_embeds": 60, "mel_dim": 12,
    "enc_emb_dim": 10, "enc_dim": 8, "enc_channels": [16, 16, 16, 32], "enc_kernel_sizes": [5, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 1], "enc_attention_channels": 7, "enc_res2net_scale": 4, "enc_se_channels": 6,
}  # fmt: skip
VOCODER = {
    "mel_dim": 12, "upsample_initial_channel": 16, "resblock_kernel_sizes": [3, 7],
    "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]], "upsample_rates": [5, 2], "upsample_kernel_sizes": [11, 4],
}  # fmt: skip


def question(letters: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a user's message with an image for each "i" and a sound for each "a", and the items by modality."""
    sizes = {"i": ("image", (90, 130)), "a": ("audio", (9120,))}
    content: list[dict[str, Any]] = [{"type": "text", "text": "How many"}]
    data: dict[str, Any] = {}
    for letter in letters:
        modality, size = sizes[letter]
        data[modality] = [family.make_media(modality, size, 3)]
        content.append({"type": modality, modality: (data[modality][0], 16_000) if modality == "audio" else data[modality][0]})
    return {"role": "user", "content": [*content, {"type": "text", "text": " are there?"}]}, data


def build_qwen2_5(seed: int, vocab: int = 72) -> tuple[Any, Any]:
    """Return transformers' whole Qwen2.5-Omni and its processor. Codes from 61 on are without sound."""
    import transformers as tf

    thinker, processor = family.load_rows()["qwen2_5_omni"].build(seed)
    talker = {
        "vocab_size": vocab, "embedding_size": 64, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
        "tts_text_start_token_id": 5, "tts_text_end_token_id": 6, "tts_text_pad_token_id": 7, "tts_codec_start_token_id": 65,
        "tts_codec_end_token_id": 66, "tts_codec_pad_token_id": 64, "tts_codec_mask_token_id": 68,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    }  # fmt: skip
    names = [f"{name}_token_index" for name in ("image", "video", "audio")]
    names += [f"{name}_{side}_token_id" for name in ("vision", "audio") for side in ("start", "end")]
    talker |= {name: getattr(thinker.config, name) for name in names}
    config = tf.Qwen2_5OmniConfig(
        thinker_config=thinker.config.to_dict(),
        talker_config=talker,
        token2wav_config={"dit_config": FLOW, "bigvgan_config": VOCODER},
    )
    model = tf.Qwen2_5OmniForConditionalGeneration(config).eval()
    randomise(model, seed)
    head = model.talker.codec_head.weight.data
    head[61:64] = head[65:] = 0  # codes that transformers cannot turn into sound
    head[64] = 0
    model.token2wav.code2wav_bigvgan_model.conv_post.weight.data *= 0.1  # samples stay in [-1, 1]
    gen = torch.Generator().manual_seed(seed)
    for number, name in enumerate(("Ada", "Ben")):
        mel = torch.randn(1, 30 + number, 12, generator=gen) - 4
        model.speaker_map[name] = {"bos_token": 8 + number, "cond": torch.randn(1, 10, generator=gen), "ref_mel": mel}
    return model, processor


def save_qwen2_5(folder: Path, seed: int = 0) -> Any:
    """Save the checkpoint as it is published. Return the oracle and its processor."""
    model, processor = build_qwen2_5(seed)
    save_checkpoint(folder, model, processor)
    torch.save(model.speaker_map, folder / "spk_dict.pt")
    return model, processor


def build_qwen3(seed: int) -> tuple[Any, Any]:
    """Return transformers' whole Qwen3-Omni and its processor. Codes from 76 on are without sound."""
    import transformers as tf

    thinker, processor = family.load_rows()["qwen3_omni"].build(seed)
    words = processor.tokenizer
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    text = sizes | {
        "vocab_size": 1100, "intermediate_size": 40, "num_hidden_layers": 3, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 28, "rope_parameters": rope,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    predictor = sizes | {"vocab_size": 76, "intermediate_size": 48, "num_hidden_layers": 2, "num_code_groups": 4}
    names = ("eos_token", "nothink", "think_bos", "think_eos", "pad", "bos")
    talker = {f"codec_{name}_id": 1080 + number for number, name in enumerate(names)}
    talker |= {
        "text_config": text, "code_predictor_config": predictor, "num_code_groups": 4, "thinker_hidden_size": 64,
        "accept_hidden_layer": 3, "position_id_per_seconds": 13, "spatial_merge_size": 2,
        "speaker_id": {"ada": 1090, "ben": 1091},
    }  # fmt: skip
    shared = ("image", "video", "audio", "vision_start", "audio_start")
    talker |= {f"{name}_token_id": getattr(thinker.config, f"{name}_token_id") for name in shared}
    roles = {f"{role}_token_id": words.encode(role[0])[0] for role in ("user", "assistant", "system")}
    config = tf.Qwen3OmniMoeConfig(
        thinker_config=thinker.config.to_dict(),
        talker_config=talker,
        code2wav_config=WAVE,
        im_start_token_id=words.convert_tokens_to_ids("<|im_start|>"),
        im_end_token_id=words.convert_tokens_to_ids("<|im_end|>"),
        tts_pad_token_id=5,
        tts_bos_token_id=6,
        tts_eos_token_id=7,
        **roles,
    )
    model = tf.Qwen3OmniMoeForConditionalGeneration(config).eval()
    randomise(model, seed)
    model.talker.codec_head.weight.data[1080] = 0  # speech does not end
    model.code2wav.decoder[-1].conv.weight.data *= 0.3  # samples stay in [-1, 1]
    return model, processor


def save_qwen3(folder: Path, seed: int = 0) -> Any:
    """Save the checkpoint as it is published. Return the oracle and its processor."""
    model, processor = build_qwen3(seed)
    save_checkpoint(folder, model, processor)
    model.talker.config.audio_config = model.thinker.config.audio_config  # which transformers reads there
    return model, processor


def video_case(name: str, heard: bool) -> tuple[dict[str, Any], dict[str, Any], Callable[..., dict[str, Any]]]:
    """Return a video as a part of a message, options of `speak`, and a function of the oracle's processor and a prompt with {}.

    The function returns the oracle's inputs; it also takes images. `heard`: the video has an audio track.
    """
    row = family.load_rows()[f"{name}_together" if heard else name]
    frames = family.make_media("video", (6, 56, 90), 3)
    media = row.ours("video", frames)
    options = {"mm_processor_kwargs": {"use_audio_in_video": True}} if heard else {}

    def inputs(processor: Any, prompt: str, images: Sequence[Any] = ()) -> dict[str, Any]:
        data = {"video": [frames]} | ({"image": images} if images else {})
        return row.call(processor, prompt.format(row.placeholders["video"]), data)

    return {"type": "video", "video": media.data} | media.options, options, inputs


def edited(folder: Path, target: Path, **changes: Any) -> Path:
    """Copy a checkpoint with other values in config.json; None removes a key."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return target
