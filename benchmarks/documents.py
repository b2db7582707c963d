"""Documents: pages a second, memory and scores of `sensorium read`: `python -m benchmarks.documents --write`.

Needs reportlab; scans need the extra `documents`. `--docling PYTHON` names a Python with docling, of which the pipeline that
needs no downloaded models reads the same pages.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from .throughput import ROOT, machine, put

SECTION = "Documents"
NOTE = (
    "Pages are rendered with reportlab from seeded sources: headings, paragraphs in English, German and French, lists, and "
    "tables with rules, with header rules, and without any. Scans are the same pages at 150 dpi, turned by up to 0.4 degrees, "
    "blurred, with noise, as JPEG. Text: share of paragraphs, list items and headings in the Markdown (at most 5 % of the "
    "characters differ). Order: share of neighbouring ones that stand in order. Cells: share of table cells with the right "
    "text at their right and below. TEDS: edit distance of tables as rows of cells. CER: edit distance of all text without "
    "spaces. Seconds begin with the process; CPU seconds are those of all its processes, which other work changes "
    "less. Memory is that of the process without codec workers. docling reads with its native pipeline, which needs no models."
)
WORDS = {
    "en": "the quick report of this year shows that prices in most regions have risen by about four percent while sales fell",
    "de": "der neue Bericht zeigt für das Jahr größere Änderungen bei Straßen Brücken und Häusern als üblich sowie Maßnahmen",
    "fr": "le présent rapport montre que les dépenses élevées de l'année ont été réduites grâce à une gestion très précise",
}
STYLES = ("ruled", "header", "plain")


@dataclass(frozen=True)
class Source:
    """The true content of a page: its texts in reading order, and its table."""

    texts: tuple[str, ...]
    table: tuple[tuple[str, ...], ...]
    style: str


def sources(count: int, seed: int) -> list[Source]:
    rng, pages = random.Random(seed), list[Source]()
    for number in range(count):
        words = WORDS[rng.choice(list(WORDS))].split()

        def sentence(least: int, most: int, words: list[str] = words) -> str:
            text = " ".join(rng.choice(words) for _ in range(rng.randint(least, most)))
            return f"{text[0].upper()}{text[1:]} {rng.randint(10, 9999)}."

        heading = f"{number + 1} {sentence(2, 4)[:-1]}"
        texts = [heading, *(" ".join(sentence(8, 16) for _ in range(rng.randint(2, 4))) for _ in range(4))]
        texts += [f"• {sentence(4, 8)}" for _ in range(3)]
        columns = rng.randint(3, 5)
        head = tuple(rng.choice(words).capitalize() for _ in range(columns))
        rows = [
            (f"{rng.choice(words)} {row}", *(f"{rng.randint(1, 99999) / 100:.2f}" for _ in range(columns - 1)))
            for row in range(rng.randint(3, 7))
        ]
        pages.append(Source(tuple(texts), (head, *rows), rng.choice(STYLES)))
    return pages


def write_pdf(pages: list[Source], path: Path) -> None:
    from reportlab.lib import colors
    from reportlab.lib.pagesizes import A4
    from reportlab.lib.styles import getSampleStyleSheet
    from reportlab.platypus import PageBreak, Paragraph, SimpleDocTemplate, Spacer, Table

    styles = getSampleStyleSheet()
    line = colors.black
    rules: dict[str, list[Any]] = {
        "ruled": [("GRID", (0, 0), (-1, -1), 0.5, line)],
        "header": [
            (kind, (0, row), (-1, row), 0.7, line) for kind, row in (("LINEABOVE", 0), ("LINEBELOW", 0), ("LINEBELOW", -1))
        ],
        "plain": [],
    }
    story = list[Any]()
    for page in pages:
        story.append(Paragraph(page.texts[0], styles["Heading1"]))
        for text in page.texts[1:]:
            story += [Paragraph(text, styles["Normal"]), Spacer(1, 8)]
        story += [Table(page.table, style=rules[page.style]), PageBreak()]
    SimpleDocTemplate(str(path), pagesize=A4, invariant=1).build(story)


def write_scans(pdf: Path, numbers: list[int], path: Path, seed: int) -> None:
    import numpy as np
    from PIL import Image, ImageFilter
    from sensorium.mm.media.page_facts import page_pixels
    from sensorium.mm.media.policy import MediaPolicy

    rng, images = np.random.default_rng(seed), list[Image.Image]()
    for number in numbers:
        page = Image.fromarray(page_pixels(pdf.read_bytes(), number, MediaPolicy(pdf_dpi=150)).numpy()).convert("L")
        page = page.rotate(rng.uniform(-0.4, 0.4), Image.Resampling.BICUBIC, fillcolor=255).filter(
            ImageFilter.GaussianBlur(0.6)
        )
        noisy = np.asarray(page, np.float32) * 0.94 + rng.normal(0, 5, (page.height, page.width))
        file = BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=75)
        images.append(Image.open(file))
    images[0].save(path, save_all=True, append_images=images[1:], resolution=150)


def distance(a: str, b: str) -> int:
    """Return Levenshtein's distance."""
    import numpy as np

    codes, steps = np.array([ord(char) for char in b]), np.arange(len(b) + 1)
    row = steps.copy()
    for number, char in enumerate(a, 1):
        new = np.concatenate(([number], np.minimum(row[1:] + 1, row[:-1] + (codes != ord(char)))))
        row = np.minimum.accumulate(new - steps) + steps
    return int(row[-1])


def plain(text: str) -> str:
    return re.sub(r"[^\w.,]", "", text)


def tables_of(markdown: str) -> list[list[list[str]]]:
    """Return the tables of Markdown as rows of texts."""
    tables, rows = list[list[list[str]]](), list[list[str]]()
    for text in [*markdown.splitlines(), ""]:
        if text.startswith("|"):
            cells = [plain(cell) for cell in re.split(r"(?<!\\)\|", text.strip().strip("|"))]
            rows += [] if all(re.fullmatch(r"\s*:?-+:?\s*", cell) for cell in text.strip().strip("|").split("|")) else [cells]
        elif rows:
            tables.append(rows)
            rows = []
    return tables


def teds(truth: list[list[str]], found: list[list[str]]) -> float:
    """Return 1 minus the edit distance of two tables, whose rows and cells are nodes, by the larger number of nodes."""

    def edit(a: list[Any], b: list[Any], change: Any, size: Any) -> float:
        costs = [[0.0] * (len(b) + 1) for _ in range(len(a) + 1)]
        for i in range(len(a) + 1):
            for j in range(len(b) + 1):
                ways = [costs[i - 1][j] + size(a[i - 1])] if i else []
                ways += [costs[i][j - 1] + size(b[j - 1])] if j else []
                ways += [costs[i - 1][j - 1] + change(a[i - 1], b[j - 1])] if i and j else []
                costs[i][j] = min(ways, default=0.0)
        return costs[-1][-1]

    def cell(a: str, b: str) -> float:
        return distance(a, b) / max(len(a), len(b), 1)

    def row(a: list[str], b: list[str]) -> float:
        return edit(a, b, cell, lambda _: 1.0)

    nodes = max(sum(1 + len(cells) for cells in table) for table in (truth, found)) + 1
    return 1 - edit(truth, found, row, lambda cells: 1.0 + len(cells)) / nodes


def score(pages: list[Source], markdowns: list[str]) -> dict[str, float]:
    """Return the scores of pages, each from 0 to 1."""
    hits, orders, cells, likeness, errors, length = list[bool](), list[bool](), list[bool](), list[float](), 0, 0
    for page, markdown in zip(pages, markdowns, strict=True):
        got = plain(re.sub(r"<!--.*?-->", "", markdown))
        places = [find(plain(text), got) for text in page.texts]
        hits += [place is not None for place in places]
        orders += [a is not None and b is not None and a < b for a, b in pairwise(places)]
        truth = [[plain(text) for text in row] for row in page.table]
        found = max(tables_of(markdown), key=lambda table: teds(truth, table), default=[])
        likeness.append(max(teds(truth, found), 0.0))
        cells += relations(truth, found)
        expected = plain("".join(page.texts) + "".join(text for row in page.table for text in row))
        errors += distance(expected, got)
        length += len(expected)
    shares = {"text": hits, "order": orders, "cells": cells, "TEDS": likeness}
    return {name: sum(values) / len(values) for name, values in shares.items()} | {"CER": errors / length}


def find(text: str, inside: str) -> int | None:
    """Return where a text is, of whose characters at most 5 % may differ."""
    if (place := inside.find(text)) >= 0:
        return place
    for part in range(0, max(len(text) - 12, 1), 6):
        if (place := inside.find(text[part : part + 12])) >= 0:
            start = max(place - part, 0)
            return start if distance(text, inside[start : start + len(text)]) <= 0.05 * len(text) else None
    return None


def relations(truth: list[list[str]], found: list[list[str]]) -> list[bool]:
    """Return for each cell whether it is there with its neighbours at the right and below."""

    def pairs(table: list[list[str]]) -> set[tuple[str, str, str]]:
        right = {("right", a, b) for row in table for a, b in pairwise(row)}
        return right | {("below", a, b) for row, below in pairwise(table) for a, b in zip(row, below, strict=False)}

    known = pairs(found)
    return [pair in known for pair in sorted(pairs(truth))]


@dataclass(frozen=True)
class Run:
    """A reader's output, its seconds, the CPU seconds of all of its processes, and the peak memory of the first one in MB."""

    output: str
    seconds: float
    cpu: float
    memory: int


def read(path: Path, *words: str) -> Run:
    """Run `sensorium read`. `words`: other paths and options."""
    command = [sys.executable, "-c", _CHILD, "read", str(path), *words]
    return run(command, "sensorium")


_CHILD = """import resource, sys
from sensorium.cli.main import main
code = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""
_DOCLING = """import resource, sys
from docling.datamodel.base_models import InputFormat
from docling.document_converter import DocumentConverter, NativePdfFormatOption
converter = DocumentConverter(format_options={InputFormat.PDF: NativePdfFormatOption()})
document = converter.convert(sys.argv[1]).document
for number in sorted(document.pages):
    print(f"<!-- page {number} -->")
    print(document.export_to_markdown(page_no=number))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def run(command: list[str], name: str) -> Run:
    with tempfile.TemporaryDirectory() as cache:
        began, before = time.perf_counter(), cpu_seconds()
        env = {**os.environ, "XDG_CACHE_HOME": cache}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - began
    memory = done.stderr.split()[-1:] if done.stderr else []
    if not memory or not memory[0].isdecimal():
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    return Run(done.stdout, seconds, cpu_seconds() - before, int(memory[0]) // 1024)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def by_page(markdown: str, count: int) -> list[str]:
    parts = re.split(r"<!-- page (\d+) -->", markdown)
    pages = {int(number): text for number, text in zip(parts[1::2], parts[2::2], strict=True)}
    return [pages.get(number, "") for number in range(1, count + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=40, help="born-digital pages that are scored")
    parser.add_argument("--scans", type=int, default=6, help="scanned pages that are scored")
    parser.add_argument("--mixed", type=int, default=100, help="pages with text layers and scans, of which a quarter are scans")
    parser.add_argument("--many", type=int, default=2000, help="pages of the document that shows the memory")
    parser.add_argument("--docling", help="a Python with docling")
    parser.add_argument("--seed", type=int, default=36)
    parser.add_argument("--write", action="store_true", help="put the tables into benchmarks/README.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = measure(args, Path(folder))
    print("\n".join(lines))
    if args.write:
        put(SECTION, "\n".join([machine(), "", NOTE, "", *lines]))


def measure(args: argparse.Namespace, folder: Path) -> list[str]:
    pages, digital, scans = sources(args.pages, args.seed), folder / "digital.pdf", folder / "scans.pdf"
    write_pdf(pages, digital)
    head = "| reader | pages | pages/s | CPU s/page | peak MB | text | order | cells | TEDS | CER |"
    lines = [f"Load of the machine before: {os.getloadavg()[0]:.1f}", "", head, "|---|" + "---|" * 9]
    lines.append(row_of("sensorium, text layer", pages, read(digital, "--text-layer", "always")))
    if args.docling:
        lines.append(row_of("docling", pages, run([args.docling, "-c", _DOCLING, str(digital)], "docling")))
    if args.scans:
        write_scans(digital, list(range(1, args.scans + 1)), scans, args.seed)
        lines.append(row_of("sensorium, RapidOCR, scans", pages[: args.scans], read(scans)))
    lines += ["", "| pages | seconds | pages/s | CPU s/page | peak MB |", "|---|---|---|---|---|"]
    if args.mixed:
        lines.append(measure_mixed(args.mixed, args.seed + 2, folder))
    for count in (10, args.many):
        path = folder / f"{count}.pdf"
        write_pdf(sources(count, args.seed + 1), path)
        done = read(path, "--output-dir", str(folder / f"out-{count}"))
        lines.append(cost_row(f"{count:,} with text layers", count, done))
    return lines


def measure_mixed(count: int, seed: int, folder: Path) -> str:
    """Return the row of documents of which three quarters of the pages have text layers, and the others are scans."""
    digital, scans, num_scans = folder / "mixed.pdf", folder / "mixed-scans.pdf", max(count // 4, 1)
    write_pdf(sources(max(count - num_scans, num_scans), seed), digital)
    write_scans(digital, list(range(1, num_scans + 1)), scans, seed)
    done = read(digital, str(scans), "--output-dir", str(folder / "out-mixed"))
    return cost_row(f"{count:,}, of which {num_scans} are scans", count, done)


def cost_row(name: str, count: int, done: Run) -> str:
    return f"| {name} | {done.seconds:.1f} | {count / done.seconds:.1f} | {done.cpu / count:.3f} | {done.memory} |"


def row_of(name: str, pages: list[Source], done: Run) -> str:
    scores = score(pages, by_page(done.output, len(pages)))
    shown = " | ".join(f"{100 * value:.1f}" for value in scores.values())
    return (
        f"| {name} | {len(pages)} | {len(pages) / done.seconds:.2f} | {done.cpu / len(pages):.2f} | {done.memory} | {shown} |"
    )


if __name__ == "__main__":
    main()
