"""Voxtral-Realtime in the parity suite. mistral-common writes the oracle's prompts and pads the audio."""

import base64
import io
import json

import torch
from family import RATE, Family
from oracle import randomise, sharpen, small_tekken, text_config

DELAY = 2  # rows


def tekken():
    bands = {"num_mel_bins": 24, "hop_length": 160, "window_size": 400}
    audio = {"sampling_rate": RATE, "frame_rate": 12.5, "audio_encoding_config": bands, "transcription_format": "streaming"}
    look = {"streaming_look_ahead_ms": 2.5, "streaming_look_back_ms": 52.5, "streaming_n_left_pad_tokens": 32}
    return small_tekken("v13") | {"audio": audio | look | {"transcription_delay_ms": 80 * DELAY}}


class Words:
    """The attributes of a tokenizer that `text_config` reads."""

    bos_token_id, eos_token_id, pad_token_id = 1, 2, 11

    def __len__(self):
        return 2000


def build(seed, tie=True, window=4096, **text):
    import transformers as tf

    audio = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 24}
    audio |= {"num_mel_bins": 24, "sliding_window": 40, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    config = tf.VoxtralRealtimeConfig(
        audio_config=audio,
        text_config=text_config(Words(), head_dim=24, sliding_window=window, tie_word_embeddings=tie, **text),
        default_num_delay_tokens=DELAY,
        tie_word_embeddings=tie,
    )
    model = tf.VoxtralRealtimeForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.audio_tower)
    return model, tf.VoxtralRealtimeFeatureExtractor(feature_size=24)


def finish(folder):
    (folder / "tekken.json").write_text(json.dumps(tekken()))


def call(processor, text, data):
    """Do what the published processor does, without rounding samples to 16 bits."""
    import soundfile
    from mistral_common.protocol.transcription.request import StreamingMode, TranscriptionRequest

    file = io.BytesIO()
    soundfile.write(file, data["audio"][0], RATE, format="wav", subtype="FLOAT")
    encoded = base64.b64encode(file.getvalue()).decode()
    asked = TranscriptionRequest(audio=encoded, streaming=StreamingMode.OFFLINE, language=None)
    made = processor.tokenizer.tokenizer.encode_transcription(asked)
    features = processor.feature_extractor([made.audios[0].audio_array], sampling_rate=RATE, center=True)
    return {"input_ids": torch.tensor([made.tokens]), "input_features": features["input_features"]}


def run(model, inputs, answer, positions):
    ids = torch.cat((inputs["input_ids"], torch.tensor([answer[:-1]], dtype=torch.long)), 1)
    with torch.inference_mode():
        frames = model.model.audio_tower.embedder(inputs["input_features"])[:, : 4 * ids.shape[1]]
        return model(input_ids=ids, encoder_inputs_embeds=frames, num_delay_tokens=DELAY).logits[0].float()


def tensors(inputs, features):
    (feature,) = features
    yield "input_features", feature.kwargs["input_features"].data, inputs["input_features"][0].T


FAMILY = Family(
    "voxtral_realtime",
    build,
    placeholders={"audio": "[STREAMING_PAD]"},
    sizes={"audio": [(30_000,), (9000,), (41_234,)]},
    cases=["a"] * 4,  # a prompt has one audio item
    prompt=lambda placeholders, seed: "".join(placeholders),
    call=call,
    run=run,
    tensors=tensors,
    finish=finish,
    variants={"narrow window": {"window": 24}, "one head of keys": {"num_key_value_heads": 1}},
)
