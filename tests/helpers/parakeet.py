"""Small random Parakeets with a CTC head or a transducer, made with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from family import RATE, make_media
from oracle import ensure_torchvision, randomise, sharpen, small_tokenizer

ENCODER = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80, "num_mel_bins": 16}


def make_model(seed: int, **encoder: Any) -> tuple[Any, Any]:
    ensure_torchvision()
    import transformers as tf

    words = tf.ParakeetTokenizer(tokenizer_object=small_tokenizer(["<unk>", "<pad>"]), unk_token="<unk>", pad_token="<pad>")
    sizes = {**ENCODER, "subsampling_conv_channels": 12, "model_type": "parakeet_encoder", **encoder}
    config = tf.ParakeetCTCConfig(vocab_size=len(words), pad_token_id=words.pad_token_id, encoder_config=sizes)
    model = tf.ParakeetForCTC(config).eval()
    _randomise(model, seed)
    model.ctc_head.weight.data.mul_(2)
    model.ctc_head.bias.data[words.pad_token_id] += 3  # blanks between tokens
    return model, tf.ParakeetProcessor(tf.ParakeetFeatureExtractor(feature_size=config.encoder_config.num_mel_bins), words)


def make_transducer(seed: int, kind: str, **changes: Any) -> tuple[Any, Any]:
    """Return a model and its processor. `kind`: "tdt" or "rnnt". `changes`: of the config."""
    ensure_torchvision()
    import transformers as tf

    made = small_tokenizer(["<unk>", "<pad>", "<blank>"])
    words = tf.ParakeetTokenizer(tokenizer_object=made, unk_token="<unk>", pad_token="<pad>")
    blank = words.convert_tokens_to_ids("<blank>")
    encoder = {**ENCODER, "subsampling_conv_channels": 12, "model_type": "parakeet_encoder"}
    sizes = {"vocab_size": len(words), "pad_token_id": words.pad_token_id, "blank_token_id": blank, "decoder_hidden_size": 32}
    name = kind.upper()
    config = getattr(tf, f"Parakeet{name}Config")(**sizes | changes, encoder_config=encoder)
    model = getattr(tf, f"ParakeetFor{name}")(config).eval()
    _randomise(model, seed)
    features = tf.ParakeetFeatureExtractor(feature_size=encoder["num_mel_bins"])
    model.decoder.embedding.weight.data.mul_(5)
    model.decoder.decoder_projector.weight.data.mul_(4)
    head, processor = model.joint.head, tf.ParakeetProcessor(features, words, decoder_type=kind)
    head.weight.data.sub_(head.weight.data.mean(1, keepdim=True)).mul_(2)  # the joint network's outputs are all positive
    head.bias.data[blank] += 5
    if kind == "tdt":
        head.bias.data[len(words)] -= 3  # of duration 0: transformers has no limit of tokens per row
    _spread_rows(model, oracle_inputs(processor, make_media("audio", (48_000,), 0)))
    model.generation_config.decoder_start_token_id = blank
    return model, processor


@torch.inference_mode()
def _spread_rows(model: Any, inputs: dict[str, torch.Tensor]) -> None:
    """Scale the rows that the joint network reads to mean 0 and a deviation of 1.5 over time; random ones hardly differ."""
    rows, project = model.get_audio_features(**inputs).pooler_output[0], model.encoder_projector
    factor = 1.5 / rows.std(0).mean()
    project.bias.data.sub_(rows.mean(0)).mul_(factor)
    project.weight.data.mul_(factor)


def _randomise(model: Any, seed: int) -> None:
    randomise(model, seed)
    draw = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(torch.rand(buffer.shape, generator=draw) * 0.4 + (0.8 if "var" in name else -0.2))
    sharpen(model.encoder)


def save(folder: Path, model: Any, processor: Any) -> Path:
    model.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    processor.feature_extractor.save_pretrained(folder)
    return folder


def oracle_inputs(processor: Any, samples: Any) -> dict[str, torch.Tensor]:
    made = processor.feature_extractor(samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
    return {name: made[name] for name in ("input_features", "attention_mask")}


def prompt(samples: Any) -> dict[str, Any]:
    return {"prompt": "", "multi_modal_data": {"audio": (samples, RATE)}}
