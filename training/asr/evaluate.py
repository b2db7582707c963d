"""Evaluate tiny-asr on held-out speech with sensorium and transformers: `python -m training.asr.evaluate`.

Prints word error rates, which ignore capitals and punctuation. The clips are spoken by espeak-ng; if it is not installed,
only the shipped clips are transcribed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..evaluate import Task, arguments, edits, report
from ..reference import transformers
from . import speech
from .dataset import STAGES, draw_clip
from .grammar import words
from .speech import RATE, Clip

COUNT = 100  # clips of a set
SHIPPED = Path(__file__).parents[2] / "assets" / "speech"


def held_out(name: str, count: int = COUNT) -> list[Clip]:
    """Return a fixed set of clips for one version of espeak-ng: "clean", "noisy", "fast", "voice" or "silence"."""
    rng = np.random.default_rng([10_000_019, ("clean", "noisy", "fast", "voice", "silence").index(name)])
    if name == "silence":
        return [speech.silence(rng) for _ in range(count)]
    found = []
    for _ in range(count):
        variants = (speech.UNSEEN_VARIANT,) if name == "voice" else speech.VARIANTS
        voice = speech.random_voice(rng, variants, speech.FAST if name == "fast" else speech.SPEEDS)
        found.append(draw_clip(rng, STAGES[1], voice, clean=name == "clean"))
    return found


def shipped() -> list[Clip]:
    import soundfile

    answers = json.loads((SHIPPED / "answers.json").read_text("utf-8"))
    return [Clip(soundfile.read(SHIPPED / name, dtype="float32")[0], ((0.0, 0.0, text),)) for name, text in answers.items()]


def tasks(share: float) -> list[Task]:
    """Return `share` of each held-out set, or the shipped clips if espeak-ng is not installed."""
    if speech.espeak() is None:
        return [Task("shipped clips (espeak-ng is not installed)", shipped(), 0.05, below=True)]
    low, high = speech.FAST
    found = [
        Task("voices heard, clean", held_out("clean"), 0.05, below=True),
        Task("voices heard, noise and rooms", held_out("noisy"), 0.05, below=True),
        Task(f"faster than heard, {low} to {high} words a minute, noise and rooms", held_out("fast"), 0.10, below=True),
        Task("voice not heard, noise and rooms", held_out("voice"), 0.05, below=True),
        Task("no speech: share of clips with words", held_out("silence"), 0.02, below=True),
    ]
    return [task.part(share) for task in found]


def score(clips: list[Clip], answers: list[str]) -> float:
    """Return the word error rate or, for clips without speech, the share of answers with words."""
    spoken = [words(c.text) for c in clips]
    if not any(spoken):
        return float(np.mean([bool(words(a)) for a in answers]))
    return sum(edits(words(a), w) for a, w in zip(answers, spoken, strict=True)) / sum(map(len, spoken))


def ours(llm: Any, clips: list[Clip]) -> list[str]:
    """Transcribe each clip as one window, without the gates that suppress and repair answers."""
    gates = dict.fromkeys(("no_speech_threshold", "log_prob_threshold", "compression_ratio_threshold"))
    found = llm.transcribe([(c.samples, RATE) for c in clips], vad=False, temperature=0.0, **gates)
    return [one.text for one in found]


class Transformers:
    """Decode greedily with transformers' class and processor, one clip at a time."""

    def __init__(self, model_dir: Path) -> None:
        tf = transformers()
        self.model = tf.WhisperForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.processor = tf.WhisperProcessor.from_pretrained(model_dir)

    def tokens(self, clip: Clip) -> list[int]:
        inputs = self.processor(clip.samples, sampling_rate=RATE, return_tensors="pt").input_features
        return list(self.model.generate(inputs)[0].tolist())

    def __call__(self, clip: Clip) -> str:
        return str(self.processor.tokenizer.decode(self.tokens(clip), skip_special_tokens=True)).strip()


def main() -> int:
    args = arguments(__doc__, "assets/tiny-asr").parse_args()
    from sensorium import LLM

    llm = LLM(str(args.model), quantization=args.quantization)
    oracle = None if args.no_transformers else Transformers(args.model)
    note = "Word error rates; `wanted` is a limit on sensorium's."
    return report(args, tasks(args.share), lambda clips: ours(llm, clips), oracle, score, note)


if __name__ == "__main__":
    sys.exit(main())
