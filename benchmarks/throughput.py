"""Compare throughput with transformers' generate on the same requests: `python -m benchmarks.throughput --write`.

Each engine runs in its own processes, in turn (A B A B), greedy, EOS ignored, bfloat16, two threads. A process times three
rounds of new requests and reports its best. The table shows the best of all processes and the ratio.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "out" / "bench-118m"
RESULT = ROOT / "benchmarks" / "README.md"
WORKLOADS = {  # requests, image (width, height), answer tokens, target ratio
    "8 images 448x448, 32 tokens": (8, (448, 448), 32, 1.3),
    "16 texts, 128 tokens": (16, None, 128, 2.0),
}
MAX_MODEL_LEN, MAX_NUM_SEQS = 4096, 32
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"


def requests(count: int, size: tuple[int, int] | None, round_: int, share: bool = False) -> list[tuple[str, Any]]:
    """Return `(prompt, image or None)`, equal for every engine and new in every round. `share`: one image for all."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(round_)
    found, image = [], None
    for i in range(count):
        wish = "describe what the class returns and why it does so. " * (1 if size else 12)
        text = f"import the module, question {round_} {i}: {wish}"
        if size and not (share and image):
            coarse = rng.integers(0, 255, (size[1] // 16, size[0] // 16, 3), dtype=np.uint8)
            image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
        found.append((f"<|im_start|>user\n{PLACEHOLDER if size else ''}{text}<|im_end|>\n<|im_start|>assistant\n", image))
    return found


def ours(tokens: int, **options: Any) -> Callable[[list[tuple[str, Any]]], int]:
    from sensorium import LLM, SamplingParams

    llm = LLM(MODEL, dtype="bfloat16", max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS, **options)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def run(asked: list[tuple[str, Any]]) -> int:
        prompts = [{"prompt": text, "multi_modal_data": {"image": image} if image else {}} for text, image in asked]
        return sum(len(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False))

    return run


def transformers(tokens: int, dtype: str = "bfloat16") -> Callable[[list[tuple[str, Any]]], int]:
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from oracle import ensure_torchvision

    ensure_torchvision()
    import torch
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(MODEL, dtype=getattr(torch, dtype)).eval()
    processor = AutoProcessor.from_pretrained(MODEL)
    processor.tokenizer.padding_side = "left"

    def run(asked: list[tuple[str, Any]]) -> int:
        images = [[image] for _, image in asked if image is not None] or None
        inputs = processor(text=[text for text, _ in asked], images=images, return_tensors="pt", padding=True)
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return int(out[:, inputs["input_ids"].shape[1] :].numel())

    return run


ENGINES = {"sensorium": ours, "transformers": transformers}


def best_round(make: Callable[[int], Callable[[list[tuple[str, Any]]], int]], workload: str, rounds: int) -> float:
    """Return the seconds of the fastest round of a workload. `make`: a function like `ours`."""
    count, size, tokens, _ = WORKLOADS[workload]
    run, times = make(tokens), []
    for round_ in range(rounds):
        asked = requests(count, size, round_)
        start = time.perf_counter()
        assert run(asked) == count * tokens
        times.append(time.perf_counter() - start)
    return min(times)


def measure(engine: str, workload: str, rounds: int) -> dict[str, float]:
    """Measure in this process: seconds of the best round, generated tokens, peak memory in MB."""
    import torch

    torch.set_num_threads(2)
    count, _, tokens, _ = WORKLOADS[workload]
    seconds = best_round(ENGINES[engine], workload, rounds)
    return {"seconds": seconds, "tokens": count * tokens, "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def compare(workload: str, processes: int, rounds: int) -> str:
    """Measure one workload and format its row."""
    best: dict[str, dict[str, float]] = {}
    for _ in range(processes):
        for engine in ENGINES:
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "benchmarks.throughput",
                "--one",
                engine,
                workload,
                "--rounds",
                str(rounds),
            ]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            print(f"{workload}: {engine} {found['seconds']:.2f} s, peak {found['rss']:.0f} MB", flush=True)
            if engine not in best or found["seconds"] < best[engine]["seconds"]:
                best[engine] = found
    mine, theirs = best["sensorium"], best["transformers"]
    rates = [found["tokens"] / found["seconds"] for found in (mine, theirs)]
    return (
        f"| {workload} | {rates[0]:.0f} | {rates[1]:.0f} | {rates[0] / rates[1]:.2f}x | {WORKLOADS[workload][3]}x "
        f"| {mine['rss']:.0f} | {allowed():.0f} | {theirs['rss']:.0f} |"
    )


def allowed() -> float:
    """Return the memory target in MB: 1.2 x (weights + KV cache) + 500."""
    text = json.loads((MODEL / "config.json").read_text())["text_config"]
    head_dim = text["hidden_size"] // text["num_attention_heads"]
    token = 2 * text["num_hidden_layers"] * text["num_key_value_heads"] * head_dim * 2
    cache = token * MAX_MODEL_LEN * MAX_NUM_SEQS
    return 1.2 * ((MODEL / "model.safetensors").stat().st_size + cache) / 2**20 + 500


def machine() -> str:
    """Describe CPU, threads and versions of this run."""
    from importlib.metadata import version

    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?"
    )
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    from sensorium.kernels.native import instructions

    return f"{cpu} ({instructions()}), 2 threads, Python {platform.python_version()}, {packages}, {time.strftime('%Y-%m-%d')}"


def put(section: str, text: str) -> None:
    """Replace one section of the results file."""
    old = RESULT.read_text() if RESULT.exists() else "# Benchmarks\n"
    head, _, rest = old.partition(f"\n## {section}\n")
    after = rest.partition("\n## ")
    RESULT.write_text(f"{head}\n## {section}\n\n{text}\n" + (f"\n## {after[2]}" if after[1] else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, metavar=("ENGINE", "WORKLOAD"), help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, default=2, help="processes of each engine and workload")
    parser.add_argument("--rounds", type=int, default=3, help="rounds in each process")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one, args.rounds)))
        return
    if not (MODEL / "config.json").exists():
        subprocess.run([sys.executable, "-W", "ignore", "-m", "benchmarks.make_model", str(MODEL)], cwd=ROOT, check=True)
    head = [
        "| workload | sensorium tokens/s | transformers tokens/s | ratio | target | peak MB | allowed | transformers peak MB |"
    ]
    rows = [compare(name, args.processes, args.rounds) for name in WORKLOADS]
    table = "\n".join([machine(), "", *head, "|---|---|---|---|---|---|---|---|", *rows])
    print(table)
    if args.write:
        put("Throughput against transformers' generate", table)


if __name__ == "__main__":
    main()
