"""Small checkpoints of transformers' classes that have no model here, and items for them."""

from __future__ import annotations

import numpy as np
from oracle import ensure_torchvision, randomise, tokenizer
from PIL import Image
from sensorium.models.registry import FAMILIES
from tokenizers import AddedToken, Tokenizer

ensure_torchvision()

EXTRA = {
    "aya_vision": (
        "<image>",
        "<|START_OF_IMG|>",
        "<|END_OF_IMG|>",
        "<|IMG_PATCH|>",
        "<|IMG_LINE_BREAK|>",
        "TILE",
        "TILE_GLOBAL",
    ),
    "ovis2": ("<image>", "<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
    "video_llama_3": (),
    "glm4v_moe": ("<|image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>"),
    "audioflamingo3": ("<sound>",),
}
PLACEHOLDER = {"video_llama_3": "<|image_pad|>", "glm4v_moe": "<|image|>", "audioflamingo3": "<sound>"}  # others: <image>


def words(family):
    """Return the small tokenizer, wrapped for transformers, with a family's tokens appended."""
    import transformers as tf

    tok = Tokenizer.from_str(tokenizer().to_str())
    tok.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in EXTRA[family]])
    return tf.PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def text_config(tok, **more):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    return sizes | {"num_key_value_heads": 2, "vocab_size": len(tok), "max_position_embeddings": 1024} | more


VISION = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 14}


def aya_vision(tok):
    """Build Aya Vision: tiles with tags, layers without positions, windows, parallel attention and MLP."""
    import transformers as tf

    config = tf.AyaVisionConfig(
        text_config=tf.Cohere2Config(**text_config(tok, sliding_window=20, pad_token_id=0)),
        vision_config=tf.SiglipVisionConfig(**VISION, image_size=56, vision_use_head=False),
        image_token_index=tok.convert_tokens_to_ids("<|IMG_PATCH|>"),
    )
    images = tf.GotOcr2ImageProcessor(size={"height": 56, "width": 56}, min_patches=1, max_patches=4)
    processor = tf.AyaVisionProcessor(images, tok, patch_size=14, img_size=56, downsample_factor=2)
    return tf.AyaVisionForConditionalGeneration(config), processor


def ovis2(tok):
    """Build Ovis2: rows are means over a table of visual tokens; the tags around them use the same table."""
    import transformers as tf

    vision = VISION | {"image_size": 56, "vocab_size": 90, "hidden_stride": 2}
    config = tf.Ovis2Config(
        text_config=tf.Qwen2Config(**text_config(tok)),
        vision_config=vision,
        hidden_size=64,
        vocab_size=len(tok),
        image_token_id=tok.convert_tokens_to_ids("<IMG_ATOM>"),
        visual_indicator_token_ids=[tok.convert_tokens_to_ids(tag) for tag in EXTRA["ovis2"][2:]],
    )
    images = tf.Ovis2ImageProcessor(size={"height": 56, "width": 56}, max_patches=4)
    return tf.Ovis2ForConditionalGeneration(config), tf.Ovis2Processor(images, tok, image_seq_length=4)


def video_llama_3(tok):
    """Build VideoLLaMA 3: images at native resolution, as flat patches with a grid, with a rotary vision tower."""
    import transformers as tf

    config = tf.VideoLlama3Config(
        text_config=tf.Qwen2Config(**text_config(tok)),
        vision_config=tf.VideoLlama3VisionConfig(**VISION),
        image_token_id=tok.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tok.convert_tokens_to_ids("<|video_pad|>"),
    )
    sizes = {"patch_size": 14, "size": {"shortest_edge": 28 * 28, "longest_edge": 140 * 140}}
    parts = (tf.VideoLlama3ImageProcessor(merge_size=1, **sizes), tok, tf.VideoLlama3VideoProcessor(merge_size=2, **sizes))
    return tf.VideoLlama3ForConditionalGeneration(config), tf.VideoLlama3Processor(*parts)


def glm4v_moe(tok):
    """Build GLM-4.5V: three position axes, partial rotary embeddings and a mixture of experts."""
    import transformers as tf
    from transformers.models.glm4v_moe.configuration_glm4v_moe import Glm4vMoeTextConfig, Glm4vMoeVisionConfig

    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    experts = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
    vision = {"depth": 2, "hidden_size": 48, "num_heads": 4, "intermediate_size": 64, "out_hidden_size": 64, "image_size": 112}
    config = tf.Glm4vMoeConfig(
        text_config=Glm4vMoeTextConfig(**text_config(tok), **experts, rope_parameters=rope),
        vision_config=Glm4vMoeVisionConfig(**vision),
        image_token_id=tok.convert_tokens_to_ids("<|image|>"),
        video_token_id=tok.convert_tokens_to_ids("<|video|>"),
        video_start_token_id=tok.convert_tokens_to_ids("<|begin_of_video|>"),
        video_end_token_id=tok.convert_tokens_to_ids("<|end_of_video|>"),
    )
    images = tf.Glm4vImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 2 * 140 * 140})
    processor = tf.Glm4vProcessor(images, tok, tf.Glm4vVideoProcessor())
    return tf.Glm4vMoeForConditionalGeneration(config), processor


def audioflamingo3(tok):
    """Build Audio Flamingo 3: windows of a Whisper encoder; the number of tokens follows from the length of the audio."""
    import transformers as tf

    audio = tf.AudioFlamingo3EncoderConfig(
        num_mel_bins=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_size=48,
        max_source_positions=100,
    )
    config = tf.AudioFlamingo3Config(
        audio_config=audio,
        text_config=tf.Qwen2Config(**text_config(tok)),
        audio_token_id=tok.convert_tokens_to_ids("<sound>"),
    )
    mel = tf.WhisperFeatureExtractor(feature_size=24, chunk_length=2)
    return tf.AudioFlamingo3ForConditionalGeneration(config), tf.AudioFlamingo3Processor(mel, tok, max_audio_len=8)


BUILD = {build.__name__: build for build in (aya_vision, ovis2, video_llama_3, glm4v_moe, audioflamingo3)}


NATIVE = ("AudioFlamingo3", "AyaVision", "Glm4vMoe", "Ovis2", "VideoLlama3")
"""Classes of BUILD that sensorium implements."""


def hide_native(monkeypatch):
    """Remove our implementations of NATIVE, so that the fallback runs them."""
    for name in NATIVE:
        monkeypatch.delitem(FAMILIES, f"{name}ForConditionalGeneration")


def build(folder, family, seed=0):
    model, processor = BUILD[family](words(family))
    randomise(model, seed)
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def item(family, seed, size):
    """Return noise: an image of (height, width), or audio of the given number of samples."""
    rng = np.random.default_rng(seed)
    if family == "audioflamingo3":
        return (rng.standard_normal(size) * 0.1).astype(np.float32)
    return Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))
