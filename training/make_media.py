"""Draw the media in assets/media from a seed used nowhere else: `python -m training.make_media`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

from .data import FACES, PROMPTS, Sample, clip, draw_lines, random_string, receipt_lines, text_size

SEED = 20_261_121
FPS = 2.0


def printed(rng: np.random.Generator, kind: str, lines: list[str], size: int, face: str) -> Sample:
    """Draw lines on a canvas with a small margin."""
    width, height = text_size(lines, face, size)
    return draw_lines(lines, face, size, (width + 14, height + 12), rng, kind, soil=0.5)


def samples() -> dict[str, Sample]:
    """Return file name -> content."""
    rng, found = np.random.default_rng(SEED), {}
    for i, length in enumerate((5, 7, 9)):
        found[f"line{i + 1}.png"] = printed(rng, "text", [random_string(rng, length)], 28, FACES[i])
    for i, count in enumerate((3, 4)):
        found[f"receipt{i + 1}.png"] = printed(rng, "receipt", receipt_lines(rng, count), 20, FACES[i])
    return found | {"clip.mp4": clip(rng)}


def write_clip(path: Path, frames: np.ndarray) -> None:
    """Write `frames` uint8 `[n, h, w, 3]` as MPEG-4 at FPS."""
    import cv2

    height, width = frames.shape[1:3]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), FPS, (width, height))
    if not writer.isOpened():
        raise SystemExit(f"this OpenCV cannot write {path}")
    for frame in frames:
        writer.write(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
    writer.release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("assets/media"))
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    answers = {}
    for name, sample in samples().items():
        if sample.kind == "clip":
            write_clip(out / name, sample.pixels)
        else:
            Image.fromarray(sample.pixels).save(out / name)
        answers[name] = {"prompt": PROMPTS[sample.kind], "answer": sample.answer}
    (out / "answers.json").write_text(json.dumps(answers, indent=2) + "\n")


if __name__ == "__main__":
    main()
