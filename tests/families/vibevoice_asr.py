"""VibeVoice-ASR in the parity suite, with rows of 40 samples. The oracle runs without noise."""

import torch
from family import AUDIO_SIZES, Family, run_oracle
from oracle import fast_tokenizer, randomise, text_config

CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"]
RATE, HOP, CHUNK = 24_000, 40, 520  # a chunk of the oracle has 13 rows
SIZES = [(n,) for n in (1, 39, 40, 41, 79, 80, 81, 519, 520, 521, 639, 640, 641, 1280, 1281)]


def build(seed, tie=False, act="gelu", loud=True, filters=8):
    import transformers as tf

    words = fast_tokenizer(CONTROLS, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    ids = dict(zip(CONTROLS, words.convert_tokens_to_ids(CONTROLS), strict=True))
    encoder = {"num_filters": filters, "downsampling_ratios": [2, 4, 5], "depths": [1, 2, 1, 2], "hidden_act": act}
    config = tf.VibeVoiceAsrConfig(
        acoustic_tokenizer_encoder_config=tf.VibeVoiceAcousticTokenizerEncoderConfig(**encoder, hidden_size=12),
        semantic_tokenizer_encoder_config=tf.VibeVoiceAcousticTokenizerEncoderConfig(**encoder, hidden_size=20),
        text_config=tf.Qwen2Config(**text_config(words, tie)),
        audio_token_id=ids["<|box_start|>"],
        audio_bos_token_id=ids["<|object_ref_start|>"],
        audio_eos_token_id=ids["<|object_ref_end|>"],
        acoustic_tokenizer_chunk_size=CHUNK,
        tie_word_embeddings=tie,
    )
    model = tf.VibeVoiceAsrForConditionalGeneration(config).eval()
    randomise(model, seed)
    for name, parameter in model.named_parameters():
        if "tokenizer_encoder" in name and name.endswith("gamma"):
            parameter.data.add_(0.6)
    extractor = tf.VibeVoiceAcousticTokenizerFeatureExtractor(pad_to_multiple_of=HOP, normalize_audio=loud)
    return model, tf.VibeVoiceAsrProcessor(extractor, words)


def call(processor, text, data):
    media = {"audio": list(data["audio"])} if data.get("audio") else {}
    options = {"audio_kwargs": {"sampling_rate": RATE, "pad_to_multiple_of": HOP}} if media else {}
    return dict(processor(text=[text], **media, **options, return_tensors="pt"))


def run(model, inputs, answer, positions):
    """Run without noise. The answer's tokens are text, so that the noise of an empty call does not matter."""
    forward = model.model.get_audio_features
    model.model.get_audio_features = lambda **given: forward(**{**given, "sample": False})
    try:
        return run_oracle(model, inputs, answer, positions)
    finally:
        del model.model.get_audio_features


def tensors(inputs, features):
    """Compare samples; the oracle's items are padded to the longest one."""
    for feature, theirs in zip(sorted(features, key=lambda one: one.range.offset), inputs["input_values"], strict=True):
        ours = feature.kwargs["input_values"].data
        yield "input_values", ours, theirs[0, : len(ours)]
        yield "silence", torch.zeros(len(theirs[0]) - len(ours)), theirs[0, len(ours) :]


FAMILY = Family(
    "vibevoice_asr",
    build,
    placeholders={"audio": "<|object_ref_start|><|box_start|><|object_ref_end|>\nThis is a <|AUDIO_DURATION|> seconds audio"},
    sizes={"audio": [(3000,), (900,), (5234,)]},
    grid={"audio": [*AUDIO_SIZES, *SIZES]},
    ours=lambda modality, media: (media, RATE),
    call=call,
    run=run,
    tensors=tensors,
    fullest={"audio": [(1280,)]},
    fullest_items=1,
    variants={"tied": {"tie": True}, "as loud as it is": {"loud": False}, "another activation": {"act": "silu"}},
)
