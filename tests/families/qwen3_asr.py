"""Qwen3-ASR in the parity suite; chunks of 1 s, attention over 2."""

from family import AUDIO_SIZES, Family, run_oracle
from oracle import fast_tokenizer, randomise, sharpen, text_config

CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>", "<asr_text>"]
NAMED = {"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}


def build(seed, tie=False, mels=24, heads=4, **rope):
    import transformers as tf

    words = fast_tokenizer(CONTROLS, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=NAMED)
    audio = {"d_model": 64, "encoder_layers": 3, "encoder_attention_heads": heads, "encoder_ffn_dim": 96}
    audio |= {"num_mel_bins": mels, "downsample_hidden_size": 16, "n_window_infer": 200, "output_dim": 64}
    text = text_config(words, tie, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e4, **rope})
    config = tf.Qwen3ASRConfig(
        audio_config=tf.models.qwen3_asr.Qwen3ASREncoderConfig(**audio),
        text_config=tf.Qwen3Config(**text),
        audio_token_id=words.convert_tokens_to_ids("<|audio_pad|>"),
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        tie_word_embeddings=tie,
    )
    model = tf.Qwen3ASRForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.audio_tower)
    extractor = tf.Qwen3ASRFeatureExtractor(feature_size=mels)
    return model, tf.Qwen3ASRProcessor(feature_extractor=extractor, tokenizer=words)


def tensors(inputs, features):
    """Compare frames without padding; the oracle pads all audio of a prompt to one length."""
    for number, feature in enumerate(features):
        frames = feature.kwargs["input_features"].data
        yield "audio_frames", feature.kwargs["audio_frames"].data, inputs["input_features_mask"][number].sum()
        yield "input_features", frames, inputs["input_features"][number, :, : len(frames)].T


FAMILY = Family(
    "qwen3_asr",
    build,
    placeholders={"audio": "<|audio_start|><|audio_pad|><|audio_end|>"},
    sizes={"audio": [(30_000,), (9000,), (61_234,)]},
    grid={"audio": [*AUDIO_SIZES, (1,), (8000,), (16_159,), (16_160,), (160_000,), (1_000_000,)]},
    cases=["a"] * 4,  # the oracle's processor takes one audio per prompt
    tensors=tensors,
    run=lambda model, inputs, answer, positions: run_oracle(model, inputs, answer, None),  # its positions have one axis
    variants={
        "tied": {"tie": True},
        "more bands, wide heads": {"mels": 80, "heads": 2},
        "three axes": {"mrope_section": [2, 3, 3], "mrope_interleaved": True},
    },
    silent={f"model.audio_tower.layers.{i}.self_attn.k_proj.bias": "adds the same to all scores of a row" for i in range(3)},
    layouts={
        "published": [
            ("model.audio_tower.", "thinker.audio_tower."),
            ("model.multi_modal_projector.linear_1.", "thinker.audio_tower.proj1."),
            ("model.multi_modal_projector.linear_2.", "thinker.audio_tower.proj2."),
            ("model.language_model.", "thinker.model."),
            ("lm_head.", "thinker.lm_head."),
        ]
    },
)
