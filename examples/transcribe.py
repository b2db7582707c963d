"""Transcribe audio files with timestamps: `python examples/transcribe.py [--model openai/whisper-tiny.en] [AUDIO ...]`."""

import argparse
from pathlib import Path

from sensorium import LLM
from shared import ASSETS, run


def main() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default=str(ASSETS / "tiny-asr"), help="the shipped model knows few words of synthetic speech"
    )
    parser.add_argument("--language", help="default: detected, if the model can")
    parser.add_argument("files", nargs="*", type=Path, default=sorted((ASSETS / "speech").glob("*.flac")))
    args = parser.parse_args()

    llm = LLM(args.model)
    found = list(zip(args.files, llm.transcribe(args.files, args.language, timestamps=True), strict=True))
    for path, heard in found:
        if not heard.error:
            print(f"{path.name} ({heard.language}): {heard.text}")
        for part in heard.segments or ():
            print(f"  {part.start:6.2f} s  {part.text}")
    return [f"{path.name}: {heard.error}" for path, heard in found if heard.error]


if __name__ == "__main__":
    run(main)
