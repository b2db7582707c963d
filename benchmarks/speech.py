"""Transcribe audio with Whisper here and in transformers, in one process: `python -m benchmarks.speech MODEL FILE ...`.

Both decode the same samples greedily in float32. Times are wall clock without loading, after a warm-up file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from sensorium import LLM

RATE = 16_000
TESTS = Path(__file__).resolve().parents[1] / "tests" / "helpers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    from oracle import ensure_torchvision

    ensure_torchvision()
    import transformers

    audio = [read(path) for path in args.files]
    seconds = sum(len(samples) for samples in audio) / RATE
    alone, together = LLM(args.model, dtype="float32"), LLM(args.model, dtype="float32")  # each with its own caches
    model = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(args.model, dtype=torch.float32).eval()
    extractor = transformers.AutoFeatureExtractor.from_pretrained(args.model)
    runs = {
        "sensorium, one at a time": lambda: [ours(alone, [samples])[0] for samples in audio],
        "sensorium, one batch": lambda: ours(together, audio),
        "transformers, one at a time": lambda: [theirs(model, extractor, [samples])[0] for samples in audio],
        "transformers, one batch": lambda: theirs(model, extractor, audio),
    }
    quiet = [audio[0] / 2]
    for run in (lambda: ours(alone, quiet), lambda: ours(together, quiet), lambda: theirs(model, extractor, quiet)):
        run()
    found = {name: timed(run) for name, run in runs.items()}
    print(f"{len(audio)} files, {seconds:.1f} s of audio, {torch.get_num_threads()} threads")
    for name, (took, _) in found.items():
        print(f"{name:<28} {took:6.2f} s, {seconds / took:6.1f} times real time")
    first = found["transformers, one at a time"][1]
    for name, (_, answers) in found.items():
        print(f"{name:<28} {sum(map(np.array_equal, answers, first))} of {len(first)} files with the tokens of transformers")


def read(path: Path) -> np.ndarray:
    samples, rate = soundfile.read(path, dtype="float32")
    assert rate == RATE, f"{path} has {rate} Hz"
    return samples


def ours(llm: Any, audio: list[np.ndarray]) -> list[list[int]]:
    """Return the tokens of each answer without the end token."""
    heard = llm.transcribe([(samples, RATE) for samples in audio], "en", use_tqdm=False, vad=False, temperature=0.0)
    return [list(one.output.outputs[0].token_ids[:-1]) for one in heard]


def theirs(model: Any, extractor: Any, audio: list[np.ndarray]) -> list[list[int]]:
    features = extractor(audio, sampling_rate=RATE, return_tensors="pt").input_features
    ends = model.generation_config.eos_token_id
    with torch.inference_mode():
        return [[token for token in answer if token < ends] for answer in model.generate(features).tolist()]


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    main()
