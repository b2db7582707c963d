"""Measure milliseconds per step of the sampler, and of grammars on a large vocabulary: `python -m benchmarks.sampler --write`.

One thread. Sampler: 16 sequences of 1,500 tokens, 500 of them generated, normally distributed logits with deviation 4; the
best of all steps counts, to exclude other work on the machine. Grammars: the invoice schema below, token by token along an
answer, with the tokenizer of `--tokenizer` or of mistral-common.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .throughput import machine, put

ROWS, LENGTH, ANSWER = 16, 1500, 500
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, penalties": {"temperature": 0.0, **PENALTIES},
    "temperature": {},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "top_p 0.9, penalties": {"top_p": 0.9, **PENALTIES},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
}
ITEM = {
    "type": "object",
    "properties": {
        "sku": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        "qty": {"type": "integer", "minimum": 0},
        "price": {"type": "number"},
        "note": {"type": ["string", "null"]},
    },
    "required": ["sku", "qty", "price", "note"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "invoice": {"type": "string", "maxLength": 40},
        "date": {"type": "string", "format": "date"},
        "total": {"type": "number"},
        "currency": {"enum": ["USD", "EUR", "CNY"]},
        "items": {"type": "array", "minItems": 1, "maxItems": 20, "items": ITEM},
        "bbox": {"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 4},
    },
    "required": ["invoice", "date", "total", "currency", "items", "bbox"],
    "additionalProperties": False,
}
INVOICE = {
    "invoice": "Acme Ltd. – invoice № 42, büro",
    "date": "2026-11-20",
    "total": 1234.5,
    "currency": "EUR",
    "items": [
        {"sku": "AB-1234", "qty": 3, "price": 9.99, "note": "fragile, handle with care"},
        {"sku": "ZZ-0001", "qty": 12, "price": 100.0, "note": None},
    ],
    "bbox": [12, 34, 560, 780],
}


def best(call: Callable[[], object], runs: int) -> float:
    """Return the milliseconds of the fastest step."""
    call()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def step_times(vocab: int, runs: int) -> list[float]:
    import torch
    from sensorium import SamplingParams
    from sensorium.engine.worker.sampler import sample
    from sensorium.engine.worker.sampling_state import SamplingState

    logits, found = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(0)) * 4, []
    for case in CASES.values():
        rng = random.Random(0)
        tokens = [[rng.randrange(vocab) for _ in range(LENGTH)] for _ in range(ROWS)]
        rows = [SamplingState(SamplingParams(**case), ids, LENGTH - ANSWER, i) for i, ids in enumerate(tokens)]
        scratch = logits.clone()

        def step(rows: list[SamplingState] = rows, scratch: torch.Tensor = scratch) -> None:
            scratch.copy_(logits)
            with torch.inference_mode():
                results = sample(scratch, rows)
            for row, result in zip(rows, results, strict=True):
                row.token_ids.append(result.token)

        found.append(best(step, runs) - best(lambda scratch=scratch: scratch.copy_(logits), runs))
    return found


def grammar_rows(folder: Path) -> list[str]:
    import numpy as np
    import torch
    from sensorium.engine.structured_outputs import StructuredOutputsParams
    from sensorium.engine.worker.grammar import GrammarFactory
    from sensorium.processors.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(folder)
    factory = GrammarFactory(tokenizer)
    start = time.perf_counter()
    factory.check(StructuredOutputsParams(choice=["a"]))
    first = 1e3 * (time.perf_counter() - start)
    compiled = []
    for i in range(10):
        start = time.perf_counter()
        factory.check(StructuredOutputsParams(json={**SCHEMA, "title": str(i)}))
        compiled.append(1e3 * (time.perf_counter() - start))
    wanted = StructuredOutputsParams(json=SCHEMA)
    grammar, logits = factory.make(wanted), torch.zeros(tokenizer.vocab_size)
    ids = tokenizer.encode_ordinary(json.dumps(INVOICE, ensure_ascii=False, separators=(",", ":")))
    masks, applied = [], []
    for i, token in enumerate(ids):
        start = time.perf_counter()
        grammar.accept_tokens(ids[:i], 0)
        allowed, _ = grammar.allowed_tokens((), True, tokenizer.vocab_size)
        masks.append(1e3 * (time.perf_counter() - start))
        assert allowed[token]
        start = time.perf_counter()
        logits.masked_fill_(torch.from_numpy(~allowed), -torch.inf)
        applied.append(1e3 * (time.perf_counter() - start))
    numbers = {
        "first grammar, with the vocabulary": first,
        "the schema, compiled": float(np.median(compiled)),
        "the schema, cached": best(lambda: factory.make(wanted), 20),
        "allowed next tokens, mean": float(np.mean(masks)),
        "allowed next tokens, median": float(np.median(masks)),
        "allowed next tokens, worst": max(masks),
        "applied to a row, median": float(np.median(applied)),
    }
    head = ["", f"Grammars on {tokenizer.vocab_size:,} tokens, an invoice of {len(ids)} tokens:", ""]
    return [*head, "| | ms |", "|---|---|", *(f"| {name} | {value:.2f} |" for name, value in numbers.items())]


def main() -> None:
    import mistral_common
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    tekken = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    parser.add_argument("--tokenizer", type=Path, default=tekken, help="a checkpoint's folder")
    parser.add_argument("--runs", type=int, default=30, help="steps of each case")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (32_000, 151_936)
    columns = [step_times(vocab, args.runs) for vocab in sizes]
    lines = [
        machine(),
        "",
        f"| {ROWS} sequences | " + " | ".join(f"{vocab:,} tokens, ms" for vocab in sizes) + " |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | " + " | ".join(f"{column[i]:.2f}" for column in columns) + " |" for i, name in enumerate(CASES)]
    table = "\n".join(lines + grammar_rows(args.tokenizer))
    print(table)
    if args.write:
        put("Sampler, one core", table)


if __name__ == "__main__":
    main()
