"""A small random Parakeet with a CTC head, made with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from oracle import ensure_torchvision, randomise, sharpen, small_tokenizer

ENCODER = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80, "num_mel_bins": 16}


def make_model(seed: int, **encoder: Any) -> tuple[Any, Any]:
    ensure_torchvision()
    import transformers as tf

    words = tf.ParakeetTokenizer(tokenizer_object=small_tokenizer(["<unk>", "<pad>"]), unk_token="<unk>", pad_token="<pad>")
    sizes = {**ENCODER, "subsampling_conv_channels": 12, "model_type": "parakeet_encoder", **encoder}
    config = tf.ParakeetCTCConfig(vocab_size=len(words), pad_token_id=words.pad_token_id, encoder_config=sizes)
    model = tf.ParakeetForCTC(config).eval()
    randomise(model, seed)
    draw = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(torch.rand(buffer.shape, generator=draw) * 0.4 + (0.8 if "var" in name else -0.2))
    sharpen(model.encoder)
    model.ctc_head.weight.data.mul_(2)
    model.ctc_head.bias.data[words.pad_token_id] += 3  # blanks between tokens
    return model, tf.ParakeetProcessor(tf.ParakeetFeatureExtractor(feature_size=config.encoder_config.num_mel_bins), words)


def save(folder: Path, model: Any, processor: Any) -> Path:
    model.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    processor.feature_extractor.save_pretrained(folder)
    return folder
