"""Measure adapters per request against the base model: `python -m benchmarks.adapters [--rounds N] [--write]`.

The model of `benchmarks.make_model` (118 million parameters, bfloat16) gets random adapters of rank 16 on each linear layer
of its decoder. Each row of the table is the median of ratios of pairs that run one after the other in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from sensorium import LLM, SamplingParams

from .make_model import SHAPES, SMALL
from .throughput import MODEL, ROOT, machine, put

SECTION = "Adapters per request"
RANK, LOADED, ROWS, PROMPT, TOKENS = 16, 64, 8, 2048, 64
Choice = str | Sequence[str | None] | None


def write_adapter(folder: Path, seed: int) -> Path:
    """Write a random adapter as peft does, of all linear layers of the decoder."""
    text = SHAPES[SMALL][0]
    hidden, inner, heads, kv_heads = (
        text[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    key_size = hidden // heads * kv_heads
    shapes = {  # inputs, outputs
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, key_size),
        "self_attn.v_proj": (hidden, key_size),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for layer in range(text["num_hidden_layers"]):
        for name, (inputs, outputs) in shapes.items():
            stem = f"base_model.model.model.language_model.layers.{layer}.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
            tensors[f"{stem}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) / RANK**0.5 * 0.02
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [name.partition(".")[2] for name in shapes]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def make(loaded: Sequence[Path] = ()) -> LLM:
    options = {"enable_lora": True, "max_loras": LOADED, "max_lora_rank": RANK} if loaded else {}
    llm = LLM(MODEL, dtype="bfloat16", max_model_len=4096, max_num_seqs=32, enable_prefix_caching=False, **options)
    for folder in loaded:
        llm.load_adapter(folder.name, folder)
    return llm


def seconds(llm: LLM, adapter: Choice, rows: int, prompt: int, tokens: int) -> float:
    """Return the seconds of answers to prompts of random tokens."""
    prompts = [{"prompt_token_ids": [100 + (row * 31 + i * 7) % 4000 for i in range(prompt)]} for row in range(rows)]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False, **({} if adapter is None else {"adapter": adapter}))
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
    return time.perf_counter() - started


def ratio(with_adapters: Callable[[], float], base: Callable[[], float], rounds: int) -> tuple[float, float, float]:
    """Return the median ratio of pairs, the least and the greatest. The first pair warms up."""
    ratios = [with_adapters() / base() for _ in range(rounds + 1)][1:]
    return statistics.median(ratios), min(ratios), max(ratios)


def longest_gap(llm: LLM, load: Callable[[], object]) -> float:
    """Return the longest time between two outputs of a stream while another thread runs `load`."""
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    gaps, thread, last = list[float](), threading.Thread(target=load), 0.0
    for number, _ in enumerate(llm.stream("x" * 20, params)):
        now = time.perf_counter()
        if number > 20:
            gaps.append(now - last)
        if number == 30:
            thread.start()
        last = now
    thread.join()
    return max(gaps)


def table(folder: Path, rounds: int) -> list[str]:
    adapters = [write_adapter(folder / f"a{number}", number) for number in range(LOADED)]
    names = [adapter.name for adapter in adapters]
    plain, one, many = make(), make(adapters[:1]), make(adapters)
    decode = {"rows": ROWS, "prompt": 16, "tokens": TOKENS}
    prefill = {"rows": 1, "prompt": PROMPT, "tokens": 1}
    measured = {
        f"{ROWS} rows decode with {ROWS} different adapters": (
            *ratio(lambda: seconds(many, names[:ROWS], **decode), lambda: seconds(many, None, **decode), rounds), 1.3
        ),
        f"{ROWS} rows decode with one adapter, {LOADED} loaded instead of 1": (
            *ratio(lambda: seconds(many, names[0], **decode), lambda: seconds(one, names[0], **decode), rounds), 1.04
        ),
        f"{ROWS} rows decode with one adapter, {LOADED} loaded": (
            *ratio(lambda: seconds(many, names[0], **decode), lambda: seconds(many, None, **decode), rounds), 1.04
        ),
        f"{ROWS} rows decode with none, {LOADED} loaded, beside an engine without adapters": (
            *ratio(lambda: seconds(many, None, **decode), lambda: seconds(plain, None, **decode), rounds), None
        ),
        f"a prompt of {PROMPT:,} tokens with one adapter": (
            *ratio(lambda: seconds(many, names[0], **prefill), lambda: seconds(many, None, **prefill), rounds), 1.08
        ),
    }  # fmt: skip
    lines = ["| step | time over the base model's | of the pairs | goal |", "|---|---|---|---|"]
    for name, (median, least, most, goal) in measured.items():
        lines.append(f"| {name} | {median:.2f} | {least:.2f} - {most:.2f} | {'' if goal is None else f'{goal:.2f}'} |")
    quiet = longest_gap(one, lambda: None)
    loading = longest_gap(one, lambda: [one.load_adapter(adapter.name, adapter) for adapter in adapters[1:9]])
    lines += [
        "",
        f"Longest time between two tokens of a stream: {quiet * 1000:.0f} ms, and {loading * 1000:.0f} ms while 8 adapters are "
        f"loaded (goal: a pause of at most 50 ms).",
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="pairs per row; the median counts")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    if not (MODEL / "config.json").exists():
        subprocess.run([sys.executable, "-W", "ignore", "-m", "benchmarks.make_model", str(MODEL)], cwd=ROOT, check=True)
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as temporary:
        text = "\n".join([f"{machine()}. {args.rounds} pairs.", "", *table(Path(temporary), args.rounds)])
    print(text)
    if args.write:
        put(SECTION, text)


if __name__ == "__main__":
    main()
