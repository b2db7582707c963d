"""tiny-asr's tokenizer: Whisper's byte-level BPE with its special tokens and timestamps, trained on the grammar."""

from __future__ import annotations

import functools

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import grammar
from .speech import SECONDS, Clip

END, START, PREVIOUS, NO_SPEECH, NO_TIMES = (
    "<|endoftext|>", "<|startoftranscript|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
SPECIAL = (END, START, "<|en|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>", PREVIOUS, NO_SPEECH, NO_TIMES)
STEP = 0.02  # seconds between timestamps
TIMES = tuple(f"<|{i * STEP:.2f}|>" for i in range(round(SECONDS / STEP) + 1))
MERGES = 1200
LETTERS = " 'abcdefghijklmnopqrstuvwxyz"


@functools.cache
def tokenizer() -> Tokenizer:
    """Train the tokenizer on sentences of the grammar, with a fixed seed. Most words become one token."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    rng = np.random.default_rng(0)
    sentences = [f" {grammar.utterance(rng, kind)}" for kind in grammar.KINDS for _ in range(1000)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator(
        sentences, trainers.BpeTrainer(vocab_size=256 + MERGES, initial_alphabet=alphabet, show_progress=False, min_frequency=2)
    )
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in (*SPECIAL, *TIMES)])
    return tok


def encode(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def token(name: str) -> int:
    return int(tokenizer().token_to_id(name))


def time_token(seconds: float) -> int:
    return token(TIMES[0]) + round(seconds / STEP)


def answer(clip: Clip, timed: bool) -> list[int]:
    """Return the tokens after `<|startoftranscript|>`, up to and with `<|endoftext|>`."""
    found: list[int] = [] if timed else [token(NO_TIMES)]
    for start, end, text in clip.parts:
        words = encode(f" {text}")
        found += [time_token(start), *words, time_token(end)] if timed else words
    return [*found, token(END)]


def letters(text: str) -> list[int]:
    """Return the classes of the CTC head: 1 for a space, 2 for an apostrophe, 3 to 28 for letters."""
    return [LETTERS.index(c) + 1 for c in " ".join(grammar.words(text))]
