"""MOSS-Transcribe-Diarize in the parity suite; windows of 2 s."""

import json

from family import AUDIO_SIZES, Family
from oracle import fast_tokenizer, randomise, sharpen, text_config

CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"]
SECONDS = 2


def build(seed, tie=True, mels=24, heads=4, merge=4):
    import transformers as tf

    words = fast_tokenizer(CONTROLS, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    audio = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": heads}
    audio |= {"num_mel_bins": mels, "max_source_positions": 50 * SECONDS}
    config = tf.MossTranscribeDiarizeConfig(
        audio_config=audio,
        text_config={"model_type": "qwen3", **text_config(words, tie, head_dim=16)},
        audio_token_id=words.convert_tokens_to_ids("<|audio_pad|>"),
        audio_merge_size=merge,
        audio_chunk_size=SECONDS * 16_000,
        tie_word_embeddings=tie,
    )
    model = tf.MossTranscribeDiarizeForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.audio_tower)
    extractor = tf.MossTranscribeDiarizeFeatureExtractor(feature_size=mels, chunk_length=SECONDS)
    return model, tf.MossTranscribeDiarizeProcessor(extractor, words, audio_merge_size=merge)


def finish(folder):
    """Write the settings of the text between rows, which stand in processor_config.json only."""
    merge = json.loads((folder / "config.json").read_text())["audio_merge_size"]
    settings = {"audio_merge_size": merge, "audio_tokens_per_second": 50 / merge, "time_marker_every_seconds": merge // 2}
    (folder / "processor_config.json").write_text(json.dumps(settings))


def tensors(inputs, features):
    """Compare frames. Ours end at the first silent one; the oracle repeats it to the end of the window."""
    windows = iter(inputs.get("input_features", ()))
    for feature in features:
        for frames in feature.kwargs["input_features"].data.split(feature.kwargs["audio_frames"].data.tolist()):
            theirs = next(windows).T
            yield "input_features", frames, theirs[: len(frames)]
            yield "silence", frames[-1:].expand(len(theirs) - len(frames), -1), theirs[len(frames) :]
    assert next(windows, None) is None


FAMILY = Family(
    "moss_transcribe",
    build,
    placeholders={"audio": "<|audio_start|><|audio_pad|><|audio_end|>"},
    sizes={"audio": [(30_000,), (9000,), (181_234,)]},
    grid={"audio": [*AUDIO_SIZES, (2,), (32_000,), (32_001,), (64_000,), (65_000,), (352_000,)]},
    fullest={"audio": [(32_000,), (64_000,)]},  # windows without silence
    cases=["a"] * 4,
    tensors=tensors,
    finish=finish,
    variants={
        "a head": {"tie": False},
        "more bands, wide heads": {"mels": 80, "heads": 2},
        "two rows joined, a number every second": {"merge": 2},
    },
    layouts={
        "the publisher's": [
            ("model.audio_tower.", "model.whisper_encoder."),
            ("model.multi_modal_projector.linear_1.", "model.vq_adaptor.layers.0."),
            ("model.multi_modal_projector.linear_2.", "model.vq_adaptor.layers.2."),
            ("model.multi_modal_projector.norm.", "model.vq_adaptor.layers.3."),
        ]
    },
)
