"""`sensorium demo`: the shipped model reads the shipped pictures and clip. Knows the files, not the model."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..engine.types import RequestOutput

EXAMPLE = "sensorium demo --out out"
ASSETS = Path(__file__).resolve().parents[1] / "assets"
ZOOM = 3
CLIPS = (".mp4",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", default=str(ASSETS / "tiny-vl"), help="default: the model that ships")
    parser.add_argument("--media", metavar="DIR", type=Path, default=ASSETS / "media", help="default: the media that ship")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("out"), help="where the annotated picture goes")


def run(args: argparse.Namespace) -> int:
    """0 when every file was answered, right or wrong; the table says which."""
    from ..engine.llm import LLM
    from ..engine.sampling_params import SamplingParams
    from ..mm.errors import SensoriumError

    wanted = read_answers(args.media)
    make_folder(args.out)
    started = time.perf_counter()
    llm = LLM(args.model)
    loaded = time.perf_counter()
    chats = [message(args.media / name, entry["prompt"]) for name, entry in wanted.items()]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=96))
    done = time.perf_counter()
    print(table(wanted, outputs))
    print(timings(outputs, loaded - started, done - loaded))
    for name, output in zip(wanted, outputs, strict=True):
        if output.error:
            raise SensoriumError(f"{name}: {output.error}")
    print(f"annotated pictures: {save_annotated(args, wanted, outputs)}")
    return 0


def read_answers(folder: Path) -> dict[str, dict[str, str]]:
    """File name -> "prompt" and expected "answer", from answers.json. ConfigError without it, or without a picture in it."""
    from ..mm.errors import ConfigError

    path = folder / "answers.json"
    if not path.is_file():
        raise ConfigError(f"{path} is not there; --media is a folder with pictures, clips and their answers.json")
    found: dict[str, dict[str, str]] = json.loads(path.read_text("utf-8"))
    if all(Path(name).suffix in CLIPS for name in found):
        raise ConfigError(f"{path} names no picture to draw on; add one")
    return found


def make_folder(path: Path) -> None:
    """ConfigError if it cannot be made: said before the work, not after it."""
    from ..mm.errors import ConfigError

    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be made ({error.strerror}); give a folder that can be written") from error


def message(path: Path, prompt: str) -> list[dict[str, Any]]:
    kind = "video" if path.suffix in CLIPS else "image"
    return [{"role": "user", "content": [{"type": kind, kind: path}, {"type": "text", "text": prompt}]}]


def table(wanted: dict[str, dict[str, str]], outputs: list[RequestOutput]) -> str:
    """One line per file; line breaks of a receipt are shown as ` / `."""
    rows = [("file", "answer", "expected", "ok")]
    for (name, entry), output in zip(wanted.items(), outputs, strict=True):
        answer = answer_of(output)
        rows.append((name, flat(answer), flat(entry["answer"]), "yes" if answer == entry["answer"] else "no"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def answer_of(output: RequestOutput) -> str:
    return output.error or output.outputs[0].text.strip()


def flat(text: str) -> str:
    return " / ".join(text.splitlines())


def timings(outputs: list[RequestOutput], load: float, total: float) -> str:
    """Milliseconds per stage, summed over the requests; they overlap, so the sum is not the time that passed."""
    stages: dict[str, float] = {}
    for output in outputs:
        for stage, seconds in output.timings.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    parts = ", ".join(f"{stage} {seconds * 1000:.0f}" for stage, seconds in stages.items())
    tokens = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    return f"load {load:.2f} s, {len(outputs)} requests with {tokens} tokens in {total:.2f} s\nms per stage, summed: {parts}"


def save_annotated(args: argparse.Namespace, wanted: dict[str, dict[str, str]], outputs: list[RequestOutput]) -> Path:
    """All pictures below each other, each with the grid of its embeddings and the answer. The path written."""
    from PIL import Image

    from ..engine.doctor import embedding_grid

    drawn: list[Image.Image] = []
    for name, output in zip(wanted, outputs, strict=True):
        path = args.media / name
        if path.suffix not in CLIPS:
            with Image.open(path) as file:
                grid = embedding_grid(args.model, (file.height, file.width))
                drawn.append(annotated(file.convert("RGB"), grid, answer_of(output)))
    sheet = Image.new("RGB", (max(p.width for p in drawn), sum(p.height for p in drawn)), "white")
    top = 0
    for picture in drawn:
        sheet.paste(picture, (0, top))
        top += picture.height
    target: Path = args.out / "demo.png"
    sheet.save(target)
    return target


def annotated(picture: Image, grid: tuple[int, int], answer: str) -> Image:
    """The picture enlarged, `grid` (rows, columns) of embeddings drawn over it, the answer below."""
    from PIL import Image, ImageDraw, ImageFont

    big = picture.resize((picture.width * ZOOM, picture.height * ZOOM), Image.Resampling.NEAREST)
    font, lines = ImageFont.load_default(18), answer.splitlines() or [""]
    out = Image.new(
        "RGB", (max(big.width, *(int(font.getlength(line)) + 16 for line in lines)), big.height + 24 * len(lines) + 12)
    )
    out.paste(big, (0, 0))
    draw = ImageDraw.Draw(out)
    for row in range(1, grid[0]):
        draw.line((0, row * big.height / grid[0], big.width, row * big.height / grid[0]), fill=(230, 60, 60))
    for column in range(1, grid[1]):
        draw.line((column * big.width / grid[1], 0, column * big.width / grid[1], big.height), fill=(230, 60, 60))
    for i, line in enumerate(lines):
        draw.text((8, big.height + 6 + 24 * i), line, font=font, fill=(120, 230, 140))
    return out
