"""Compiles one grammar with llguidance. The module also runs in a worker process, which starts faster without torch."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

WORKER_IMPORTS = ("llguidance",)  # modules that `compile_alone` needs; the worker imports them before it is restricted
STACK = 2 << 20  # bytes of stack in the worker
_WALK = 4  # tokens
_LIMITS: dict[str, Any] = {  # limits of llguidance: a grammar's states take about 100 MB
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 20_000,  # a step takes 8 ms at most, so 64 answers whose lexers grow at once take 0.5 s
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}


def compile_grammar(vocabulary: Any, source: str) -> tuple[Any, str]:
    """Return llguidance's matcher and an error message, "" if the grammar is valid."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(vocabulary, source, log_level=0, limits=LLParserLimits(**_LIMITS))
    return matcher, matcher.get_error() or _walk(vocabulary, matcher, -1) or _walk(vocabulary, matcher, 0)


def _walk(vocabulary: Any, matcher: Any, which: int) -> str:
    """Follow the first (0) or last (-1) allowed token for a few tokens, and return llguidance's error message.

    A grammar that matches nothing fails at its first mask, and one that is too large for the lexer a few tokens later.
    """
    copy = matcher.deep_copy()
    for _ in range(_WALK):
        mask = copy.compute_bitmask()
        if copy.is_error():
            break
        tokens = (8 * i + bit for i, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1)
        allowed = [token for token in tokens if token != vocabulary.eos_token]
        if not allowed or not copy.consume_tokens([allowed[which]]):
            break
    return str(copy.get_error())


def compile_alone(source: bytes) -> None:
    """Compile a grammar for a vocabulary of bytes. Runs in a worker, where an overflow of the stack ends the worker only."""
    from llguidance import LLTokenizer

    threading.stack_size(STACK)
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: compile_grammar(LLTokenizer("byte"), source.decode()) and None).result()
    finally:
        threading.stack_size(0)
