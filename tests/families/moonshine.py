"""Moonshine and Moonshine Streaming in the parity suite, with a limit of 1 s. An item has no tokens in the prompt."""

import torch
from family import AUDIO_SIZES, Family
from oracle import fast_tokenizer, randomise, sharpen


def tokens():
    words = fast_tokenizer(["<unk>", "<s>", "</s>"], bos_token="<s>", eos_token="</s>", pad_token="</s>")
    number = words.convert_tokens_to_ids
    ids = {"bos_token_id": number("<s>"), "decoder_start_token_id": number("<s>")}
    return words, ids | {"eos_token_id": number("</s>"), "pad_token_id": number("</s>"), "vocab_size": len(words)}


def finish(model, seed, words, normalize):
    import transformers as tf

    randomise(model, seed)
    for layer in model.model.decoder.layers:
        sharpen(layer.encoder_attn)
        layer.encoder_attn.o_proj.weight.data.mul_(3)  # the audio outweighs the preceding text
    extractor = tf.Wav2Vec2FeatureExtractor(do_normalize=normalize, return_attention_mask=True, chunk_length=1)
    return model, tf.Wav2Vec2Processor(feature_extractor=extractor, tokenizer=words)


def build(seed, normalize=False, **changes):
    import transformers as tf

    words, ids = tokens()
    shape = {"hidden_size": 64, "intermediate_size": 96, "encoder_num_hidden_layers": 3, "decoder_num_hidden_layers": 3}
    shape |= {"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4, "max_position_embeddings": 1024}
    model = tf.MoonshineForConditionalGeneration(tf.MoonshineConfig(**(shape | ids | changes))).eval()
    return finish(model, seed, words, normalize)


def build_streaming(seed, width=96, **changes):
    import transformers as tf

    words, ids = tokens()
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    shape |= {"max_position_embeddings": 1024, "num_key_value_heads": 4}
    near = {"sliding_windows": ((16, 4), (5, 0), (3, 2)), "num_key_value_heads": 4, "head_dim": 20}
    encoder = tf.MoonshineStreamingEncoderConfig(**{**shape, **near, "hidden_size": width})
    config = tf.MoonshineStreamingConfig(**(shape | ids | changes), encoder_config=encoder)
    model, processor = finish(tf.MoonshineStreamingForConditionalGeneration(config).eval(), seed, words, False)
    model.model.encoder.embedder.comp.log_k.data.add_(1.5)  # a compression that is not nearly linear
    if not config.tie_word_embeddings:
        model.proj_out.weight.data.mul_(2)
    return model, processor


def prompt(placeholders, seed):
    return f"<s> def f{seed}(x): return" + " + x" * (seed % 5)


def call(processor, text, data):
    (samples,) = data["audio"]
    made = processor.feature_extractor(
        samples, sampling_rate=16_000, return_tensors="pt", padding=True, pad_to_multiple_of=80, return_attention_mask=True
    )
    return dict(made) | {"input_ids": processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]}


def call_unpadded(processor, text, data):
    (samples,) = data["audio"]
    made = processor.feature_extractor(samples, sampling_rate=16_000, return_tensors="pt", return_attention_mask=False)
    return dict(made) | {"input_ids": processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]}


def run(model, inputs, answer, positions):
    ids = torch.cat([inputs["input_ids"], torch.tensor([answer[:-1]], dtype=torch.long)], 1)
    mask = {"attention_mask": inputs["attention_mask"]} if "attention_mask" in inputs else {}
    with torch.inference_mode():
        return model(input_values=inputs["input_values"], decoder_input_ids=ids, **mask).logits[0].float()


def tensors(inputs, features):
    (feature,) = features
    yield "input_values", feature.kwargs["input_values"].data, inputs["input_values"][0]


COMMON = {
    "placeholders": {"audio": ""},
    "sizes": {"audio": [(12_000,), (16_000,), (5001,)]},
    "cases": ["a"] * 4,
    "prompt": prompt,
    "run": run,
    "tensors": tensors,
}
GRID = [*AUDIO_SIZES, (1,), (79,), (80,), (321,), (894,), (895,), (1278,), (1279,)]
FAMILIES = [
    Family(
        "moonshine",
        build,
        grid={"audio": GRID},
        refuses=lambda modality, size: not 895 <= size[0] <= 16_000,
        call=call_unpadded,
        variants={"normalised": {"normalize": True}, "wide": {"hidden_size": 144, "encoder_num_hidden_layers": 2}},
        **COMMON,
    ),
    Family(
        "moonshine_streaming",
        build_streaming,
        grid={"audio": GRID},
        refuses=lambda modality, size: not 80 <= size[0] <= 16_000,
        call=call,
        variants={"one width": {"width": 64}, "tied": {"tie_word_embeddings": True}},
        **COMMON,
    ),
]
