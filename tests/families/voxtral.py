"""Voxtral in the parity suite, with windows of 2 s. mistral-common writes the oracle's prompts."""

import base64
import io
import json

import torch
from family import AUDIO_SIZES, RATE, Family
from oracle import randomise, sharpen, small_tekken, text_config

SECONDS = 2
WINDOW = SECONDS * RATE


def tekken():
    bands = {"num_mel_bins": 24, "hop_length": 160, "window_size": 400}
    audio = {"sampling_rate": RATE, "frame_rate": 12.5, "audio_encoding_config": bands, "chunk_length_s": float(SECONDS)}
    return small_tekken() | {"audio": audio}


class Words:
    """The attributes of a tokenizer that `text_config` reads."""

    bos_token_id, eos_token_id, pad_token_id = 1, 2, 11

    def __len__(self):
        return 2000


def build(seed, heads=4, **text):
    import transformers as tf

    audio = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": heads}
    audio |= {"num_mel_bins": 24, "max_source_positions": 50 * SECONDS}
    special = [token["token_str"] for token in tekken()["special_tokens"]]
    config = tf.VoxtralConfig(
        audio_config=tf.VoxtralEncoderConfig(**audio),
        text_config=tf.LlamaConfig(**text_config(Words(), head_dim=24, **text)),
        audio_token_id=special.index("[AUDIO]"),
    )
    model = tf.VoxtralForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.audio_tower)
    return model, tf.WhisperFeatureExtractor(feature_size=24, chunk_length=SECONDS)


def finish(folder):
    (folder / "tekken.json").write_text(json.dumps(tekken()))


def prompt(placeholders, seed):
    return f"[INST]{''.join(placeholders)}def f{seed}(x):{' return it' * (seed % 3 + 1)}[/INST]"


def call(processor, text, data):
    """Do what the published processor does, with shorter windows, whose length it fixes."""
    import soundfile
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    parts = []
    for samples in data.get("audio", ()):
        file = io.BytesIO()
        soundfile.write(file, samples, RATE, format="wav", subtype="FLOAT")
        given = {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}
        parts.append({"type": "input_audio", "input_audio": given})
    parts.append({"type": "text", "text": text.split("]")[-2].removesuffix("[/INST")})
    asked = ChatCompletionRequest(messages=[{"role": "user", "content": parts}])
    made = processor.tokenizer.tokenizer.encode_chat_completion(asked)
    inputs = {"input_ids": torch.tensor([made.tokens])}
    if made.audios:
        arrays = [audio.audio_array for audio in made.audios]
        kwargs = {"sampling_rate": RATE, "padding": True, "truncation": False, "pad_to_multiple_of": WINDOW}
        features = processor._retrieve_input_features(arrays, WINDOW // 160, **kwargs, return_tensors="pt")
        inputs["input_features"] = features
    return inputs


def tensors(inputs, features):
    """Compare frames. Ours end at the first silent one; the oracle repeats it to the end of the window."""
    windows = iter(inputs.get("input_features", ()))
    for feature in features:
        lengths = feature.kwargs["audio_frames"].data.tolist()
        for frames in feature.kwargs["input_features"].data.split(lengths):
            theirs = next(windows).T
            yield "input_features", frames, theirs[: len(frames)]
            yield "silence", frames[-1:].expand(len(theirs) - len(frames), -1), theirs[len(frames) :]
    assert next(windows, None) is None


FAMILY = Family(
    "voxtral",
    build,
    placeholders={"audio": "[BEGIN_AUDIO][AUDIO]"},
    sizes={"audio": [(30_000,), (9000,), (70_234,)]},
    grid={"audio": [*AUDIO_SIZES, (31_900,), (32_000,), (32_001,), (64_000,)]},
    fullest={"audio": [(32_000,), (64_000,)]},  # windows without silence
    prompt=prompt,
    call=call,
    tensors=tensors,
    finish=finish,
    variants={"wide heads": {"heads": 2}, "one head of keys": {"num_key_value_heads": 1}},
)
