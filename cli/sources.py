"""Inputs of commands: files, folders, globs, URLs, and `-` for stdin."""

from __future__ import annotations

import argparse
import glob
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..mm.errors import ConfigError, InputError, short_repr

SUFFIXES = {
    "image": ("png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff", "ppm", "avif", "jp2", "qoi"),
    "video": ("mp4", "webm", "mkv", "mov", "avi", "m4v"),
    "audio": ("wav", "flac", "mp3", "ogg", "opus", "m4a", "webm", "mp4"),
}
"""File extensions that are read from a folder, by modality."""
_MAX_DATA_URL = 40  # characters shown of a data: URL
_MAX_PATH = 4096  # characters shown of a path
_URL = re.compile(r"(?i)(data|file|https?):")


@dataclass(frozen=True)
class Source:
    """One input. `item` is a path, a URL, or the bytes of stdin; `name` is how it was given."""

    name: str
    item: str | bytes


def path_or_url(text: str) -> str:
    """Parse an argument that is a path or URL."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; give a file or URL")
    return text


def read_sources(words: Iterable[str], modality: str, suffixes: Sequence[str] = ()) -> list[Source]:
    """Return the inputs that the words of the command line name, in order.

    A folder gives its files of this modality, or with one of `suffixes`, by name. A pattern that is no file gives the
    files that it matches.

    Raises:
        ConfigError: nothing has this name, or stdin is a terminal or is named twice.
    """
    found: list[Source] = []
    for word in words:
        if word == "-":
            if any(isinstance(source.item, bytes) for source in found):
                raise ConfigError("- is given twice, but stdin holds one file; give it once")
            found.append(Source("-", read_stdin(f"{modality} file")))
        else:
            found += [Source(_shown(path), path) for path in _expand(word, modality, (*SUFFIXES[modality], *suffixes))]
    return found


def check_files(sources: Sequence[Source], every: bool) -> None:
    """Raise ConfigError, before a model is loaded, if a file cannot be read. With `every`=False one that can is enough."""
    wrong = [reason for source in sources if (reason := _why_unreadable(source.item))]
    if wrong and (every or len(wrong) == len(sources)):
        raise ConfigError(f"{wrong[0]}; give another path")


def _why_unreadable(item: str | bytes) -> str:
    """Return why a local file cannot be read, or "". A path that no file can have is left to the engine, as URLs are."""
    if isinstance(item, bytes) or _URL.match(item):
        return ""
    path, reason = os.path.expanduser(item), ""
    try:
        os.stat(path)
        reason = "" if os.access(path, os.R_OK) else "Permission denied"
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError:
        return ""
    return reason and f"the file {short_repr(item, _MAX_PATH)} cannot be read ({reason})"


def read_stdin(what: str) -> bytes:
    """Return all bytes of stdin. Raise ConfigError if it is a terminal, or has more bytes than the media policy allows."""
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError(f"- reads the {what} from stdin, which is a terminal; pipe something into the command")
    from ..mm.media.policy import MediaPolicy

    limit = MediaPolicy().max_bytes
    data = sys.stdin.buffer.read(limit + 1)
    if len(data) > limit:
        raise ConfigError(f"the {what} on stdin has more than {limit:,} bytes; give a shorter one")
    return data


def split_pdfs(sources: Iterable[Source]) -> Iterator[tuple[str, object]]:
    """Yield (name, item) for each source, and for each page of a PDF; for one that cannot be opened, (name, InputError).

    A page of a local file is its path and number, and the engine reads the file when it comes to the page: a folder of
    PDFs need not fit into memory. PDFs from URLs and stdin are read once and kept.
    """
    from ..mm.media.pdf import is_pdf, pdf_pages
    from ..mm.media.policy import PdfPage

    for name, item in ((source.name, source.item) for source in sources):
        if not (is_pdf(item) if isinstance(item, bytes) else item.lower().endswith(".pdf")):
            yield name, item
            continue
        try:
            pages = pdf_pages(item)
        except InputError as error:
            yield name, error
            continue
        if isinstance(item, str) and not _URL.match(item):
            pages = [PdfPage(item, page.number) for page in pages]
        yield from ((f"{name}#page={page.number}", page) for page in pages)


def _expand(word: str, modality: str, suffixes: Sequence[str]) -> list[str]:
    if _URL.match(word):
        return [word]
    try:
        is_folder, exists = Path(word).is_dir(), Path(word).exists()
    except (OSError, ValueError):  # no file can have this name; the engine says so
        return [word]
    if not is_folder and (exists or not glob.has_magic(word)):
        return [word]
    pattern = f"{glob.escape(word)}/*" if is_folder else word
    files = sorted(one for one in glob.glob(pattern, recursive=True) if Path(one).is_file())
    if is_folder:
        files = [one for one in files if Path(one).suffix[1:].lower() in suffixes]
    if not files and is_folder:
        raise ConfigError(f"the folder {short_repr(word)} holds no {modality} file ({', '.join(suffixes)})")
    if not files:
        raise ConfigError(f"no file matches {short_repr(word)}; give another pattern or a path")
    return files


def _shown(file: str) -> str:
    """Return a path or URL as it was given; a data: URL or an overlong path is cut."""
    limit = _MAX_DATA_URL if file[:5].lower() == "data:" else _MAX_PATH
    return file if len(file) <= limit else f"{file[:limit]}..."
