"""What is said in sounds, with times: `python examples/transcribe.py --model whisper-tiny.en talk.flac ...`."""

import argparse
from pathlib import Path

from sensorium import LLM
from shared import run


def main() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="whisper-tiny.en if it is not given")
    parser.add_argument("--language", help="found out, where the model can, if it is not given")
    parser.add_argument("sounds", nargs="*", type=Path)
    args = parser.parse_args()
    model = args.model or Path("whisper-tiny.en")
    if not args.model and not model.is_dir():
        print("no speech model ships: hf download openai/whisper-tiny.en --local-dir whisper-tiny.en")
        return []
    if not args.sounds:
        parser.error("name sound files to write down")

    found = list(zip(args.sounds, LLM(model).transcribe(args.sounds, args.language, timestamps=True), strict=True))
    for path, heard in found:
        if not heard.error:
            print(f"{path.name} ({heard.language}): {heard.text}")
        for part in heard.segments or ():
            print(f"  {part.start:6.2f} s  {part.text}")
    return [f"{path.name}: {heard.error}" for path, heard in found if heard.error]  # a broken sound fails alone


if __name__ == "__main__":
    run(main)
