"""Cohere's transcription models and Canary in the parity suite. An item has no tokens in the prompt."""

import torch
from family import AUDIO_SIZES, Family
from oracle import fast_tokenizer, randomise, sharpen

CONTROLS = ["<unk>", "<pad>", "<|endoftext|>", "<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>", "<|en|>"]
CONTROLS += ["<|de|>", "<|pnc|>", "<|noitn|>", "<|notimestamp|>", "<|nodiarize|>"]
ENCODER = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80, "num_mel_bins": 16}
ENCODER |= {"subsampling_conv_channels": 12, "scale_input": False, "model_type": "parakeet_encoder", "conv_kernel_size": 5}


def tokens():
    words = fast_tokenizer(CONTROLS, bos_token="<|startoftranscript|>", eos_token="<|endoftext|>", pad_token="<pad>")
    number = words.convert_tokens_to_ids
    ids = {"bos_token_id": number("<|startoftranscript|>"), "eos_token_id": number("<|endoftext|>")}
    return words, ids | {"pad_token_id": number("<pad>"), "vocab_size": len(words)}


def finish(model, seed):
    randomise(model, seed)
    draw = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(torch.rand(buffer.shape, generator=draw) * 0.4 + (0.8 if "var" in name else -0.2))
    sharpen(model.model.encoder)
    for layer in model.model.decoder.layers:
        sharpen(layer)
        layer.encoder_attn.o_proj.weight.data.mul_(3)  # the audio outweighs the preceding text
    if not model.config.tie_word_embeddings:
        model.proj_out.weight.data.mul_(1.5)
    return model


def build(seed, encoder=None, **changes):
    import transformers as tf

    words, ids = tokens()
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    start = {"decoder_start_token_id": words.convert_tokens_to_ids("<|startofcontext|>")}
    config = tf.CohereAsrConfig(**(shape | ids | start | changes), encoder_config=ENCODER | (encoder or {}))
    model = finish(tf.CohereAsrForConditionalGeneration(config).eval(), seed)
    extractor = tf.CohereAsrFeatureExtractor(feature_size=config.encoder_config.num_mel_bins, max_audio_clip_s=2.0)
    return model, tf.CohereAsrProcessor(feature_extractor=extractor, tokenizer=words)


def build_canary(seed, tie=True, **changes):
    import transformers as tf

    words, ids = tokens()
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 12}
    start = {"decoder_start_token_id": words.convert_tokens_to_ids("<|startofcontext|>")}
    decoder = shape | ids | {"num_key_value_heads": 4} | changes
    config = tf.CanaryConfig(**ids, **start, decoder_config=decoder, encoder_config=ENCODER, tie_word_embeddings=tie)
    model = finish(tf.CanaryForConditionalGeneration(config).eval(), seed)
    extractor = tf.ParakeetFeatureExtractor(feature_size=ENCODER["num_mel_bins"], max_audio_clip_s=2.0)
    return model, tf.CanaryProcessor(feature_extractor=extractor, tokenizer=words)


def prompt(placeholders, seed):
    return f"<|startofcontext|><|startoftranscript|> def f{seed}(x): return" + " + x" * (seed % 5)


def call(processor, text, data):
    (samples,) = data["audio"]
    made = processor.feature_extractor(samples, sampling_rate=16_000, return_tensors="pt", return_attention_mask=True)
    ids = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return dict(made) | {"input_ids": ids}


def run(model, inputs, answer, positions):
    ids = torch.cat([inputs["input_ids"], torch.tensor([answer[:-1]], dtype=torch.long)], 1)
    given = {name: inputs[name] for name in ("input_features", "attention_mask")}
    with torch.inference_mode():
        return model(**given, decoder_input_ids=ids).logits[0].float()


def tensors(inputs, features):
    (feature,) = features
    ours = feature.kwargs["input_features"].data
    assert int(inputs["attention_mask"].sum()) == len(ours)
    yield "input_features", ours, inputs["input_features"][0, : len(ours)]


KEYS = [f"model.encoder.layers.{i}.self_attn.k_proj.bias" for i in range(2)]
KEYS += [f"model.decoder.layers.{i}.{part}.k_proj.bias" for i in range(3) for part in ("self_attn", "encoder_attn")]
COMMON = {
    "placeholders": {"audio": ""},
    "sizes": {"audio": [(12_000,), (30_000,), (5001,)]},
    "grid": {"audio": [*AUDIO_SIZES, (1,), (319,), (320,), (1279,), (1280,), (32_000,), (32_001,)]},
    "fullest": {"audio": [(32_000,)]},
    "refuses": lambda modality, size: not 320 <= size[0] <= 32_000,
    "silent": dict.fromkeys(KEYS, "adds the same to all scores of a row"),
    "cases": ["a"] * 4,
    "prompt": prompt,
    "call": call,
    "run": run,
    "tensors": tensors,
    # bands of these tones are divided by deviations down to 0.07, and reach 12: transformers' float32 is 9e-6 from float64
    "tensor_tolerance": 2e-5,
}
FAMILIES = [
    Family(
        "cohere_asr",
        build,
        variants={
            "scaled, other strides": {"encoder": {"scale_input": True, "subsampling_factor": 4, "conv_kernel_size": 9}},
            "no biases": {"encoder": {"attention_bias": False, "convolution_bias": False}},
            "grouped keys": {"num_key_value_heads": 2},
            "decoder without biases": {"attention_bias": False, "num_key_value_heads": 1},
        },
        **COMMON,
    ),
    Family(
        "canary",
        build_canary,
        variants={"untied": {"tie": False}, "grouped keys": {"num_key_value_heads": 2, "attention_bias": False}},
        **COMMON,
    ),
]
