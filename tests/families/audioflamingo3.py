"""Audio Flamingo 3 and Music Flamingo in the parity suite; windows of 2 s."""

from family import AUDIO_SIZES, Family
from oracle import fast_tokenizer, randomise, sharpen, text_config

CONTROLS = ["<|endoftext|>", "<sound>", "<|sound_bos|>", "<|sound_eos|>", "<|im_start|>", "<|im_end|>"]
SECONDS = 2


def build(seed, mels=24, heads=4, kind="AudioFlamingo3", **rope):
    import transformers as tf

    words = fast_tokenizer(CONTROLS, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    audio = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": heads}
    audio |= {"num_mel_bins": mels, "max_source_positions": 50 * SECONDS, "model_type": "audioflamingo3_encoder"}
    ids = {"audio_token_id": words.convert_tokens_to_ids("<sound>")}
    if kind == "MusicFlamingo":
        ids |= {f"audio_{name}_token_id": words.convert_tokens_to_ids(f"<|sound_{name}|>") for name in ("bos", "eos")}
        ids["rope_parameters"] = {"rope_type": "default", "rope_theta": 1200.0, "partial_rotary_factor": 0.25, **rope}
    text = {"model_type": "qwen2", **text_config(words, False)}
    config = getattr(tf, f"{kind}Config")(audio_config=audio, text_config=text, **ids)
    model = getattr(tf, f"{kind}ForConditionalGeneration")(config).eval()
    randomise(model, seed)
    sharpen(model.model.audio_tower)
    extractor = tf.WhisperFeatureExtractor(feature_size=mels, chunk_length=SECONDS)
    return model, getattr(tf, f"{kind}Processor")(feature_extractor=extractor, tokenizer=words)


def music(seed, **variant):
    return build(seed, kind="MusicFlamingo", **variant)


def tensors(inputs, features):
    """Compare the frames that hold audio; only the oracle pads the windows."""
    (feature,) = features
    data = {name: elem.data for name, elem in feature.kwargs.items()}
    parts = data["input_features"].split(data["audio_inputs"].tolist())
    for part, theirs in zip(parts, inputs["input_features"], strict=True):
        yield "input_features", part, theirs[:, : len(part)].T
    yield "audio_frames", data["audio_frames"], inputs["input_features_mask"].sum(-1)


COMMON = {
    "sizes": {"audio": [(30_000,), (9000,), (81_234,)]},
    "grid": {"audio": [*AUDIO_SIZES, (480,), (481,), (64_000,), (64_100,), (65_000,)]},
    "refuses": lambda modality, size: size[0] <= 320,  # too short for one row
    "cases": ["a"] * 4,  # the oracle's processor takes one audio per prompt
    "tensors": tensors,
}
FAMILIES = [
    Family(
        "audioflamingo3",
        build,
        placeholders={"audio": "<sound>"},
        variants={"more bands, wide heads": {"mels": 80, "heads": 2}},
        **COMMON,
    ),
    Family("musicflamingo", music, placeholders={"audio": "<sound>"}, **COMMON),
]
