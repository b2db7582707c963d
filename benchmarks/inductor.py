"""A decode step as the engine records it, beside torch.compile: `python -m benchmarks.inductor --write`.

The model is a Qwen2 with random weights. transformers' class runs eagerly, and compiled by Inductor with a static cache, whose
step is one call without sampling; the engine's step is a whole one, with scheduling and sampling. The three take turns on one
thread, in seconds of CPU time, so that other work on the machine matters little: of transformers' class, the fastest step
counts, of the engine, the mean step of the fastest answer.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .throughput import ROOT, machine, put

SHAPES: dict[str, dict[str, Any]] = {  # the first is that of tiny-vl's decoder
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "Qwen2.5-3B, 4 of 36 layers": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
}
PROMPT, TOKENS, ROUNDS = 64, 32, 4
HEAD = """\
| shape | recorded ms | Inductor ms | eager ms | recorded is faster than Inductor |
|---|---|---|---|---|"""


def build(folder: Path, shape: dict[str, Any]) -> Any:
    """Write a checkpoint with random weights, and return transformers' model of it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    tokenizer = ROOT / "assets" / "tiny-vl"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    config = Qwen2Config(**shape, vocab_size=4096, max_position_embeddings=1024, tie_word_embeddings=True)
    model = Qwen2ForCausalLM(config).bfloat16().eval()
    model.save_pretrained(folder)
    return model


class Stepper:
    """Decode steps of transformers' class with a static cache."""

    def __init__(self, model: Any, forward: Callable[..., Any]) -> None:
        from transformers import StaticCache

        self.model, self.forward = model, forward
        self.cache = StaticCache(config=model.config, max_cache_len=PROMPT + TOKENS)

    @torch.inference_mode()
    def seconds(self) -> float:
        """Return the fastest of `TOKENS` steps after a prompt."""
        self.cache.reset()
        self.model(torch.randint(0, 300, (1, PROMPT)), past_key_values=self.cache)
        ids, times = torch.zeros(1, 1, dtype=torch.long), []
        for place in range(PROMPT, PROMPT + TOKENS):
            start = time.process_time()
            self.forward(ids, past_key_values=self.cache, position_ids=torch.tensor([[place]]))
            times.append(time.process_time() - start)
        return min(times)


def recorded(llm: Any) -> float:
    """Return the time of a step of the engine: that of a long answer without that of a short one, by the further tokens."""
    from sensorium import SamplingParams

    def answer(tokens: int) -> float:
        start = time.process_time()
        llm.generate(
            {"prompt_token_ids": list(range(PROMPT))},
            SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
            use_tqdm=False,
        )
        return time.process_time() - start

    return (answer(2 + TOKENS) - answer(2)) / TOKENS


def row_of(name: str) -> str:
    """Return the row of the table for a shape."""
    from sensorium import LLM

    with tempfile.TemporaryDirectory() as folder:
        model = build(Path(folder), SHAPES[name])
        compiled = Stepper(model, torch.compile(model.forward, dynamic=False))
        eager = Stepper(model, model.forward)
        with LLM(folder, dtype="bfloat16", max_model_len=256, max_num_seqs=1, enable_prefix_caching=False) as llm:
            steps = (lambda: recorded(llm)), compiled.seconds, eager.seconds
            times = [[step() for step in steps] for _ in range(ROUNDS + 1)][1:]  # the first round compiles
    ours, inductor, plain = map(min, zip(*times, strict=True))
    return f"| {name} | {1e3 * ours:.3g} | {1e3 * inductor:.3g} | {1e3 * plain:.3g} | {inductor / ours:.2f}x |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inductor", description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from oracle import ensure_torchvision

    ensure_torchvision()
    torch.set_num_threads(1)
    print(HEAD)
    rows = []
    for name in SHAPES:
        rows.append(row_of(name))
        print(rows[-1], flush=True)
    if write:
        put("Recorded steps beside Inductor", f"{machine().replace('2 threads', '1 thread')}\n\n" + "\n".join([HEAD, *rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
