"""Fits and checks the confidences of the reader of printed lines: `python -m benchmarks.confidence --fit --write`.

Needs the extra `documents` and the fonts DejaVu and Liberation (Debian: fonts-dejavu, fonts-liberation).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .throughput import machine, put

if TYPE_CHECKING:
    from sensorium.pipelines.documents.confidence import Calibration

SECTION = "Confidences of documents"
NOTE = (
    "The pages have words in English, German and French, numbers, dates, codes and addresses, in one or two columns, in "
    "fonts of 11 to 30 pixels. They are clean, scanned (75 to 150 dpi, askew, blurred, with noise, as JPEG) or photographed"
    " (on a table, from the side, in uneven light). The calibration was fitted to other pages in other fonts. A word is "
    "right if the page has the same characters at its place. The score of a word is the mean of RapidOCR's scores of its "
    "characters, and its confidence is the calibrated score. The left half of the first table groups words by confidence, "
    "the right half by score. ECE is the expected calibration error in ten bins, weighted by words: the mean distance from "
    "the share of right words, of scores (before) and confidences (after). Lines and pages have the mean over their words."
)
FONTS = Path("/usr/share/fonts/truetype")
FIT_FONTS = (
    *("dejavu/DejaVuSans.ttf", "dejavu/DejaVuSerif.ttf", "dejavu/DejaVuSans-Bold.ttf"),
    *("liberation/LiberationSans-Regular.ttf", "liberation/LiberationMono-Regular.ttf", "liberation/LiberationSans-Italic.ttf"),
)
CHECK_FONTS = (
    *("liberation/LiberationSerif-Regular.ttf", "liberation/LiberationSerif-Italic.ttf", "dejavu/DejaVuSansMono.ttf"),
    *("liberation/LiberationSansNarrow-Regular.ttf", "dejavu/DejaVuSerifCondensed.ttf", "liberation/LiberationSerif-Bold.ttf"),
)
"""Fonts of the pages that are checked. None of them is in FIT_FONTS."""
CONDITIONS = ("clean", "scanned", "photographed")
WORDS = {
    "en": """the quick report of this year shows that prices in most regions have risen by about four percent while sales fell
    because customers waited for delivery; a technical committee will review every contract before payment and publish its
    findings, including maintenance, warranty, liability and insurance. Which supplier offered the lowest price? Nobody
    knows""",
    "de": """der neue Bericht zeigt für das Jahr größere Änderungen bei Straßen, Brücken und Häusern als üblich sowie Maßnahmen
    gegen Überschwemmungen; Geschäftsführer, Aufsichtsräte und Behörden prüfen Verträge, Gewährleistung und Höhe der Zuschüsse
    möglichst früh. Außerdem müssen Empfänger ihre Anträge schriftlich begründen, bevor Auszahlungen erfolgen können""",
    "fr": """le présent rapport montre que les dépenses élevées de l'année ont été réduites grâce à une gestion très précise des
    marchés publics; où l'on espérait déjà des économies, les élus préfèrent contrôler chaque façade, chaque clôture et chaque
    forêt. Les bénéficiaires doivent présenter leur dossier complet avant l'échéance, sans quoi l'aide sera refusée""",
}
WIDTH, HEIGHT = 1240, 874  # pixels of a page: half of an A4 sheet at 150 dpi
OVERSAMPLING = 2  # factor by which a page is drawn larger before it is reduced


@dataclass(frozen=True)
class TrueWord:
    """A word of a page: its text, and its centre and half of its height in pixels of the page."""

    text: str
    x: float
    y: float
    half: float


@dataclass(frozen=True)
class Picture:
    """A page as a reader gets it.

    Args:
        pixels: uint8 `[height, width, 3]`.
        words: what it shows.
        matrix: homography from its pixels to those of the page.
    """

    condition: str
    pixels: NDArray[np.uint8]
    words: tuple[TrueWord, ...]
    matrix: NDArray[np.float64]


def text_of(rng: random.Random, words: Sequence[str]) -> str:
    """Return a word, number, date, amount, code or address."""
    kind = rng.random()
    if kind < 0.72:
        return rng.choice(words)
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
    return rng.choice(
        (
            f"{rng.randint(1, 99999)}",
            f"{rng.randint(1, 9999)},{rng.randint(0, 99):02}",
            f"{rng.randint(1, 28):02}.{rng.randint(1, 12):02}.{rng.randint(1950, 2030)}",
            f"{letters}-{rng.randint(10, 9999)}/{rng.choice('abcdx')}",
            f"{rng.choice(words).strip('.,;?').lower()}@{letters.lower()}.org",
            f"({rng.choice(words).strip('.,;?')})",
            f"§{rng.randint(1, 400)}",
            f"{rng.randint(1, 99)}%",
        )
    )


def draw_page(rng: random.Random, fonts: Sequence[str], sizes: tuple[int, int]) -> tuple[Any, tuple[TrueWord, ...]]:
    """Return a page of one or two columns as a grey picture, `OVERSAMPLING` times larger, and its words."""
    from PIL import Image, ImageDraw, ImageFont

    size = rng.randint(*sizes)  # pixels of the font
    font = ImageFont.truetype(str(FONTS / rng.choice(fonts)), size * OVERSAMPLING)
    page = Image.new("L", (WIDTH * OVERSAMPLING, HEIGHT * OVERSAMPLING), rng.randint(235, 255))
    pen, ink, columns, words = ImageDraw.Draw(page), rng.randint(0, 90), rng.choice((1, 1, 2)), list[TrueWord]()
    width = (WIDTH - 80 - 40 * (columns - 1)) // columns
    for column in range(columns):
        left, y = 40 + column * (width + 40), 40.0
        while y < HEIGHT - 40 - size:
            x, source = float(left), WORDS[rng.choice(list(WORDS))].split()
            end = left + width * rng.choice((1.0, 1.0, 0.6))
            while True:
                text = text_of(rng, source)
                length = font.getlength(text) / OVERSAMPLING
                if x + length > end:
                    break
                pen.text((x * OVERSAMPLING, y * OVERSAMPLING), text, font=font, fill=ink)
                words.append(TrueWord(text, x + length / 2, y + size * 0.6, size * 0.6))
                x += length + font.getlength(" ") / OVERSAMPLING
            y += size * rng.choice((1.3, 1.3, 1.3, 2.2))
    return page, tuple(words)


def picture_of(rng: random.Random, condition: str, fonts: Sequence[str]) -> Picture:
    """Return a page in a condition: "clean", "scanned" (at 75 to 150 dpi) or "photographed" (on a table, from the side)."""
    page, words = draw_page(rng, fonts, (11, 30))
    pixels, matrix = in_condition(rng, condition, page)
    return Picture(condition, pixels, words, matrix)


def in_condition(rng: random.Random, condition: str, page: Any) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Return the pixels of a page in a condition, and the homography from them to those of the page; see `Picture`.

    Args:
        page: a grey picture, `OVERSAMPLING` times as large as WIDTH x HEIGHT.
    """
    import cv2
    from PIL import Image

    noise, matrix = np.random.default_rng(rng.getrandbits(32)), np.eye(3)
    if condition == "clean":
        small = page.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)
        return np.repeat(np.asarray(small)[..., None], 3, axis=2), matrix
    scale = rng.uniform(0.5, 1.0) if condition == "scanned" else rng.uniform(0.6, 1.1)
    width, height = int(WIDTH * scale), int(HEIGHT * scale)
    corners = np.array([(0, 0), (WIDTH, 0), (WIDTH, HEIGHT), (0, HEIGHT)], np.float32)
    target = corners * scale
    if condition == "photographed":
        target = target * rng.uniform(0.88, 0.96) + noise.uniform(0, 0.05, (4, 2)).astype(np.float32) * (width, height)
    else:
        angle = np.deg2rad(rng.uniform(-1.5, 1.5))
        turn = np.array([(np.cos(angle), -np.sin(angle)), (np.sin(angle), np.cos(angle))])
        target = (target - (width / 2, height / 2)) @ turn.T + (width / 2, height / 2)
    forward = cv2.getPerspectiveTransform(corners * OVERSAMPLING, target.astype(np.float32))
    table = cv2.resize(noise.uniform(60, 150, (height // 40 + 2, 4)).astype(np.float32), (width, height))
    back = table if condition == "photographed" else np.full((height, width), 250, np.float32)
    shape, flags = (width, height), cv2.INTER_AREA
    source = cv2.GaussianBlur(np.asarray(page), (0, 0), 0.45 * OVERSAMPLING / scale)  # against aliasing
    flat = cv2.warpPerspective(source, forward, shape, flags=flags).astype(np.float32)
    mask = cv2.warpPerspective(np.full_like(source, 255), forward, shape, flags=flags).astype(np.float32) / 255
    grey = flat * mask + back * (1 - mask)
    if condition == "photographed":
        light = cv2.resize(noise.uniform(0.45, 1.05, (3, 3)).astype(np.float32), shape, interpolation=cv2.INTER_CUBIC)
        grey *= light.clip(0.3, 1.1)
    grey = cv2.GaussianBlur(grey, (0, 0), rng.uniform(0.3, 1.6))
    grey += noise.normal(0, rng.uniform(2, 18), grey.shape)
    file = BytesIO()
    Image.fromarray(grey.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=rng.randint(20, 85))
    pixels = np.asarray(Image.open(file).convert("RGB"))
    return pixels, cv2.getPerspectiveTransform(target.astype(np.float32), corners)


def pictures(seed: int, fonts: Sequence[str], count: int) -> Iterator[Picture]:
    """Yield pictures of each condition, `count` in all."""
    for number in range(count):
        yield picture_of(random.Random(f"{seed} {number}"), CONDITIONS[number % len(CONDITIONS)], fonts)


def is_right(picture: Picture, quad: Any, words: Sequence[str]) -> list[bool]:
    """Return for each word of a line that was read whether the page has it there, character by character."""
    points = np.array([(*point, 1.0) for point in quad]) @ picture.matrix.T
    xs, ys = points[:, 0] / points[:, 2], points[:, 1] / points[:, 2]
    top, bottom = (ys[0] + ys[1]) / 2, (ys[2] + ys[3]) / 2
    middle = (top + bottom) / 2
    shown = [word for word in picture.words if abs(word.y - middle) < word.half and min(xs) - 4 <= word.x <= max(xs) + 4]
    shown.sort(key=lambda word: word.x)
    right = [False] * len(words)
    for a, _, size in SequenceMatcher(None, words, [word.text for word in shown], autojunk=False).get_matching_blocks():
        right[a : a + size] = [True] * size
    return right


@dataclass(frozen=True)
class ReadPicture:
    """A page's words as the reader sees them. `lines`: for each line, the score of each word and whether the word is right."""

    condition: str
    lines: tuple[tuple[tuple[float, bool], ...], ...]


def read_pictures(seed: int, fonts: Sequence[str], count: int) -> Iterator[ReadPicture]:
    from sensorium.pipelines.documents.confidence import word_scores
    from sensorium.pipelines.documents.lines_reader import LinesReader
    from sensorium.pipelines.documents.stop import StopSignal

    reader = LinesReader()
    for picture in pictures(seed, fonts, count):
        lines = list[tuple[tuple[float, bool], ...]]()
        for line in reader.lines(picture.pixels, StopSignal()):
            right = is_right(picture, line.quad, line.text.split())
            lines.append(tuple(zip(word_scores(line.text, line.scores), right, strict=True)))
        yield ReadPicture(picture.condition, tuple(lines))


def words_of(pages: Sequence[ReadPicture], condition: str = "") -> NDArray[np.float64]:
    """Return `[words, 2]`: score, and 1 if the word is right else 0. `condition`: "" for all pages."""
    words = [word for page in pages if condition in page.condition for line in page.lines for word in line]
    return np.array(words, np.float64).reshape(-1, 2)


def groups(pages: Sequence[ReadPicture], kind: str) -> list[NDArray[np.float64]]:
    """Return the words of each word, line or page; see `words_of`."""
    if kind == "page":
        return [words_of([page]) for page in pages if page.lines]
    lines = [np.array(line, np.float64).reshape(-1, 2) for page in pages for line in page.lines if line]
    return lines if kind == "line" else [word[None] for line in lines for word in line]


def tables(
    pages: Sequence[ReadPicture],
    calibration: Calibration,
    conditions: Sequence[str] = CONDITIONS,
    kinds: Sequence[str] = ("line", "page"),
) -> list[str]:
    """Return the reliability of words, and the calibration errors of words, and of lines and pages (`kinds`)."""
    from sensorium.pipelines.documents.fit_calibration import calibration_error

    calibrate = np.vectorize(calibration, otypes=[float])
    lines = [
        "| confidence | words | mean confidence | right | words with this score | mean score | right |",
        "|---|" + "---|" * 6,
    ]
    words = words_of(pages)
    by_kind = (calibrate(words[:, 0]), words[:, 0])
    for i in range(10):
        cells = [f"{i / 10:.1f} to {(i + 1) / 10:.1f}"]
        for values in by_kind:
            inside = np.minimum((values * 10).astype(int), 9) == i
            count = int(inside.sum())
            cells += [
                f"{count:,}",
                *([f"{values[inside].mean():.3f}", f"{words[inside, 1].mean():.3f}"] if count else ["", ""]),
            ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| of | pages | number | right | ECE before | ECE after |", "|---|---|---|---|---|---|"]
    for kind, condition in (*(("word", name) for name in ("", *conditions)), *((kind, "") for kind in kinds)):
        chosen = [page for page in pages if condition in page.condition]
        parts = groups(chosen, kind)
        weights, shares = np.array([len(part) for part in parts], float), np.array([part[:, 1].mean() for part in parts])
        before, after = (
            calibration_error(np.array([function(part[:, 0]).mean() for part in parts]), shares, weights)
            for function in (np.asarray, calibrate)
        )
        share = np.average(shares, weights=weights)
        lines.append(
            f"| {kind}s | {condition or 'all'} ({len(chosen)}) | {len(parts):,} | {share:.3f} | {before:.3f} | {after:.3f} |"
        )
    return lines


def write_calibration(pages: Sequence[ReadPicture], seed: int) -> None:
    from sensorium.pipelines.documents.confidence import CALIBRATION
    from sensorium.pipelines.documents.fit_calibration import fit
    from sensorium.pipelines.documents.lines_reader import LinesReader

    words = words_of(pages)
    data = {
        "reader": LinesReader().version,
        "score": "mean of the scores of a word's characters",
        "made_by": f"python -m benchmarks.confidence --fit --pages {len(pages)} --seed {seed}",
        "pages": {name: sum(page.condition == name for page in pages) for name in CONDITIONS},
        "fonts": [Path(name).stem for name in FIT_FONTS],
        "words": len(words),
        "right": int(words[:, 1].sum()),
        "knots": fit(words),
    }
    CALIBRATION.write_text(f"{json.dumps(data, indent=1)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the calibration of the package again")
    parser.add_argument("--pages", type=int, default=96, help="pages of the fit")
    parser.add_argument("--check", type=int, default=60, help="pages of the table; their seed is the next one")
    parser.add_argument("--seed", type=int, default=36)
    parser.add_argument("--write", action="store_true", help="put the tables into benchmarks/README.md")
    args = parser.parse_args()
    if args.fit:
        write_calibration(list(read_pictures(args.seed, FIT_FONTS, args.pages)), args.seed)
    from sensorium.pipelines.documents.confidence import CALIBRATION, Calibration

    calibration = Calibration(tuple((score, share) for score, share in json.loads(CALIBRATION.read_text())["knots"]))
    lines = tables(list(read_pictures(args.seed + 1, CHECK_FONTS, args.check)), calibration)
    print("\n".join(lines))
    if args.write:
        put(SECTION, "\n".join([machine(), "", NOTE, "", *lines]))


if __name__ == "__main__":
    main()
