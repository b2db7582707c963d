"""Time to the first sound, and real-time factor, of text to speech: `python -m benchmarks.speech_out [--write]`.

The checkpoint has the published sizes of Kokoro-82M and random weights, with which a phoneme is as long as in speech: 2.6
frames of 25 ms. It is written to out/speech_out once. `--model DIR` measures a real one.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from sensorium import LLM
from sensorium.models.families.kokoro.model import Kokoro
from sensorium.models.weights import named_layers

from .throughput import ROOT, machine, put

SECTION = "Text to speech"
NOTE = (
    "Kokoro-82M's published sizes with random weights; phonemes are given. First sound: from the call of `stream_speak` to its "
    "first part, for sentences of 25 and of 33 phonemes. Real-time factor: seconds of work per second of sound, for a text of "
    "ten sentences, about 60 s. Goals: 300 ms and 0.3."
)
SENTENCES = ("ðɪs ɪz ə ʃˈɔɹt sˈɛntəns.", "ðɪs ɪz ə ʃˈɔɹt sˈɛntəns, spˈOkən.")
LONG = "ænd ðɪs wˈʌn ɪz sˈʌmwˌʌt lˈɔŋɡəɹ, æz sˈɛntənsᵻz ɪn bˈʊks ənd nˈuzpˌApəɹz ˈɔfᵊn ɑɹ, ɪf ðA hæv klˈɔzᵻz. "
FRAMES = 2.6  # of a phoneme
RUNS = 7
FOLDER = ROOT / "out" / "speech_out"
PHONEMES = "".join(dict.fromkeys("".join(reversed(SENTENCES)) + LONG))
CONFIG: dict[str, Any] = {
    "istftnet": {
        "upsample_kernel_sizes": [20, 12], "upsample_rates": [10, 6], "gen_istft_hop_size": 5, "gen_istft_n_fft": 20,
        "resblock_dilation_sizes": [[1, 3, 5]] * 3, "resblock_kernel_sizes": [3, 7, 11], "upsample_initial_channel": 512,
    },
    "hidden_dim": 512, "max_dur": 50, "n_layer": 3, "n_mels": 80, "n_token": 178, "style_dim": 128,
    "text_encoder_kernel_size": 5,
    "plbert": {
        "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 2048, "max_position_embeddings": 512,
        "num_hidden_layers": 12,
    },
    "vocab": {phoneme: number for number, phoneme in enumerate(PHONEMES, 1)},
}  # fmt: skip


def write_random(folder: Path) -> None:
    """Write a checkpoint with random weights and one voice."""
    (folder / "voices").mkdir(parents=True, exist_ok=True)
    draw, parts = torch.Generator().manual_seed(0), dict[str, dict[str, torch.Tensor]]()
    model = Kokoro(CONFIG, torch.float32, torch.device("meta"))
    for name, (_, views) in named_layers(model).items():
        shape, last = views[name].shape, name.rpartition(".")[2]
        values = torch.randn(shape, generator=draw) / max(1, shape[1:].numel()) ** 0.5
        if len(shape) < 2 or last == "weight_g" or ".alpha" in name:
            values = 0.1 * values + float(last in ("weight", "weight_g", "gamma") or ".alpha" in name)
        part, _, inner = name.partition(".")
        parts.setdefault(part, {})[inner] = values
    parts["predictor"]["F0_proj.bias"] += 140
    share = FRAMES / CONFIG["max_dur"]
    parts["predictor"]["duration_proj.linear_layer.bias"].fill_(float(torch.tensor(share).logit()))
    torch.save(parts, folder / "kokoro-v1_0.pth")
    torch.save(torch.randn(510, 1, 256, generator=draw), folder / "voices" / "af_random.pt")
    (folder / "config.json").write_text(json.dumps(CONFIG), "utf-8")


def first_sound(llm: LLM, sentence: str) -> tuple[float, float]:
    """Return the seconds of a sentence, and the seconds until its sound is there."""
    list(llm.stream_speak(phonemes=sentence))
    times = list[float]()
    for _ in range(RUNS):
        started = time.perf_counter()
        speech = next(iter(llm.stream_speak(phonemes=sentence)))
        times.append(time.perf_counter() - started)
    return speech.seconds, median(times)


def real_time_factor(llm: LLM) -> tuple[float, float]:
    """Return the seconds of a long text, and the real-time factor of the faster of two runs."""
    factors = list[float]()
    for _ in range(2):
        started = time.perf_counter()
        (long,) = llm.speak(phonemes=LONG * 10, use_tqdm=False)
        assert long.error is None, long.error
        factors.append((time.perf_counter() - started) / long.seconds)
    return long.seconds, min(factors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=FOLDER, help="a checkpoint (default: random weights)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    if args.model == FOLDER and not (FOLDER / "config.json").is_file():
        write_random(FOLDER)
    options = {} if args.quantization is None else {"quantization": args.quantization}
    with LLM(str(args.model), device="cpu", dtype=args.dtype, **options) as llm:
        firsts = [first_sound(llm, sentence) for sentence in SENTENCES]
        long, factor = real_time_factor(llm)
    table = "| dtype | sentence, s | first sound, ms | text, s | real-time factor |\n|---|---|---|---|---|\n"
    name = args.dtype if args.quantization is None else f"{args.dtype}, {args.quantization}"
    for seconds, first in firsts:
        table += f"| {name} | {seconds:.1f} | {1000 * first:.0f} | {long:.0f} | {factor:.2f} |\n"
    print(table)
    if args.write:
        put(SECTION, f"{NOTE}\n\n{machine()}\n\n{table}")


if __name__ == "__main__":
    main()
