"""Make a random Qwen2.5-VL of 118 M parameters in the Hub's layout, with a tokenizer: `python -m benchmarks.make_model DIR`.

The weights are scaled so that greedy text depends on the image; speed does not depend on the values.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

VOCAB, SCALE = 8192, 4.0
TEXT = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
VISION = {"depth": 8, "hidden_size": 512, "intermediate_size": 1408, "num_heads": 8, "out_hidden_size": 768}


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


def build(target: Path) -> None:
    """Write config, bfloat16 weights, tokenizer and processor to `target`."""
    from oracle import ensure_torchvision

    ensure_torchvision()
    import transformers as tf

    tok = tokenizer()
    ids = {name: tok.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start", "vision_end")}
    end, nothing = tok.convert_tokens_to_ids("<|im_end|>"), tok.convert_tokens_to_ids("<|endoftext|>")
    rope = {"rope_type": "default", "type": "mrope", "mrope_section": [8, 12, 12], "rope_theta": 1e6}
    text = TEXT | {"vocab_size": VOCAB, "rope_parameters": rope, "max_position_embeddings": 32768}
    vision = VISION | {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [3, 7], "tokens_per_second": 2}
    config = tf.Qwen2_5_VLConfig(
        text_config=text | {"bos_token_id": nothing, "eos_token_id": end},
        vision_config=vision,
        tie_word_embeddings=False,
        **{f"{name.removesuffix('_pad')}_token_id": value for name, value in ids.items()},
    )
    torch.manual_seed(0)
    model = tf.Qwen2_5_VLForConditionalGeneration(config)
    for name, p in model.named_parameters():
        if p.ndim > 1:
            p.data.mul_(SCALE)
        else:
            p.data.uniform_(0.8, 1.2) if "norm" in name or "ln_q" in name else p.data.uniform_(-0.2, 0.2)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = end, nothing
    model.to(torch.bfloat16).save_pretrained(target)
    images, videos = tf.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=1280 * 28 * 28), tf.Qwen2VLVideoProcessor()
    processor = tf.Qwen2_5_VLProcessor(images, tok, videos, chat_template=tok.chat_template)
    processor.save_pretrained(target)
    print(f"{target}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
    build(Path(sys.argv[1]))
