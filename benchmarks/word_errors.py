"""Word errors of a Whisper model here and in faster-whisper: `python -m benchmarks.word_errors MODEL FOLDER --peer CT2`.

FOLDER has manifest.jsonl with file, text and lang. CT2 is the model as CTranslate2 stores it, and --peer-python an interpreter
with faster-whisper. Both decode in float32 with their default options. Clips in other languages are left out.
"""

from __future__ import annotations

import json
from pathlib import Path

from training.evaluate import edits

from .quality import words
from .throughput import machine, put
from .whisper_peer import arguments, manifest, peer

SECTION = "Word errors"
NOTE = (
    "The English clips, and those without speech, in which every word is an error. Both systems decode in float32 with their "
    "default options. A number in digits is an error for both. Goal: at most 0.1 points above faster-whisper."
)
GOAL = 0.001
BEAMS = (1, 5)
PEER = """
import json, sys
from faster_whisper import WhisperModel

model = WhisperModel(sys.argv[1], device="cpu", compute_type="float32")
texts = [
    ["".join(part.text for part in model.transcribe(file, language="en", beam_size=size)[0]) for file in sys.argv[3:]]
    for size in json.loads(sys.argv[2])
]
print(json.dumps(texts))
"""


def main() -> None:
    args = arguments(__doc__)
    entries = [entry for entry in manifest(args.folder) if entry["lang"] in ("", "en")]
    files = [str(args.folder / entry["file"]) for entry in entries]
    found = {"sensorium": ours(args.model, files)}
    if args.peer:
        found["faster-whisper"] = peer(args, PEER, json.dumps(BEAMS), *files)
    lines = table(found, entries)
    print("\n".join(lines))
    if args.write:
        put(SECTION, "\n".join([machine(), "", NOTE, "", *lines]))


def table(found: dict[str, list[list[str]]], entries: list[dict[str, str]]) -> list[str]:
    """Return the rows of the table. `found`: for each system and number of beams, the text of each clip."""
    wanted = [words(entry["text"]) for entry in entries]
    total = sum(map(len, wanted))
    lines = ["| beams | system | words | wrong | word error rate | errors by clip |", "|---|---|---|---|---|---|"]
    for number, size in enumerate(BEAMS):
        wrong = {
            name: [edits(words(text), right) for text, right in zip(texts[number], wanted, strict=True)]
            for name, texts in found.items()
        }
        for name, counts in wrong.items():
            clips = ", ".join(f"{entry['file']} {n}" for entry, n in zip(entries, counts, strict=True) if n)
            total_wrong, missed = sum(counts), sum(counts) - sum(wrong.get("faster-whisper", counts)) > GOAL * total
            rate = f"{total_wrong / total:.2%}{' (missed)' if missed else ''}"
            lines.append(f"| {size} | {name} | {total} | {total_wrong} | {rate} | {clips} |")
    return lines


def ours(model: Path, files: list[str]) -> list[list[str]]:
    from sensorium import LLM

    with LLM(model, device="cpu", dtype="float32") as llm:
        return [[one.text for one in llm.transcribe(files, "en", beam_size=n, use_tqdm=False)] for n in BEAMS]


if __name__ == "__main__":
    main()
