"""Words lost or doubled where audio is cut into windows: `python -m benchmarks.seams MODEL FOLDER --shifts 0 0.25 0.5`.

The ten clips in FOLDER are joined without silence, in random order and repeatedly, until they last --seconds. Each shift drops
that many seconds at the start, which moves every cut; "--shifts all" stands for those of 0.25 s each, up to a window's length.
Results are appended to --log; a run continues where the last one ended.

A window whose samples an earlier shift of the same run had is not computed again. Windows begin and end at frames of the voice
detector, so that these are mostly shifts whose frames are at the same samples: such shifts run one after another.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .throughput import ROOT, machine, put

SECTION = "Seams"
NOTE = (
    "The text of the joined audio is compared with the texts of the ten clips, each transcribed alone. An edit is a "
    "difference that changes the number of words; it is at a seam if it is within 1 s of a cut. It is the model's "
    "if the cut is in silence and transformers' greedy text of a window that contains these words has such an edit, too. In "
    "all other edits at seams, sensorium lost or doubled words. Goal: 0."
)
RATE, SECONDS = 16_000, 1200
WINDOW = 30.0  # seconds
CLIPS = ("jfk", "lj001_0001", "lj001_0002", "lj001_0003", "lj001_0005", "lj001_0007", "espeak_en")
PARTS = ("long_two_speakers", ((45.37, 51.06), (65.63, 72.73), (85.82, 91.87)))
STEP = 0.25  # seconds between the shifts of a whole sweep
NEAR = 1.0  # seconds between an edit and a cut
MARGIN = 0.1  # seconds; accuracy of the times of words
MODES: dict[str, dict[str, Any]] = {
    "pauses, speech only": {},
    "pauses, all audio": {"vad": False},
    "no pauses, overlapping": {"vad": lambda rate: lambda samples: samples.new_ones(-(-len(samples) // round(0.032 * rate)))},
    "sequential": {"sequential": True, "timestamps": "segment"},
}


def read_clips(folder: Path) -> list[np.ndarray]:
    import soundfile

    found = [soundfile.read(folder / f"{name}.flac", dtype="float32")[0] for name in CLIPS]
    long = soundfile.read(folder / f"{PARTS[0]}.flac", dtype="float32")[0]
    return [*found, *(long[round(a * RATE) : round(b * RATE)] for a, b in PARTS[1])]


def order_of(clips: Sequence[np.ndarray], seconds: float) -> list[int]:
    shuffle, found, total = random.Random(0), list[int](), 0
    while total < seconds * RATE:
        shuffle.shuffle(part := list(range(len(clips))))
        found += part
        total += sum(map(len, clips))
    return found


def words(text: str) -> list[str]:
    return re.sub(r"[^\w ]", "", text.replace("-", " ")).casefold().split()


def edits(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int, int, int]]:
    """Return the differences of two lists of words: the range in each."""
    cost = np.zeros((len(a) + 1, len(b) + 1), np.int32)
    cost[0] = place = np.arange(len(b) + 1)
    ids = {word: number for number, word in enumerate({*a, *b})}
    right = np.array([ids[word] for word in b])
    for i, word in enumerate(a, 1):
        row = np.append(i, np.minimum(cost[i - 1, 1:] + 1, cost[i - 1, :-1] + (right != ids[word])))
        cost[i] = np.minimum.accumulate(row - place) + place
    i, j, found = len(a), len(b), list[tuple[int, int, int, int]]()
    while i or j:
        if i and j and a[i - 1] == b[j - 1] and cost[i, j] == cost[i - 1, j - 1]:
            i, j = i - 1, j - 1
            continue
        end, own_end = i, j
        while (i or j) and not (i and j and a[i - 1] == b[j - 1] and cost[i, j] == cost[i - 1, j - 1]):
            if i and j and cost[i, j] == cost[i - 1, j - 1] + 1:
                i, j = i - 1, j - 1
            elif i and cost[i, j] == cost[i - 1, j] + 1:
                i -= 1
            else:
                j -= 1
        found.append((i, end, j, own_end))
    return found[::-1]


def count_edits(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int, int, int]]:
    """Return the differences that change the number of words; words joined or split differently are equal."""
    found = [e for e in edits(a, b) if e[1] - e[0] != e[3] - e[2]]
    return [e for e in found if "".join(a[e[0] : e[1]]) != "".join(b[e[2] : e[3]])]


class Judge:
    """Decides whether an edit is the model's: whether transformers' greedy text of a window has it, too."""

    def __init__(self, model: Path) -> None:
        sys.path.insert(0, str(ROOT / "tests" / "helpers"))
        from oracle import ensure_torchvision

        ensure_torchvision()
        from transformers import WhisperForConditionalGeneration, WhisperProcessor

        self._processor = WhisperProcessor.from_pretrained(model)
        self._model = WhisperForConditionalGeneration.from_pretrained(model, dtype="float32").eval()
        self._texts: dict[tuple[bytes, bool], list[str]] = {}

    def text(self, audio: np.ndarray, start: float, end: float, timed: bool) -> list[str]:
        import torch

        samples = audio[round(start * RATE) : round(end * RATE)]
        key = hashlib.sha256(samples.tobytes()).digest(), timed
        if key not in self._texts:
            features = self._processor(samples, sampling_rate=RATE, return_tensors="pt").input_features
            with torch.inference_mode():
                tokens = self._model.generate(features, do_sample=False, num_beams=1, return_timestamps=timed)
            self._texts[key] = words(self._processor.decode(tokens[0], skip_special_tokens=True))
        return self._texts[key]

    def is_models(
        self, audio: np.ndarray, spoken: list[tuple[float, float, str]], edit: Sequence[int], windows: Any, timed: bool
    ) -> bool:
        """Return whether transformers' text of one of the windows has the edit. The window contains the edit's words."""
        for start, end in windows:
            inside = [i for i, word in enumerate(spoken) if word[0] >= start - MARGIN and word[1] <= end + MARGIN]
            if not inside or edit[0] < inside[0] or edit[1] > inside[-1] + 1:
                continue
            found = edits([spoken[i][2] for i in inside], self.text(audio, start, end, timed))
            at = edit[0] - inside[0], edit[1] - inside[0]
            if any(e[0] <= at[1] and e[1] >= at[0] and e[1] - e[0] != e[3] - e[2] for e in found):
                return True
        return False


def is_quiet(audio: np.ndarray, at: float) -> bool:
    """Return whether 0.1 s around a time are at least 20 dB below the 4 s around it. Times of words include pauses."""
    near, around = (np.square(audio[max(0, round((at - s) * RATE)) : round((at + s) * RATE)]).mean() for s in (0.05, 2.0))
    return bool(near <= around / 100)


def equal_losses(edit: Sequence[int], said: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the edit and, if words are only lost, the later places at which the loss of as many words leaves the same text."""
    found, (first, last, *own) = [tuple(edit)], edit
    while own[0] == own[1] and last < len(said) and said[first] == said[last]:
        first, last = first + 1, last + 1
        found.append((first, last, *own))
    return found


def judge(row: dict[str, Any], audio: np.ndarray, spoken: list[tuple[float, float, str]], judge: Judge) -> list[Any]:
    """Return the edits of a run: the place in seconds, the words spoken, the words found, and "inside", "model" or "ours"."""
    found, cuts, timed = words(row["text"]), list(pairwise(row["windows"])), "timestamps" in MODES[row["mode"]]
    result, inner = [], [at for left, right in cuts if right[0] >= left[1] for at in (left[1], right[0])]
    for edit in count_edits([word for _, _, word in spoken], found):
        begin, end = spoken[max(0, edit[0] - 1)][1], spoken[min(len(spoken) - 1, edit[1])][0]
        at_seam = any(begin <= max(left[1], right[0]) + NEAR and end >= min(left[1], right[0]) - NEAR for left, right in cuts)
        if end < 1.5 or begin > len(audio) / RATE - 1.5:
            continue
        whose = "inside"
        if at_seam:
            near = [(w[0], w[1]) for w in row["windows"] if w[0] <= end + 3 and w[1] >= begin - 3]
            if row["mode"] == "sequential":  # its windows are as long as the model's, and their text ends with a segment
                near = [(start, min(start + WINDOW, len(audio) / RATE)) for start, _ in near]
            beside = spoken[max(0, edit[0] - 1) : edit[1] + 1]
            is_cut = any(a < at < b and not is_quiet(audio, at) for a, b, _ in beside for at in inner)
            same = equal_losses(edit, [word for *_, word in spoken])
            is_models = not is_cut and any(judge.is_models(audio, spoken, one, near, timed) for one in same)
            whose = "model" if is_models else "ours"
        before, after = [w for *_, w in spoken[max(0, edit[0] - 3) : edit[0]]], [w for *_, w in spoken[edit[1] : edit[1] + 3]]
        lost = [w for *_, w in spoken[edit[0] : edit[1]]]
        result.append([round(begin, 2), round(end, 2), before, lost, found[edit[2] : edit[3]], after, whose])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shifts", nargs="*", default=["0"], help="seconds, or all")
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--batch", type=int, default=1, help="shifts that are transcribed in one call")
    parser.add_argument("--log", type=Path, default=Path("seams.jsonl"))
    parser.add_argument("--write", action="store_true", help="put the table of the log into benchmarks/README.md")
    args = parser.parse_args()
    args.shifts = all_shifts() if args.shifts == ["all"] else [float(shift) for shift in args.shifts]
    clips = read_clips(args.folder)
    rows = [json.loads(line) for line in args.log.read_text().splitlines()] if args.log.exists() else []
    order = order_of(clips, args.seconds)
    whole = np.concatenate([clips[i] for i in order])
    run(args, clips, order, whole, rows)
    if args.write:
        what = f"{args.model.name} in float32, ten clips joined"
        put(SECTION, "\n".join([f"{machine()}; {what}", "", NOTE, "", *table(rows)]))


def all_shifts() -> list[float]:
    return [STEP * number for number in range(round(WINDOW / STEP))]


def by_frames(shifts: Sequence[float], frame: int) -> list[float]:
    """Sort shifts so that those after which the frames are at the same samples follow one another."""
    return sorted(shifts, key=lambda shift: (round(shift * RATE) % frame, shift))


def remember_windows(transcribe: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    """Return `transcribe` with a store of the answers that passed at once, which depend on the samples alone.

    `counts` counts windows by "computed" and "stored".
    """
    store: dict[tuple[Any, ...], Any] = {}

    async def remembered(llm: Any, window: Any, job: Any, *rest: Any) -> Any:
        pauses = tuple((a - window.start, b - window.start) for a, b in window.pauses)
        samples = hashlib.sha256(window.samples.numpy().tobytes()).digest()
        key = samples, pauses, job.options.times, job.options.sequential, window.next_start >= window.end
        counts["stored" if key in store else "computed"] += 1
        found = store.get(key) or await transcribe(llm, window, job, *rest)
        if len(found.result.attempts) == 1 and not found.output.error:
            store[key] = found
        times = [value / job.rate for value in (window.start, window.end, window.overlap)]
        result = replace(found.result, start=times[0], end=times[1], overlap=times[2])
        return replace(found, result=result, window=window)

    return remembered


def run(args: argparse.Namespace, clips: list[np.ndarray], order: list[int], whole: np.ndarray, rows: list[Any]) -> None:
    from sensorium import LLM
    from sensorium.pipelines import transcribe
    from sensorium.pipelines.speech.vad import frame_size

    counts = Counter[str]()
    transcribe._transcribe_part = remember_windows(transcribe._transcribe_part, counts)
    done = {(row["mode"], row["shift"]) for row in rows}
    shifts = by_frames(args.shifts, frame_size(RATE))
    wanted = [(mode, shift) for shift in shifts for mode in args.modes if (mode, shift) not in done]
    if not wanted:
        return
    referee = Judge(args.model)
    with LLM(args.model, device="cpu", dtype="float32", max_num_seqs=8) as llm:
        spoken, at = list[tuple[float, float, str]](), 0
        parts = llm.transcribe([(clip, RATE) for clip in clips], timestamps="word", vad=False, use_tqdm=False)
        timed = [[word for segment in part.segments or () for word in segment.words or ()] for part in parts]
        texts = [[(one.start, one.end, word) for one in own for word in words(one.word)] for own in timed]
        for i in order:
            spoken += [(at / RATE + start, at / RATE + end, word) for start, end, word in texts[i]]
            at += len(clips[i])
        groups = [[s for m, s in wanted if m == mode] for mode in args.modes]
        for mode, own in zip(args.modes, groups, strict=True):
            for at in range(0, len(own), args.batch):
                transcribe_shifts(llm, mode, own[at : at + args.batch], whole, spoken, referee, rows, args.log)
                print(f"windows: {dict(counts)}", flush=True)


def transcribe_shifts(
    llm: Any, mode: str, shifts: list[float], whole: np.ndarray, spoken: list[Any], referee: Judge, rows: list[Any], log: Path
) -> None:
    """Transcribe the audio at several shifts in one call, and append a row for each to `rows` and to the log."""
    began, audios = time.time(), [whole[round(shift * RATE) :] for shift in shifts]
    found = llm.transcribe([(audio, RATE) for audio in audios], use_tqdm=False, **MODES[mode])
    took = (time.time() - began) / len(shifts)
    for shift, audio, one in zip(shifts, audios, found, strict=True):
        if one.error:
            raise RuntimeError(f"{mode}, {shift} s: {one.error}")
        row: dict[str, Any] = {"mode": mode, "shift": shift, "seconds": len(whole) // RATE, "took": took, "text": one.text}
        row["windows"] = [(w.start, w.end, w.overlap, w.text, len(w.attempts), w.finish_reason) for w in one.windows]
        here = [(a - shift, b - shift, word) for a, b, word in spoken if a >= shift]
        row["words"], row["edits"] = len(here), judge(row, audio, here, referee)
        rows.append(row)
        with log.open("a") as file:
            file.write(json.dumps(row) + "\n")
        whose = [edit[-1] for edit in row["edits"]]
        counts = {name: whose.count(name) for name in sorted(set(whose))}
        print(mode, shift, len(one.windows), counts, f"{took:.0f} s", flush=True)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| windows | seconds | shifts | seams | words | model's edits | lost or doubled at seams |", "|---" * 7 + "|"]
    for mode, seconds in sorted(
        {(row["mode"], row["seconds"]) for row in rows}, key=lambda one: (list(MODES).index(one[0]), one[1])
    ):
        own = [row for row in rows if (row["mode"], row["seconds"]) == (mode, seconds)]
        whose = [edit[-1] for row in own for edit in row["edits"]]
        seams, total = sum(len(row["windows"]) - 1 for row in own), sum(row["words"] for row in own)
        shifts = ", ".join(f"{row['shift']:g}" for row in sorted(own, key=lambda row: float(row["shift"])))
        models = f"{whose.count('model')} at seams, {whose.count('inside')} inside windows"
        lines.append(f"| {mode} | {seconds:,} | {shifts} s | {seams:,} | {total:,} | {models} | {whose.count('ours')} |")
    return lines


if __name__ == "__main__":
    main()
