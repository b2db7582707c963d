"""Generate tiny-asr's training clips as shards of log-mel frames: `python -m training.asr.dataset --shards 5 10 90`.

A shard holds 512 clips of one stage of the curriculum. Shards that exist are kept, so the command can be run again for more.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sensorium.processors.mel import MelSpec, log_mel
from torch import Tensor

from . import speech
from .grammar import Rng, pick
from .speech import Clip, Voice
from .tokens import answer, encode, letters, token

FRAMES = speech.SECONDS * 100
SPEC = MelSpec(max_samples=speech.WINDOW)
SHARD, IGNORE = 512, -100  # clips of a shard, label without a loss
QUIETEST = -1.5  # log-mel value of digital silence


@dataclass(frozen=True)
class Stage:
    """A stage of the curriculum: weights of the kinds of text, shares of clips with two utterances and without speech."""

    kinds: dict[str, float]
    pairs: float = 0.0
    silent: float = 0.0


SPOKEN = {
    "word": 1,
    "digits": 2,
    "number": 2,
    "date": 2,
    "time": 1.5,
    "amount": 1.5,
    "command": 4,
    "question": 3,
    "sentence": 4,
}
SHORT = ("word", "digits", "time", "amount", "command")  # kinds of a second utterance
STAGES = (Stage({"word": 7, "digits": 3}), Stage(SPOKEN), Stage(SPOKEN, pairs=0.2, silent=0.06))


def features(samples: np.ndarray) -> Tensor:
    """Return the log-mel frames `[frames, 80]` of the audio, without those of the padding after it."""
    frames = min(FRAMES, SPEC.num_frames(len(samples)) + 2)
    return log_mel(torch.from_numpy(samples), SPEC, speech.WINDOW, frames)


def draw_clip(rng: Rng, stage: Stage, voice: Voice | None = None, clean: bool = False) -> Clip:
    """Return a clip of the stage; `voice` and `clean` as `speech.clip` takes them."""
    if rng.random() < stage.silent:
        return speech.silence(rng)
    names, shares = list(stage.kinds), np.array(list(stage.kinds.values()))
    kind = str(rng.choice(names, p=shares / shares.sum()))
    return speech.clip(rng, kind, voice, pick(rng, SHORT) if rng.random() < stage.pairs else None, clean)


def write_shard(path: Path, rng: Rng, stage: Stage) -> None:
    clips = [draw_clip(rng, stage) for _ in range(SHARD)]
    rows = [features(one.samples).half().numpy() for one in clips]
    parts = json.dumps([one.parts for one in clips])
    new = path.with_suffix(".new.npz")
    np.savez(new, rows=np.concatenate(rows), lengths=[len(r) for r in rows], parts=np.array(parts))
    new.replace(path)


@dataclass(frozen=True)
class Sample:
    """Log-mel frames `[frames, 80]` (float16), and the clip's utterances without its samples."""

    rows: np.ndarray
    clip: Clip


def read_shard(path: Path) -> list[Sample]:
    with np.load(path) as data:
        rows = np.split(data["rows"], np.cumsum(data["lengths"])[:-1])
        parts = json.loads(str(data["parts"]))
    nothing = np.zeros(0, np.float32)
    return [Sample(r, Clip(nothing, tuple((a, b, t) for a, b, t in p))) for r, p in zip(rows, parts, strict=True)]


@dataclass(frozen=True)
class Batch:
    """`frames [b, 80, n]`, n even; `ids`, `labels` `[b, tokens]`; CTC labels of all clips in `letters`, and their `counts`."""

    frames: Tensor
    ids: Tensor
    labels: Tensor
    letters: Tensor
    counts: Tensor


def collate(samples: list[Sample], rng: Rng, full: bool, previous: float = 0.0, timed: float = 0.0) -> Batch:
    """Pad clips with silence, mask bands and frames at random (SpecAugment), and make the decoder's tokens.

    Args:
        full: pad to the whole window instead of to the longest clip.
        previous: share of clips with the text of another clip before `<|startoftranscript|>`.
        timed: share of clips with timestamps.
    """
    longest = max(len(s.rows) for s in samples)
    length = FRAMES if full else min(FRAMES, (longest + int(rng.integers(2, 40))) // 2 * 2)
    frames = np.empty((len(samples), length, 80), np.float32)
    rows: list[tuple[list[int], list[int]]] = []
    for i, sample in enumerate(samples):
        x = sample.rows.astype(np.float32)
        frames[i] = max(float(x.max()) - 2, QUIETEST)
        frames[i, : len(x)] = x
        for _ in range(int(rng.integers(0, 3))):
            band, at = int(rng.integers(0, 70)), int(rng.integers(0, len(x)))
            frames[i, :, band : band + int(rng.integers(1, 11))] = x.mean()
            frames[i, at : at + int(rng.integers(1, 9))] = x.mean()
        tokens = answer(sample.clip, timed=rng.random() < timed)
        before = []
        if rng.random() < previous:
            other = samples[int(rng.integers(len(samples)))].clip.text
            before = [token("<|startofprev|>"), *encode(f" {other}")]
        first = token("<|nospeech|>") if not sample.clip.parts else tokens[0]
        inputs = [*before, token("<|startoftranscript|>"), *tokens[:-1]]
        rows.append((inputs, [IGNORE] * len(before) + [first, *tokens[1:]]))
    width = max(len(inputs) for inputs, _ in rows)
    ids = torch.full((len(rows), width), token("<|endoftext|>"))
    labels = torch.full_like(ids, IGNORE)
    for i, (inputs, wanted) in enumerate(rows):
        ids[i, : len(inputs)], labels[i, : len(wanted)] = torch.tensor(inputs), torch.tensor(wanted)
    spelled = [letters(s.clip.text) for s in samples]
    flat = torch.tensor([c for one in spelled for c in one], dtype=torch.long)
    return Batch(torch.from_numpy(frames).transpose(1, 2), ids, labels, flat, torch.tensor([len(one) for one in spelled]))


def length_buckets(samples: list[Sample], rng: Rng, rows: int, max_size: int = 64) -> Iterator[list[Sample]]:
    """Yield all samples in buckets of similar length, in random order. A padded bucket has at most `rows` frames."""
    ordered = sorted(samples, key=lambda s: len(s.rows) * rng.uniform(0.92, 1.08))
    found: list[list[Sample]] = [[]]
    for sample in ordered:
        if len(found[-1]) == max_size or (len(found[-1]) + 1) * len(sample.rows) > rows:
            found.append([])
        found[-1].append(sample)
    for i in rng.permutation(len(found)):
        if found[i]:
            yield found[i]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/tiny-asr-training/data"))
    parser.add_argument("--shards", type=int, nargs=len(STAGES), default=[5, 10, 90], help="shards of each stage")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    for stage, count in enumerate(args.shards):
        for index in range(count):
            path = args.out / f"{stage}-{index:03d}.npz"
            if not path.exists():
                write_shard(path, np.random.default_rng([2, stage, index]), STAGES[stage])
                print(path, flush=True)


if __name__ == "__main__":
    main()
