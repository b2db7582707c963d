"""Classes of transformers that no file of ours knows, with our paged attention, against their own generate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import ensure_torchvision, randomise, tokenizer
from PIL import Image
from sensorium import LLM, SamplingParams
from tokenizers import AddedToken, Tokenizer

ensure_torchvision()

TOKENS = 24
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
    "video_llama_3": (),
    "audioflamingo3": ("<sound>",),
}
SLOT = {"aya_vision": "<image>", "video_llama_3": "<|image_pad|>", "audioflamingo3": "<sound>"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


def words(family):
    """The small tokenizer with a family's tokens after all others, as transformers wraps it."""
    import transformers as tf

    tok = Tokenizer.from_str(tokenizer().to_str())
    tok.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in EXTRA[family]])
    return tf.PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def text_config(tok, **more):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    return sizes | {"num_key_value_heads": 2, "vocab_size": len(tok), "max_position_embeddings": 1024} | more


VISION = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 14}


def aya_vision(tok):
    """Tiles with tags, layers without positions among layers with a window, attention and MLP side by side."""
    import transformers as tf

    config = tf.AyaVisionConfig(
        text_config=tf.Cohere2Config(**text_config(tok, sliding_window=1024, pad_token_id=0)),
        vision_config=tf.SiglipVisionConfig(**VISION, image_size=56, vision_use_head=False),
        image_token_index=tok.convert_tokens_to_ids("<|IMG_PATCH|>"),
    )
    pictures = tf.GotOcr2ImageProcessor(size={"height": 56, "width": 56}, min_patches=1, max_patches=4)
    processor = tf.AyaVisionProcessor(pictures, tok, patch_size=14, img_size=56, downsample_factor=2)
    return tf.AyaVisionForConditionalGeneration(config), processor


def video_llama_3(tok):
    """Pictures at their own size, as flat patches with a grid, a rotary tower."""
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


def audioflamingo3(tok):
    """Sounds in windows of a Whisper tower, as many tokens as they last."""
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


BUILD = {"aya_vision": aya_vision, "video_llama_3": video_llama_3, "audioflamingo3": audioflamingo3}


def build(folder, family, seed=0):
    model, processor = BUILD[family](words(family))
    randomise(model, seed)
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
