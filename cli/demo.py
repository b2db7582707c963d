"""`sensorium demo`: read the shipped images, video and speech with the shipped models."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import add_model_name
from .transcribe import SHIPPED_MODEL

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..engine.outputs import RequestOutput

EXAMPLE = "sensorium demo --out out"
ASSETS = Path(__file__).resolve().parents[1] / "assets"
MEDIA, SPEECH = ASSETS / "media", ASSETS / "speech"
ZOOM = 3
VIDEO_SUFFIXES = (".mp4",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_name(parser, str(ASSETS / "tiny-vl"))
    parser.add_argument(
        "--media",
        metavar="DIR",
        type=Path,
        default=MEDIA,
        help="folder of images, videos and answers.json (default: the shipped media, and the shipped speech)",
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("out"), help="folder for the annotated image (default: out)"
    )


def run(args: argparse.Namespace) -> int:
    """Return 0 if every file was answered, right or wrong; the table says which answers are right."""
    from ..callers.errors import SensoriumError
    from ..engine.sampling_params import SamplingParams
    from ..pipelines.llm import LLM

    expected = read_answers(args.media)
    make_folder(args.out)
    started = time.perf_counter()
    llm = LLM(args.model, revision=args.revision, offline=args.offline)
    loaded = time.perf_counter()
    chats = [message(args.media / name, entry["prompt"]) for name, entry in expected.items()]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=96))
    done = time.perf_counter()
    wanted = {name: entry["answer"] for name, entry in expected.items()}
    answers = list(map(answer_text, outputs))
    if args.media == MEDIA:
        spoken = json.loads((SPEECH / "answers.json").read_text("utf-8"))
        wanted |= spoken
        answers += [transcript.text for transcript in LLM(SHIPPED_MODEL).transcribe([SPEECH / name for name in spoken])]
    print(table(wanted, answers))
    print(timings(outputs, loaded - started, done - loaded))
    for name, output in zip(expected, outputs, strict=True):
        if output.error:
            raise SensoriumError(f"{name}: {output.error}", code=output.error.code)
    print(f"annotated image: {save_annotated(args, llm.config.model, expected, outputs)}")
    return 0


def read_answers(folder: Path) -> dict[str, dict[str, str]]:
    """Return "prompt" and expected "answer" by file name, from answers.json.

    Raises:
        ConfigError: there is no answers.json, or it names no image.
    """
    from ..callers.errors import ConfigError

    path = folder / "answers.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; --media needs a folder with images, videos and answers.json", param="media")
    answers: dict[str, dict[str, str]] = json.loads(path.read_text("utf-8"))
    if all(Path(name).suffix in VIDEO_SUFFIXES for name in answers):
        raise ConfigError(f"{path} names no image to draw on; add one", param="media")
    return answers


def make_folder(path: Path) -> None:
    """Create the output folder. Raise ConfigError if that fails."""
    from ..callers.errors import ConfigError

    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"--out {path} cannot be created ({error.strerror}); give a folder that can be written"
        raise ConfigError(reason, param="out") from error


def message(path: Path, prompt: str) -> list[dict[str, Any]]:
    kind = "video" if path.suffix in VIDEO_SUFFIXES else "image"
    return [{"role": "user", "content": [{"type": kind, kind: path}, {"type": "text", "text": prompt}]}]


def table(expected: dict[str, str], answers: list[str]) -> str:
    """Return one line per file. Line breaks in an answer become ` / `."""
    rows = [("file", "answer", "expected", "ok")]
    for (name, wanted), answer in zip(expected.items(), answers, strict=True):
        rows.append((name, on_one_line(answer), on_one_line(wanted), "yes" if answer == wanted else "no"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def answer_text(output: RequestOutput) -> str:
    return output.outputs[0].text.strip() if output.error is None else output.error.message


def on_one_line(text: str) -> str:
    return " / ".join(text.splitlines())


def timings(outputs: list[RequestOutput], load: float, total: float) -> str:
    """Return milliseconds per stage, summed over requests. Requests overlap, so the sum exceeds the time that passed."""
    stages: dict[str, float] = {}
    for output in outputs:
        for stage, seconds in output.timings.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    parts = ", ".join(f"{stage} {seconds * 1000:.0f}" for stage, seconds in stages.items())
    tokens = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    return f"load {load:.2f} s, {len(outputs)} requests with {tokens} tokens in {total:.2f} s\nms per stage, summed: {parts}"


def save_annotated(
    args: argparse.Namespace, model: str, expected: dict[str, dict[str, str]], outputs: list[RequestOutput]
) -> Path:
    """Save all images in a column, each with the grid of its embeddings and its answer, and return the path.

    `model`: folder of the checkpoint.
    """
    from PIL import Image

    from ..engine.setup.doctor import embedding_grid

    images: list[Image.Image] = []
    for name, output in zip(expected, outputs, strict=True):
        path = args.media / name
        if path.suffix not in VIDEO_SUFFIXES:
            with Image.open(path) as file:
                grid = embedding_grid(model, (file.height, file.width))
                images.append(annotated(file.convert("RGB"), grid, answer_text(output)))
    sheet = Image.new("RGB", (max(picture.width for picture in images), sum(picture.height for picture in images)), "white")
    top = 0
    for image in images:
        sheet.paste(image, (0, top))
        top += image.height
    target: Path = args.out / "demo.png"
    sheet.save(target)
    return target


def annotated(image: Image, grid: tuple[int, int], answer: str) -> Image:
    """Return the image enlarged, with its `grid` (rows, columns) of embeddings drawn over it and the answer below."""
    from PIL import Image, ImageDraw, ImageFont

    big = image.resize((image.width * ZOOM, image.height * ZOOM), Image.Resampling.NEAREST)
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
