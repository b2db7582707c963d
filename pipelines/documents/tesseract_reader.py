"""Reads printed pages with tesseract: through the package tesserocr if it is installed, or else its program."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...callers.errors import InputError, short_repr
from ...mm.media.isolate import watching
from .confidence import Calibration
from .line_recognizer import Picture
from .page_frame import Quad, outer_quad
from .printed_lines import PrintedReader, ReadLine
from .stop import StopSignal

PROGRAM = "tesseract"
INSTALL = "install tesseract (its command must be in PATH), or pip install tesserocr"
_LANGUAGE = "eng"  # that is used if none is given
_SECONDS = 120.0  # for one page
_LINES = ("ocr_line", "ocr_header", "ocr_caption", "ocr_textfloat")  # classes of lines in hOCR
_NUMBERS = re.compile(r"(bbox|baseline|x_size|x_descenders|x_wconf)((?: -?[\d.]+)+)")
Read = Callable[[Picture, StopSignal], str]
"""Returns the hOCR of a picture."""


def is_installed() -> bool:
    return find_spec("tesserocr") is not None or shutil.which(PROGRAM) is not None


class TesseractReader(PrintedReader):
    """Finds and reads printed lines. Lines on their side are not turned.

    Args:
        languages: names of tesseract's data, such as "deu+eng"; "" for English, or for all that there are without it.
        calibration: corrects the scores of words; None leaves them as tesseract gives them.

    Raises:
        InputError: tesseract, or its data of a language, is not installed.
    """

    name = "tesseract"

    def __init__(self, languages: str = "", calibration: Calibration | None = None) -> None:
        super().__init__(calibration)
        if not is_installed():
            raise InputError(f"tesseract was not found; {INSTALL}", param="reader", code="unsupported")
        self._backend: _Module | _Program = _Program() if find_spec("tesserocr") is None else _Module()
        there = sorted(name for name in self._backend.languages() if name != "osd")
        self._languages = languages or (_LANGUAGE if _LANGUAGE in there else "+".join(there))
        missing = [name for name in self._languages.split("+") if name not in there]
        if missing:
            reason = f"tesseract has no data of the language {short_repr(missing[0])}, only of {', '.join(there) or 'none'}"
            raise InputError(f"{reason}; install it, or name another", param="reader", code="unsupported")

    @cached_property
    def version(self) -> str:
        digest = hashlib.sha256()
        for name in self._languages.split("+"):
            path = Path(self._backend.folder, f"{name}.traineddata")
            digest.update(path.read_bytes() if path.is_file() else b"")
        return f"tesseract {self._backend.version()} {self._languages} {digest.hexdigest()[:16]}"

    def lines(self, pixels: Picture, stop: StopSignal) -> list[ReadLine]:
        stop.check()
        found = list(hocr_lines(self._backend.read(pixels, self._languages, stop)))
        stop.check()
        return found


class _Program:
    """The command `tesseract`. Any number of threads may read."""

    def __init__(self) -> None:
        self._path = shutil.which(PROGRAM) or PROGRAM
        self.folder = ""

    def version(self) -> str:
        return (self._run(["--version"]).split() or [b"", b""])[1].decode("utf-8", "replace")

    def languages(self) -> list[str]:
        head, *names = self._run(["--list-langs"]).decode("utf-8", "replace").split("\n")
        self.folder = next(iter(re.findall(r'"(.*)"', head)), "")
        return [name.strip() for name in names if name.strip()]

    def read(self, pixels: Picture, languages: str, stop: StopSignal) -> str:
        height, width = pixels.shape[:2]
        picture = b"P6 %d %d 255\n" % (width, height) + pixels.tobytes()  # a PPM
        command = ["stdin", "stdout", "-l", languages, "--psm", "3", "hocr"]
        return stop.run(partial(self._run, command, picture)).decode("utf-8", "replace")

    def _run(self, arguments: Sequence[str], data: bytes = b"") -> bytes:
        """Return the output of the command.

        Raises:
            InputError: it fails, takes too long, or was killed by an Interrupt that this runs in.
        """
        pipe, env = subprocess.PIPE, {**os.environ, "OMP_THREAD_LIMIT": "1"}  # pages are read side by side
        process = subprocess.Popen([self._path, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, env=env)
        with process, watching(process.kill):
            try:
                output, log = process.communicate(data, _SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise InputError(f"tesseract took longer than {_SECONDS:g} s", code="over_limit", limit=_SECONDS) from None
        if process.returncode:
            last = log.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise InputError(f"tesseract failed with exit code {process.returncode}: {last}", code="invalid_media")
        return output


class _Module:
    """The package tesserocr. Threads read one after the other."""

    def __init__(self) -> None:
        import tesserocr

        self._module: Any = tesserocr
        self._lock, self._apis = threading.Lock(), dict[str, Any]()
        self.folder = ""

    def version(self) -> str:
        return (str(self._module.tesseract_version()).split() or ["", ""])[1]

    def languages(self) -> list[str]:
        self.folder, names = self._module.get_languages()
        return list(names)

    def read(self, pixels: Picture, languages: str, stop: StopSignal) -> str:
        from PIL import Image

        with self._lock:
            stop.check()
            if languages not in self._apis:
                api = self._module.PyTessBaseAPI(path=self.folder, lang=languages, psm=self._module.PSM.AUTO)
                self._apis[languages] = api
            api = self._apis[languages]
            api.SetImage(Image.fromarray(pixels))
            try:
                if not api.Recognize(round(1000 * _SECONDS)):
                    raise InputError(f"tesseract failed, or took longer than {_SECONDS:g} s", code="invalid_media")
                return str(api.GetHOCRText(0))
            finally:
                api.Clear()


def hocr_lines(text: str) -> Iterator[ReadLine]:
    """Yield the lines of tesseract's hOCR that have words."""
    parser = _HocrParser()
    parser.feed(text)
    parser.close()
    for numbers, words in parser.lines:
        shown = [(word.strip(), values) for word, values in words if word.strip() and "bbox" in values]
        if not shown or "bbox" not in numbers:
            continue
        outer = outer_quad(_text_box(numbers))
        width, scores, places = outer[1][0] - outer[0][0], list[float](), list[float]()
        for word, values in shown:
            start, _, end, _ = values["bbox"]
            score = min(max(values.get("x_wconf", [0.0])[0] / 100, 0.0), 1.0)
            chars = "".join(word.split())
            scores += [score] * len(chars)
            places += [
                min(max((start + (end - start) * (at + 0.5) / len(chars) - outer[0][0]) / width, 0.0), 1.0)
                for at in range(len(chars))
            ]
        yield ReadLine(" ".join(word for word, _ in shown), _skewed(outer, numbers), tuple(scores), tuple(places))


class _HocrParser(HTMLParser):
    """Collects lines with their words: the numbers of each by name, and the text of each word."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = list[tuple[dict[str, list[float]], list[tuple[str, dict[str, list[float]]]]]]()
        self._depth = 0  # of elements inside of the word

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        kind, numbers = values.get("class"), _numbers_of(values.get("title") or "")
        if kind in _LINES:
            self.lines.append((numbers, []))
        elif kind == "ocrx_word" and self.lines:
            self.lines[-1][1].append(("", numbers))
            self._depth = 1
        elif self._depth:
            self._depth += 1

    def handle_endtag(self, tag: str) -> None:
        self._depth = max(self._depth - 1, 0)

    def handle_data(self, data: str) -> None:
        if self._depth:
            text, numbers = self.lines[-1][1].pop()
            self.lines[-1][1].append((text + data, numbers))


def _numbers_of(title: str) -> dict[str, list[float]]:
    return {name: [float(number) for number in numbers.split()] for name, numbers in _NUMBERS.findall(title)}


def _text_box(numbers: dict[str, list[float]]) -> tuple[float, float, float, float]:
    """Return the box of a line with the height of its font, in which letters without ascenders have the same box."""
    left, top, right, bottom = numbers["bbox"]
    (slope, offset), (size,), (below,) = (
        numbers.get(name, default) for name, default in (("baseline", [0.0, 0.0]), ("x_size", [0.0]), ("x_descenders", [0.0]))
    )
    if size <= 0 or "baseline" not in numbers:
        return left, top, right, bottom
    base = bottom + offset + slope * (right - left) / 2  # in the middle of the line
    return left, base + below - size, right, base + below


def _skewed(quad: Quad, numbers: dict[str, list[float]]) -> Quad:
    """Return a level quad turned by the slope of the line's baseline."""
    slope = numbers.get("baseline", [0.0])[0]
    middle = (quad[0][0] + quad[1][0]) / 2
    a, b, c, d = ((x, y + slope * (x - middle)) for x, y in quad)
    return a, b, c, d
