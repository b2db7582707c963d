"""Qwen2-Audio in the parity suite."""

from family import AUDIO_SIZES, Family
from oracle import build_model, build_processor


def build(seed, **variant):
    return build_model("qwen2_audio", seed, **variant), build_processor("qwen2_audio", **variant)


def refuses(modality, size):
    return size[0] < 321 or size[0] > 64_000


def tensors(inputs, features):
    """Compare the frames that hold audio; only the oracle pads the window."""
    for number, feature in enumerate(features):
        frames = feature.kwargs["input_features"].data
        yield "input_features", frames, inputs["input_features"][number, :, : len(frames)].T
        yield "audio_frames", feature.kwargs["audio_frames"].data, inputs["feature_attention_mask"][number].sum()


FAMILY = Family(
    "qwen2_audio",
    build,
    placeholders={"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"},
    sizes={"audio": [(30_000,), (12_345,), (5001,)]},
    grid={"audio": [*AUDIO_SIZES, (200,), (64_000,), (64_001,)]},
    refuses=refuses,
    tensors=tensors,
    layouts={"transformers 5.19": [("language_model.model.", "language_model.model.model.")]},
    variants={
        "wide": {"hidden": 128, "heads": 2, "kv_heads": 1, "audio_hidden": 128, "audio_heads": 2, "mels": 80, "seconds": 2}
    },
)
