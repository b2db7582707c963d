"""What is said in sounds, with times: `python examples/transcribe.py --model whisper-tiny.en talk.flac ...`."""

import argparse
from pathlib import Path

from sensorium import LLM
from shared import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("whisper-tiny.en"))
    parser.add_argument("--language", help="found out, where the model can, if it is not given")
    parser.add_argument("sounds", nargs="*", type=Path)
    args = parser.parse_args()
    if not args.model.is_dir():
        print("no speech model ships: hf download openai/whisper-tiny.en --local-dir whisper-tiny.en")
        return
    if not args.sounds:
        parser.error("name sound files to write down")

    for path, heard in zip(args.sounds, LLM(args.model).transcribe(args.sounds, args.language, timestamps=True), strict=True):
        print(f"{path.name} ({heard.language}): {heard.error or heard.text}")
        for part in heard.segments or ():
            print(f"  {part.start:6.2f} s  {part.text}")


if __name__ == "__main__":
    run(main)
