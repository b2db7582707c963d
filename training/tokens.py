"""tiny-vl's tokenizer: bytes, 100 merges of lower-case letters, Qwen's special tokens. Digits and capitals are single."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from .data import COLOURS, DIRECTIONS, PROMPTS, SHAPES

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
MERGES = 104
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] in ['image', 'image_url'] or 'image' in c %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] in ['video', 'video_url'] or 'video' in c %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def tokenizer() -> Tokenizer:
    """Train the tokenizer on the few sentences the model knows; deterministic."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    sentences = [f"A {c} {s} moves {d}." for c in COLOURS for s in SHAPES for d in DIRECTIONS]
    sentences += [s.lower() for s in sentences] + [*PROMPTS.values(), "user", "assistant", "system"] * 16
    trainer = trainers.BpeTrainer(
        vocab_size=256 + MERGES, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tok.train_from_iterator(sentences, trainer)
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    return tok


def encode(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def token(name: str) -> int:
    return int(tokenizer().token_to_id(name))


def prompt_ids(kind: str, pads: int) -> tuple[list[int], int]:
    """Return the token ids of a task's chat prompt with `pads` media tokens, and the position of the first."""
    pad = token("<|video_pad|>" if kind == "clip" else "<|image_pad|>")
    before = encode("<|im_start|>user\n<|vision_start|>")
    return before + [pad] * pads + encode(f"<|vision_end|>{PROMPTS[kind]}<|im_end|>\n<|im_start|>assistant\n"), len(before)
