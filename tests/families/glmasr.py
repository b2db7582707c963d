"""GLM-ASR in the parity suite; windows of 2 s."""

from family import AUDIO_SIZES, Family
from oracle import fast_tokenizer, randomise, sharpen, text_config

CONTROLS = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|begin_of_audio|>", "<|pad|>", "<|end_of_audio|>"]
SECONDS = 2


def build(seed, tie=False, mels=24, heads=4, **rope):
    import transformers as tf

    words = fast_tokenizer(CONTROLS, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    audio = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": heads}
    audio |= {"num_mel_bins": mels, "max_position_embeddings": 50 * SECONDS}
    audio["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, **rope}
    config = tf.GlmAsrConfig(
        audio_config=tf.GlmAsrEncoderConfig(**audio),
        text_config=tf.LlamaConfig(**text_config(words, tie)),
        audio_token_id=words.convert_tokens_to_ids("<|pad|>"),
        tie_word_embeddings=tie,
    )
    model = tf.GlmAsrForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.audio_tower)
    extractor = tf.WhisperFeatureExtractor(feature_size=mels, chunk_length=SECONDS)
    return model, tf.GlmAsrProcessor(feature_extractor=extractor, tokenizer=words)


def tensors(inputs, features):
    """Compare frames. Ours end at the first silent one; the oracle repeats it to the end of the window."""
    (feature,) = features
    lengths = feature.kwargs["audio_frames"].data.tolist()
    for window, frames in enumerate(feature.kwargs["input_features"].data.split(lengths)):
        theirs = inputs["input_features"][window].T
        yield "input_features", frames, theirs[: len(frames)]
        yield "silence", frames[-1:].expand(len(theirs) - len(frames), -1), theirs[len(frames) :]
    yield "windows", feature.kwargs["audio_windows"].data, inputs["input_features"].new_tensor(len(inputs["input_features"]))


FAMILY = Family(
    "glmasr",
    build,
    placeholders={"audio": "<|begin_of_audio|><|pad|><|end_of_audio|>"},
    sizes={"audio": [(30_000,), (9000,), (81_234,)]},
    grid={"audio": [*AUDIO_SIZES, (960,), (961,), (64_000,), (65_000,)]},
    refuses=lambda modality, size: size[0] <= 960,  # too short for one row
    cases=["a"] * 4,  # the oracle's processor takes one audio per prompt
    tensors=tensors,
    layouts={"transformers 5.19": [("language_model.model.", "language_model.model.model.")]},
    variants={
        "tied": {"tie": True},
        "more bands, wide heads": {"mels": 80, "heads": 2},
        "full rotary": {"partial_rotary_factor": 1.0},
    },
)
