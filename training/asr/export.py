"""Export a trained tiny-asr as a Hub checkpoint: `python -m training.asr.export`. Reads the trainer's last.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ..checkpoint import export_arguments, write_files, write_json
from ..reference import transformers
from .model import SIZES, config
from .speech import SECONDS
from .tokens import END, NO_TIMES, SPECIAL, START, token, tokenizer


def write(source: Path, target: Path) -> None:
    """Write the JSON files, and the weights in float16 under their published names."""
    target.mkdir(parents=True, exist_ok=True)
    weights = {k.removeprefix("model.average."): v for k, v in load_file(source).items() if k.startswith("model.average.")}
    net = transformers().WhisperForConditionalGeneration(config())
    net.model.load_state_dict(weights)
    net = net.half()
    net.save_pretrained(target)
    (target / "model.safetensors").chmod(0o644)
    transformers().WhisperFeatureExtractor(chunk_length=SECONDS, feature_size=80).save_pretrained(target)
    end = token(END)
    files: dict[str, Any] = {
        "generation_config.json": {
            "bos_token_id": end,
            "decoder_start_token_id": token(START),
            "eos_token_id": end,
            "pad_token_id": end,
            "is_multilingual": False,
            "max_length": SIZES["max_target_positions"],
            "no_timestamps_token_id": token(NO_TIMES),
            "return_timestamps": False,
            "suppress_tokens": [token(name) for name in SPECIAL if name not in (END, NO_TIMES)],
        },
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
    write_files(target, files, tokenizer())
    print(f"{target}: {sum(v.numel() for v in net.parameters()):,} parameters")


def name_alignment_heads(target: Path, clips: Path) -> None:
    """Measure which heads follow the audio, and name them in generation_config.json."""
    import soundfile
    from sensorium import LLM
    from sensorium.pipelines.speech.alignment_heads import find_alignment_heads

    with LLM(target, dtype="float32") as llm:
        heads = find_alignment_heads(llm, [soundfile.read(file, dtype="float32")[0] for file in sorted(clips.glob("*.flac"))])
    file = target / "generation_config.json"
    write_json(file, json.loads(file.read_text()) | {"alignment_heads": heads})


def main() -> None:
    parser = export_arguments(__doc__, "tiny-asr")
    parser.add_argument("--clips", type=Path, default=Path("assets/speech"))
    args = parser.parse_args()
    write(args.source, args.target)
    name_alignment_heads(args.target, args.clips)


if __name__ == "__main__":
    main()
