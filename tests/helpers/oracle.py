"""The oracle of the tests: transformers on small random checkpoints, saved in the Hub's layout."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
AUDIO_SPECIALS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}<|im_end|>\n{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' or 'image' in c or 'image_url' in c %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' or 'video' in c %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_KEEP: list[Any] = []  # torch unregisters a Library when its Python object is freed


def ensure_torchvision() -> None:
    """Declare the two operators that a torchvision wheel for another torch lacks, so that it imports. Idempotent."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision
    except (RuntimeError, OSError):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        _KEEP.append(library)
        for op in ("nms", "qnms"):
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401


@functools.cache
def _words() -> Tokenizer:
    """Train a byte-level BPE of 626 tokens on three files of the standard library."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    text = [Path(os.__file__).with_name(name).read_text("utf-8") for name in ("os.py", "glob.py", "shutil.py")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator(text, trainers.BpeTrainer(vocab_size=626, initial_alphabet=alphabet, show_progress=False))
    return tok


def small_tokenizer(specials: Sequence[str]) -> Tokenizer:
    """Return the small BPE with these special tokens, from id 626 on."""
    tok = Tokenizer.from_str(_words().to_str())
    tok.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    return tok


def fast_tokenizer(specials: Sequence[str], **named: Any) -> Any:
    """Wrap `small_tokenizer` for transformers; `named`: eos_token, pad_token, chat_template and so on."""
    import transformers as tf

    others = [name for name in specials if name not in named.values()]
    return tf.PreTrainedTokenizerFast(tokenizer_object=small_tokenizer(specials), additional_special_tokens=others, **named)


def text_config(words: Any, tie: bool = False, **changes: Any) -> dict[str, Any]:
    """Return arguments of a small text config for a `fast_tokenizer`: 3 layers, hidden size 64, 4 heads, 2 KV heads."""
    return {
        "vocab_size": len(words),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tie,
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
    } | changes


@functools.cache
def small_tekken(version: str = "v7") -> dict[str, Any]:
    """Return mistral-common's tekken.json cut to 2000 tokens, half of them special, including those of later versions."""
    import mistral_common
    from mistral_common.tokens.tokenizers.base import SpecialTokens
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    source = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    tekken = json.loads(source.read_text("utf-8"))
    named = [str(token["token_str"]) for token in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
    named += [token.value for token in SpecialTokens if token.value not in named]
    sizes = {"num_vocab_tokens": 1000, "default_vocab_size": 2000, "version": version}
    return tekken | {
        "special_tokens": [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(named)],
        "vocab": tekken["vocab"][:1000],
        "config": tekken["config"] | sizes,
    }


@functools.cache
def tokenizer() -> Tokenizer:
    """Return the small BPE with Qwen's special tokens."""
    return small_tokenizer(SPECIALS)


@functools.cache
def audio_tokenizer() -> Tokenizer:
    """Return the small BPE with Qwen2-Audio's tokens appended."""
    tok = Tokenizer.from_str(tokenizer().to_str())
    tok.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in AUDIO_SPECIALS])
    return tok


def token_ids() -> dict[str, int]:
    """Return special token -> id."""
    return {name: int(tokenizer().token_to_id(name)) for name in SPECIALS}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Randomise so that every tensor matters: norms 1 +- 0.2, biases +- 0.2, matrices of gain 1, head of gain 2."""
    gen = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.ndim > 1:
            gain = 2.0 if any(part in name for part in ("lm_head", "embed_tokens", "word_embeddings")) else 1.0
            inputs = p.shape[-1] if "experts" in name else p[0].numel()  # one tensor holds all experts
            value = torch.randn(p.shape, generator=gen) * gain / inputs**0.5
        else:
            value = torch.rand(p.shape, generator=gen) * 0.4 - 0.2 + (1.0 if _is_norm(name) else 0.0)
        p.data.copy_(value)


def sharpen(tower: torch.nn.Module) -> None:
    """Scale attention scores up, because attention with small scores over hundreds of rows is a plain mean."""
    for name, p in tower.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            p.data.mul_(3)


def _is_norm(name: str) -> bool:
    return name.endswith("weight") and any(part in name for part in ("norm", "ln_q", "ln_f", "ln_attn", "ln_mlp"))


def _text_config(v: dict[str, Any]) -> dict[str, Any]:
    half = v["hidden"] // v["heads"] // 2
    section = v["mrope_section"] or [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]
    ids = token_ids()
    return {
        "vocab_size": tokenizer().get_vocab_size(),
        "hidden_size": v["hidden"],
        "intermediate_size": v["intermediate"],
        "num_hidden_layers": v["layers"],
        "num_attention_heads": v["heads"],
        "num_key_value_heads": v["kv_heads"],
        "max_position_embeddings": v["max_positions"],
        "rope_parameters": {"rope_type": "default", "type": "mrope", "mrope_section": section, "rope_theta": 10000.0},
        "tie_word_embeddings": v["tie"],
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
    }


def _vision_config(family: str, v: dict[str, Any]) -> dict[str, Any]:
    shared = {"depth": v["vision_depth"], "num_heads": v["vision_heads"], "patch_size": v["patch"]}
    shared |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
    if family == "qwen2_vl":
        return shared | {"embed_dim": v["vision_hidden"], "hidden_size": v["hidden"], "mlp_ratio": 2}
    return shared | {
        "hidden_size": v["vision_hidden"],
        "intermediate_size": v["vision_intermediate"],
        "out_hidden_size": v["hidden"],
        "window_size": v["window"],
        "fullatt_block_indexes": list(v["full_attention"]),
        "tokens_per_second": v["tokens_per_second"],
    }


VARIANT: dict[str, Any] = {
    "hidden": 64, "intermediate": 128, "layers": 3, "heads": 4, "kv_heads": 2, "mrope_section": None, "tie": False,
    "max_positions": 4096, "vision_hidden": 64, "vision_intermediate": 96, "vision_depth": 4, "vision_heads": 4,
    "patch": 14, "window": 56, "full_attention": (1, 3), "tokens_per_second": 2, "min_pixels": 56 * 56,
    "max_pixels": 112 * 112, "dtype": torch.float32, "shard_size": "5GB", "eos": None,
    "audio_hidden": 64, "audio_intermediate": 96, "audio_layers": 3, "audio_heads": 4, "mels": 24, "seconds": 4,
}  # fmt: skip
"""Options of `build_checkpoint` and their defaults."""


def _build_audio_model(v: dict[str, Any]) -> Any:
    import transformers as tf

    text = _text_config(v) | {"vocab_size": audio_tokenizer().get_vocab_size()}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    audio = {
        "d_model": v["audio_hidden"],
        "encoder_ffn_dim": v["audio_intermediate"],
        "encoder_layers": v["audio_layers"],
        "encoder_attention_heads": v["audio_heads"],
        "num_mel_bins": v["mels"],
        "max_source_positions": 50 * v["seconds"],
    }
    config = tf.Qwen2AudioConfig(
        audio_config=tf.Qwen2AudioEncoderConfig(**audio),
        text_config=tf.Qwen2Config(**text),
        audio_token_index=audio_tokenizer().token_to_id("<|AUDIO|>"),
        tie_word_embeddings=v["tie"],
    )
    return tf.Qwen2AudioForConditionalGeneration(config).eval()


def build_model(family: str = "qwen2_5_vl", seed: int = 0, **variant: Any) -> Any:
    """Make a small random transformers model in eval mode with eager attention; `variant`: see VARIANT."""
    ensure_torchvision()
    import transformers as tf

    v = VARIANT | variant
    assert v.keys() == VARIANT.keys(), f"unknown variant: {v.keys() - VARIANT.keys()}"
    ids = token_ids()
    if family == "qwen2_audio":
        model = _build_audio_model(v)
    else:
        stem = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}[family]
        config = getattr(tf, stem + "Config")(
            text_config=_text_config(v),
            vision_config=_vision_config(family, v),
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
            tie_word_embeddings=v["tie"],
        )
        model = getattr(tf, stem + "ForConditionalGeneration")(config).eval()
    randomise(model, seed)
    if family == "qwen2_audio":
        sharpen(model.model.audio_tower)
    model.generation_config.eos_token_id = v["eos"] or [ids["<|im_end|>"], ids["<|endoftext|>"]]
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    return model.to(v["dtype"])


def _build_audio_processor(v: dict[str, Any]) -> Any:
    import transformers as tf

    fast = tf.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(audio_tokenizer().to_str()),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[*SPECIALS[1:], *AUDIO_SPECIALS],
    )
    return tf.Qwen2AudioProcessor(
        feature_extractor=tf.WhisperFeatureExtractor(feature_size=v["mels"], chunk_length=v["seconds"]), tokenizer=fast
    )


def build_processor(family: str = "qwen2_5_vl", **variant: Any) -> Any:
    """Return the published processor (torchvision backend) with the small tokenizer."""
    ensure_torchvision()
    import transformers as tf

    v = VARIANT | variant
    if family == "qwen2_audio":
        return _build_audio_processor(v)
    fast = tf.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer().to_str()),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIALS[1:]),
        chat_template=CHAT_TEMPLATE,
    )
    size = {"shortest_edge": v["min_pixels"], "longest_edge": v["max_pixels"]}
    parts = {"size": size, "patch_size": v["patch"], "merge_size": 2, "temporal_patch_size": 2}
    stem = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor"}[family]
    return getattr(tf, stem)(
        image_processor=tf.Qwen2VLImageProcessor(**parts),
        tokenizer=fast,
        video_processor=tf.Qwen2VLVideoProcessor(**parts, cap_pixels_per_frame=False),
        chat_template=CHAT_TEMPLATE,
    )


def build_checkpoint(path: str | os.PathLike[str], family: str = "qwen2_5_vl", seed: int = 0, **variant: Any) -> Path:
    """Write config, weights, tokenizer, processors and generation_config to `path` and return it."""
    model, processor = build_model(family, seed, **variant), build_processor(family, **variant)
    return save_checkpoint(path, model, processor, (VARIANT | variant)["shard_size"])


def save_checkpoint(path: str | os.PathLike[str], model: Any, processor: Any, shard_size: str = "5GB") -> Path:
    """Save model and processor, with the processor's JSON split into one file per part, as in Hub checkpoints."""
    target = Path(path)
    model.save_pretrained(target, max_shard_size=shard_size)
    processor.save_pretrained(target)
    parts = [getattr(processor, name, None) for name in ("image_processor", "video_processor", "feature_extractor")]
    file, merged = target / "preprocessor_config.json", {}  # one for images and audio
    for part in parts:
        if part is not None:
            part.save_pretrained(target)
            merged |= json.loads(file.read_text()) if file.is_file() else {}
    if merged:
        file.write_text(json.dumps(merged | ({"processor_class": type(processor).__name__} if parts[0] is not None else {})))
    (target / "processor_config.json").unlink(missing_ok=True)
    return target


def load_oracle(path: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Load `(model, processor)` of transformers from a folder, with eager attention, in eval mode."""
    ensure_torchvision()
    import transformers as tf

    name = json.loads((Path(path) / "config.json").read_text())["architectures"][0]
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # grouped experts round to bfloat16 on a CPU
    return getattr(tf, name).from_pretrained(path, dtype=dtype, **plain).eval(), load_processor(path)


def load_processor(path: str | os.PathLike[str]) -> Any:
    """Load transformers' processor from a folder."""
    ensure_torchvision()
    import transformers as tf

    return tf.AutoProcessor.from_pretrained(path)
