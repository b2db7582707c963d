"""Transcribe audio files with timestamps: `python examples/transcribe.py --model whisper-tiny.en talk.flac ...`."""

import argparse
from pathlib import Path

from sensorium import LLM
from shared import run


def main() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", help="a folder, or a name such as openai/whisper-tiny.en (default: the folder whisper-tiny.en)"
    )
    parser.add_argument("--language", help="default: detected, if the model can")
    parser.add_argument("files", nargs="*", type=Path)
    args = parser.parse_args()
    model = args.model or "whisper-tiny.en"
    if not args.model and not Path(model).is_dir():
        print("no speech model ships; give --model openai/whisper-tiny.en to download one")
        return []
    if not args.files:
        parser.error("name audio files to transcribe")

    found = list(zip(args.files, LLM(model).transcribe(args.files, args.language, timestamps=True), strict=True))
    for path, heard in found:
        if not heard.error:
            print(f"{path.name} ({heard.language}): {heard.text}")
        for part in heard.segments or ():
            print(f"  {part.start:6.2f} s  {part.text}")
    return [f"{path.name}: {heard.error}" for path, heard in found if heard.error]


if __name__ == "__main__":
    run(main)
