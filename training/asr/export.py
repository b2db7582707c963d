"""Export a trained tiny-asr as a Hub checkpoint: `python -m training.asr.export`. Reads the trainer's last.safetensors."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ..reference import transformers
from .model import SIZES, config
from .speech import SECONDS
from .tokens import END, NO_TIMES, SPECIAL, token, tokenizer


def write(source: Path, target: Path) -> None:
    """Write the JSON files, and the weights in float16 under their published names."""
    target.mkdir(parents=True, exist_ok=True)
    weights = {k.removeprefix("model.average."): v for k, v in load_file(source).items() if k.startswith("model.average.")}
    net = transformers().WhisperForConditionalGeneration(config())
    net.model.load_state_dict(weights)
    net = net.half()
    generation = net.generation_config
    generation._from_model_config = False  # otherwise transformers drops unknown keys when loading
    generation.is_multilingual = False
    generation.max_length = SIZES["max_target_positions"]
    generation.no_timestamps_token_id = token(NO_TIMES)
    generation.return_timestamps = False
    generation.suppress_tokens = [token(name) for name in SPECIAL if name not in (END, NO_TIMES)]
    net.save_pretrained(target)
    transformers().WhisperFeatureExtractor(chunk_length=SECONDS, feature_size=80).save_pretrained(target)
    files: dict[str, Any] = {
        "tokenizer_config.json": {
            "tokenizer_class": "WhisperTokenizer",
            "processor_class": "WhisperProcessor",
            "additional_special_tokens": list(SPECIAL),
            "bos_token": END,
            "eos_token": END,
            "pad_token": END,
            "unk_token": END,
            "model_max_length": SIZES["max_target_positions"],
        },
    }
    for name, content in files.items():
        (target / name).write_text(json.dumps(content, indent=2) + "\n")
    tokenizer().save(str(target / "tokenizer.json"))
    print(f"{target}: {sum(v.numel() for v in net.parameters()):,} parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=Path("out/tiny-asr-training/last.safetensors"))
    parser.add_argument("--target", type=Path, default=Path("assets/tiny-asr"))
    args = parser.parse_args()
    write(args.source, args.target)


if __name__ == "__main__":
    main()
