"""Ask a question about every image of a folder, in one batch: `python examples/folder_batch.py [--model DIR] [FOLDER]`."""

import argparse
from pathlib import Path

from sensorium import LLM, SamplingParams
from shared import ASSETS, run


def main() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ASSETS / "tiny-vl"))
    parser.add_argument("--question", default="Read the text.")
    parser.add_argument("folder", nargs="?", type=Path, default=ASSETS / "media")
    args = parser.parse_args()

    if not args.folder.is_dir():
        parser.error(f"{args.folder} is not a folder")
    paths = sorted(path for path in args.folder.iterdir() if path.suffix.lower() in {".png", ".jpg", ".jpeg", ".webp"})
    if not paths:
        parser.error(f"there are no images in {args.folder}")
    chats = [
        [{"role": "user", "content": [{"type": "image", "image": path}, {"type": "text", "text": args.question}]}]
        for path in paths
    ]
    answers = list(zip(paths, LLM(args.model).chat(chats, SamplingParams(temperature=0, max_tokens=64)), strict=True))
    for path, answer in answers:
        if not answer.error:
            print(f"{path.name}: {answer.outputs[0].text!r}")
    return [f"{path.name}: {answer.error}" for path, answer in answers if answer.error]


if __name__ == "__main__":
    run(main)
