"""Evaluate tiny-vl on held-out images with sensorium and transformers: `python -m training.evaluate`.

transformers runs its own model class on our tensors and positions (its position rule lets text overlap a long video), so
equal answers mean equal models. tests/processors compares our tensors with its processor's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from .data import DIRECTIONS, PROMPTS, Sample, held_out
from .reference import transformers

COUNTS = {"text": 500, "receipt": 100, "clip": 400}
LONGEST = 96  # tokens of the longest receipt, with room to spare


@dataclass(frozen=True)
class Task:
    """One row of the table: samples, and the smallest score that passes (`below`: the score must be less)."""

    name: str
    samples: list[Any]
    limit: float
    below: bool = False

    def part(self, share: float) -> Task:
        return replace(self, samples=self.samples[: max(1, int(len(self.samples) * share))])


def edits(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the Levenshtein distance of two texts, or lists of words."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row, last = [i], row
        for j, y in enumerate(b, 1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y)))
    return row[-1]


def score(samples: list[Sample], answers: list[str]) -> float:
    """Return the character accuracy of texts and receipts, or the share of correct directions of videos."""
    if samples[0].kind == "clip":
        word = [next((d for d in DIRECTIONS if f" {d}." in a), "") for a in answers]
        return float(np.mean([f"moves {w}." in s.answer for w, s in zip(word, samples, strict=True)]))
    wrong = sum(edits(a, s.answer) for a, s in zip(answers, samples, strict=True))
    return max(0.0, 1 - wrong / sum(len(s.answer) for s in samples))


def tasks(share: float) -> list[Task]:
    """Return all held-out sets; `share` < 1 takes that part of each."""
    sets = {kind: held_out(kind, count) for kind, count in COUNTS.items()}
    rng = np.random.default_rng(77)
    shuffled = []
    for s in sets["clip"]:
        order = rng.permutation(len(s.pixels))
        shuffled.append(Sample("clip", s.pixels[order], s.answer))
    unseen = COUNTS["text"] // 5
    found = [
        Task("strings, faces seen", sets["text"][:-unseen], 0.97),
        Task("strings, face not seen", sets["text"][-unseen:], 0.90),
        Task("receipts", sets["receipt"], 0.97),
        Task("direction of motion", sets["clip"], 0.95),
        Task("direction, frames shuffled", shuffled, 0.60, below=True),
    ]
    return [task.part(share) for task in found]


def prompt(kind: str) -> str:
    pad = "<|video_pad|>" if kind == "clip" else "<|image_pad|>"
    return f"<|im_start|>user\n<|vision_start|>{pad}<|vision_end|>{PROMPTS[kind]}<|im_end|>\n<|im_start|>assistant\n"


def request(sample: Sample) -> dict[str, Any]:
    """Make the prompt for `LLM.generate`. A video is given as eight frames at 2 per second."""
    if sample.kind == "clip":
        count = len(sample.pixels)
        media: dict[str, Any] = {
            "video": (sample.pixels, {"fps": 2.0, "total_num_frames": count, "frames_indices": list(range(count))})
        }
    else:
        media = {"image": Image.fromarray(sample.pixels)}
    return {"prompt": prompt(sample.kind), "multi_modal_data": media}


def ours(llm: Any, samples: list[Sample]) -> list[str]:
    from sensorium import SamplingParams

    outputs = llm.generate([request(s) for s in samples], SamplingParams(temperature=0.0, max_tokens=LONGEST), use_tqdm=False)
    return [o.outputs[0].text for o in outputs]


class Transformers:
    """Decode greedily with transformers' class, one sample at a time, with our position ids."""

    def __init__(self, model_dir: Path) -> None:
        from sensorium.engine.frontend.media import MultiModalProcessor, MultiModalSettings
        from sensorium.models.families.qwen2_vl.processing import Qwen25VLProcessingInfo
        from sensorium.processors.files import read_preprocessors

        self.model = transformers().Qwen2_5_VLForConditionalGeneration.from_pretrained(model_dir).eval()
        self.media = MultiModalProcessor(Qwen25VLProcessingInfo(read_preprocessors(model_dir)), MultiModalSettings())
        self.end = set(json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"])

    @torch.inference_mode()
    def __call__(self, sample: Sample) -> str:
        from sensorium.mm.fields import merge
        from sensorium.mm.positions import mrope_positions
        from sensorium.mm.types import PlaceholderRange

        from .tokens import encode, token, tokenizer

        modality = "video" if sample.kind == "clip" else "image"
        (item,) = self.media.open(request(sample)["multi_modal_data"], {}, {}, None)
        ((kwargs, geometry),) = self.media.process(item, None, {}).pieces
        pad = token(f"<|{modality}_pad|>")
        ids = encode(prompt(sample.kind))
        at = ids.index(pad)
        ids[at : at + 1] = [pad] * geometry.num_embeds
        placed = PlaceholderRange(at, geometry.num_embeds)
        positions, delta = mrope_positions(len(ids), [(placed, geometry)], 3)
        inputs: dict[str, Any] = dict(merge([kwargs]))
        kinds = (torch.tensor([ids]) == pad).int() * (2 if modality == "video" else 1)
        out = self.model(
            input_ids=torch.tensor([ids]), position_ids=positions[:, None], mm_token_type_ids=kinds, use_cache=True, **inputs
        )
        answer: list[int] = []
        while len(answer) < LONGEST:
            chosen = int(out.logits[0, -1].argmax())
            if chosen in self.end:
                break
            answer.append(chosen)
            at = torch.full((3, 1, 1), len(ids) + len(answer) - 1 + delta)
            out = self.model(
                input_ids=torch.tensor([[chosen]]), position_ids=at, past_key_values=out.past_key_values, use_cache=True
            )
        return str(tokenizer().decode(answer))


def arguments(description: str | None, model: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, default=Path(model))
    parser.add_argument("--share", type=float, default=1.0, help="part of each held-out set to run")
    parser.add_argument("--quantization", choices=["int8", "int4"], help="as `LLM` takes it")
    parser.add_argument("--no-transformers", action="store_true", help="only our own engine")
    parser.add_argument("--write", type=Path, help="also append the table and the date to this file")
    return parser


def report(
    args: argparse.Namespace,
    tasks: Sequence[Task],
    answer: Callable[[list[Any]], list[str]],
    oracle: Callable[[Any], str] | None,
    score: Callable[[list[Any], list[str]], float],
    note: str,
) -> int:
    """Print a table of both answers' scores with a note below. Return 1 if a row misses its limit, else 0."""
    lines = ["| held-out set | samples | sensorium | transformers | same answers | wanted |", "|---|---|---|---|---|---|"]
    failed = False
    for task in tasks:
        samples = task.samples
        started, mine = time.time(), answer(samples)
        theirs = [oracle(s) for s in samples] if oracle else mine
        value, other = score(samples, mine), score(samples, theirs)
        same = sum(a == b for a, b in zip(mine, theirs, strict=True))
        passed = (value < task.limit) if task.below else (value >= task.limit)
        failed |= not passed
        wanted = f"{'<' if task.below else '>='} {task.limit:.0%}{'' if passed else ' (missed)'}"
        reference = f"{other:.1%} | {same}" if oracle else "- | -"
        lines.append(f"| {task.name} | {len(samples)} | {value:.1%} | {reference} | {wanted} |")
        print(lines[-1], f"({time.time() - started:.0f} s)", flush=True)
    table = "\n".join([*lines, "", note])
    print(table)
    if args.write:
        title = f"# {args.model.name} on held-out data, {time.strftime('%Y-%m-%d')}"
        with args.write.open("a", encoding="utf-8") as file:
            file.write(f"{title}\n\n`make eval-tiny` prints this table.\n\n{table}\n\n")
    return int(failed)


def main() -> int:
    args = arguments(__doc__, "assets/tiny-vl").parse_args()
    from sensorium import LLM

    llm = LLM(str(args.model), quantization=args.quantization)
    oracle = None if args.no_transformers else Transformers(args.model)
    return report(
        args, tasks(args.share), lambda samples: ours(llm, samples), oracle, score, "Chance for the direction is 25 %."
    )


if __name__ == "__main__":
    sys.exit(main())
