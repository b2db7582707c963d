"""Serve one fine-tune per customer from one model: `python examples/adapters.py [--model DIR] [NAME=ADAPTER_FOLDER ...]`.

Without folders, it makes two random adapters of the first layer.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sensorium import LLM, SamplingParams
from shared import ASSETS, run


def make_adapter(model: Path, folder: Path, seed: int) -> Path:
    """Write a random adapter of an attention layer as peft does."""
    generator = torch.Generator().manual_seed(seed)
    with safe_open(model / "model.safetensors", framework="pt") as tensors:
        name = next(name for name in tensors.keys() if name.endswith("layers.0.self_attn.o_proj.weight"))  # noqa: SIM118
        outputs, inputs = tensors.get_slice(name).get_shape()
    stem = f"base_model.model.{name.removesuffix('.weight')}"
    shapes = {"A": (8, inputs), "B": (outputs, 8)}
    matrices = {f"{stem}.lora_{letter}.weight": torch.randn(shape, generator=generator) / 2 for letter, shape in shapes.items()}
    folder.mkdir()
    save_file(matrices, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def main() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("adapters", nargs="*", metavar="NAME=ADAPTER_FOLDER")
    parser.add_argument("--model", default=str(ASSETS / "tiny-vl"))
    args = parser.parse_args()

    wrong = [adapter for adapter in args.adapters if "=" not in adapter]
    if wrong:
        parser.error(f"{wrong[0]} is not NAME=ADAPTER_FOLDER")
    folders = dict(adapter.split("=", 1) for adapter in args.adapters)
    with tempfile.TemporaryDirectory() as root:
        for seed, customer in enumerate(() if folders else ("anna", "bert")):
            folders[customer] = str(make_adapter(Path(args.model), Path(root, customer), seed))
        llm = LLM(args.model, enable_lora=True)
        for customer, folder in folders.items():
            info = llm.load_adapter(customer, folder)
            print(f"{customer}: rank {info.rank}, {info.num_bytes:,} bytes")
        prompt, names = "one two three", [None, *folders]
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        answers = llm.generate([prompt] * len(names), params, adapter=names)  # one batch
        for name, answer in zip(names, answers, strict=True):
            print(f"{name or 'the model itself'}: {answer.outputs[0].text!r}")
        return [f"{name}: {answer.error}" for name, answer in zip(names, answers, strict=True) if answer.error is not None]


if __name__ == "__main__":
    run(main)
