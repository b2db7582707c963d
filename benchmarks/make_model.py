"""Make a random Qwen2.5-VL in the Hub's layout, with a tokenizer: `python -m benchmarks.make_model DIR [--shape NAME]`.

The weights of the small one are scaled so that greedy text depends on the image; speed does not depend on the values.
The tokenizer is that of the small one, so that a larger vocabulary has ids without text.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

VOCAB, SCALE = 8192, 4.0
SMALL = "118m"
SHAPES = {  # text model and tower; the larger one is that of Qwen/Qwen2.5-VL-3B-Instruct
    SMALL: (
        {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": VOCAB,
            "mrope_section": [8, 12, 12],
            "max_position_embeddings": 32768,
        },
        {"depth": 8, "hidden_size": 512, "intermediate_size": 1408, "num_heads": 8, "fullatt_block_indexes": [3, 7]},
    ),
    "qwen2.5-vl-3b": (
        {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "mrope_section": [16, 24, 24],
            "max_position_embeddings": 128000,
        },
        {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    ),
}
SHARD_BYTES = 2 << 30


def tokenizer() -> Any:
    """Train a byte-level BPE with VOCAB entries on the standard library's sources, with Qwen's special tokens."""
    from oracle import CHAT_TEMPLATE, SPECIALS
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB - len(SPECIALS), initial_alphabet=alphabet, show_progress=False)
    tok.train([str(path) for path in sorted(Path(os.__file__).parent.glob("*.py"))[:150]], trainer)
    tok.add_special_tokens(list(SPECIALS))
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": list(SPECIALS[1:])}
    return PreTrainedTokenizerFast(tokenizer_object=tok, chat_template=CHAT_TEMPLATE, **special)


def build(target: Path, shape: str) -> None:
    """Write config, bfloat16 weights, tokenizer and processor to `target`."""
    from oracle import ensure_torchvision

    ensure_torchvision()
    import transformers as tf

    tok = tokenizer()
    ids = {name: tok.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start", "vision_end")}
    end, nothing = tok.convert_tokens_to_ids("<|im_end|>"), tok.convert_tokens_to_ids("<|endoftext|>")
    text, vision = SHAPES[shape]
    sizes = {name: value for name, value in text.items() if name != "mrope_section"}
    rope = {"rope_type": "default", "type": "mrope", "mrope_section": text["mrope_section"], "rope_theta": 1e6}
    tower = {"patch_size": 14, "window_size": 112, "tokens_per_second": 2, "out_hidden_size": text["hidden_size"]}
    config = tf.Qwen2_5_VLConfig(
        text_config=sizes | {"rope_parameters": rope, "bos_token_id": nothing, "eos_token_id": end},
        vision_config=vision | tower,
        tie_word_embeddings=shape != SMALL,
        **{f"{name.removesuffix('_pad')}_token_id": value for name, value in ids.items()},
    )
    torch.manual_seed(0)
    if shape == SMALL:
        model = tf.Qwen2_5_VLForConditionalGeneration(config)
        scale(model)
        model.to(torch.bfloat16).save_pretrained(target)
    else:
        with torch.device("meta"):
            model = tf.Qwen2_5_VLForConditionalGeneration(config)
        config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
        config.save_pretrained(target)
        write_random(model, target)
    tf.GenerationConfig(eos_token_id=end, pad_token_id=nothing).save_pretrained(target)
    most = 1280 if shape == SMALL else 16384  # rows of an image
    images, videos = tf.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=most * 28 * 28), tf.Qwen2VLVideoProcessor()
    processor = tf.Qwen2_5_VLProcessor(images, tok, videos, chat_template=tok.chat_template)
    processor.save_pretrained(target)
    print(f"{target}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters")


def scale(model: torch.nn.Module) -> None:
    for name, p in model.named_parameters():
        if p.ndim > 1:
            p.data.mul_(SCALE)
        else:
            p.data.uniform_(0.8, 1.2) if "norm" in name or "ln_q" in name else p.data.uniform_(-0.2, 0.2)


def write_random(model: torch.nn.Module, target: Path) -> None:
    """Write random weights for a model on the meta device, a shard at a time."""
    from safetensors.torch import save_file

    shard: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}
    parameters = dict(model.named_parameters())
    for name, p in parameters.items():
        shard[name] = torch.ones(p.shape).bfloat16() if p.ndim == 1 else torch.empty(p.shape).normal_(std=0.02).bfloat16()
        if name == list(parameters)[-1] or sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            file = f"model-{len(set(files.values())) + 1:05d}.safetensors"
            save_file(shard, target / file, {"format": "pt"})
            files |= dict.fromkeys(shard, file)
            shard = {}
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default=SMALL)
    args = parser.parse_args()
    build(args.target, args.shape)
