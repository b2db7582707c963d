"""Whisper in the parity suite: multilingual, with a window of 1 s. An item has no tokens in the prompt."""

import torch
from family import AUDIO_SIZES, Family
from oracle import fast_tokenizer, randomise, sharpen

LANGUAGES = ("en", "de", "yue", "fr", "ja", "cy", "sw", "ht", "la", "ko")
CONTROLS = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES)]
CONTROLS += ["<|translate|>", "<|transcribe|>", "<|startofprev|>", "<|notimestamps|>"]


def build(seed, mels=24, seconds=1, **changes):
    import transformers as tf

    times = [f"<|{step * 0.02:.2f}|>" for step in range(50 * seconds + 1)]
    words = fast_tokenizer([*CONTROLS, *times], eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    number = words.convert_tokens_to_ids
    shape = {"d_model": 64, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 96, "decoder_ffn_dim": 128}
    shape |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": mels}
    ends = {"eos_token_id": number("<|endoftext|>"), "pad_token_id": number("<|endoftext|>")}
    ends |= {"bos_token_id": number("<|endoftext|>"), "decoder_start_token_id": number("<|startoftranscript|>")}
    sizes = {"vocab_size": len(words), "max_source_positions": 50 * seconds, "max_target_positions": 1024}
    config = tf.WhisperConfig(**(sizes | shape | ends | changes))
    model = tf.WhisperForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model)
    for layer in model.model.decoder.layers:
        layer.encoder_attn.out_proj.weight.data.mul_(4)  # the audio outweighs the preceding text
    given = {
        "_from_model_config": False,  # otherwise transformers drops unknown keys when loading
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": number(f"<|{code}|>") for code in LANGUAGES},
        "task_to_id": {task: number(f"<|{task}|>") for task in ("translate", "transcribe")},
        "no_timestamps_token_id": number("<|notimestamps|>"),
        "max_initial_timestamp_index": 10,
        "suppress_tokens": [7, 8, 9, *map(number, CONTROLS[1:])],
        "begin_suppress_tokens": [5, number("<|endoftext|>")],
    }
    for name, value in given.items():
        setattr(model.generation_config, name, value)
    extractor = tf.WhisperFeatureExtractor(feature_size=mels, chunk_length=seconds)
    return model, tf.WhisperProcessor(feature_extractor=extractor, tokenizer=words)


def prompt(placeholders, seed):
    return f"<|startoftranscript|><|de|><|transcribe|><|notimestamps|> def f{seed}(x): return" + " + x" * (seed % 5)


def call(processor, text, data):
    (samples,) = data["audio"]
    made = processor.feature_extractor(samples, sampling_rate=16_000, return_tensors="pt")
    ids = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return {"input_features": made["input_features"], "input_ids": ids}


def run(model, inputs, answer, positions):
    ids = torch.cat([inputs["input_ids"], torch.tensor([answer[:-1]], dtype=torch.long)], 1)
    with torch.inference_mode():
        return model(input_features=inputs["input_features"], decoder_input_ids=ids).logits[0].float()


def tensors(inputs, features):
    (feature,) = features
    yield "input_features", feature.kwargs["input_features"].data, inputs["input_features"][0].T


FAMILY = Family(
    "whisper",
    build,
    placeholders={"audio": ""},
    sizes={"audio": [(12_000,), (16_000,), (5001,)]},
    grid={"audio": [*AUDIO_SIZES, (1,), (16_000,), (16_001,)]},
    refuses=lambda modality, size: size[0] > 16_000,
    cases=["a"] * 4,
    prompt=prompt,
    call=call,
    run=run,
    tensors=tensors,
    variants={"more bands": {"mels": 80}, "wide heads": {"d_model": 128, "encoder_layers": 2, "decoder_attention_heads": 2}},
)
