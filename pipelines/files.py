"""The items in what a caller names: the files of a folder or of a pattern, and the pages of a PDF, TIFF or animation."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..callers.errors import InputError, short_repr

if TYPE_CHECKING:
    from ..mm.media.policy import MediaPolicy, PdfPage

SUFFIXES = {
    "image": ("png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff", "ppm", "avif", "jp2", "qoi", "heic", "heif"),
    "video": ("mp4", "webm", "mkv", "mov", "avi", "m4v", "mpg", "mpeg", "ts", "m2ts", "wmv", "flv", "ogv", "3gp"),
    "audio": (
        *("wav", "flac", "mp3", "ogg", "oga", "opus", "m4a", "aac", "aif", "aiff", "aifc", "au", "caf", "w64", "amr", "ac3"),
        *("dts", "wma", "mka", "mpga", "mpeg", "webm", "mp4", "mkv", "mov", "3gp"),
    ),
}
"""File extensions that are read from a folder, by modality."""
_PDF_SUFFIX = "pdf"
_MAX_DATA_URL = 40  # characters of a data: URL in a name
_MAX_NAME = 4096  # characters of a name
_AT_ONCE = 16  # files that are looked into at a time
URL = re.compile(r"(?i)[\0-\x20]*data:|(file|https?):|[\0-\x20]*(file|https?)://")
Entered = Callable[[str], bool]
"""Returns whether the files of a subfolder, which is given by its path, are items too."""


@dataclass(frozen=True)
class NamedItem:
    """One item. `source` is the path or URL that names it, with "#page=N" for a page; "" if it has none.

    `item` is an InputError if a file or folder that holds several items could not be opened. `subfolder` is the path of its
    folder, relative to the folder that the caller named; "" if the file lies in that one, or was named itself.
    """

    source: str
    item: object
    subfolder: str = ""


def named_items(
    items: Iterable[object], modality: str, suffixes: Iterable[str] = (), enters: Entered | None = None
) -> Iterator[NamedItem]:
    """Yield the items of a caller's list under their names. A folder or a pattern gives its files, sorted by name.

    Args:
        items: paths, URLs, bytes, pixels, samples, `Media` of one of these, ...; a NamedItem is kept.
        suffixes: further file extensions that are read from a folder.
        enters: a folder also gives the files of its subfolders that this chooses; None: it gives only its own.
    """
    from ..mm.types import Media

    for item in items:
        data: Any = item.data if type(item) is Media else item
        if type(data) is NamedItem or not _is_a(data, str, os.PathLike):
            yield data if type(data) is NamedItem else NamedItem(_name(data), item)
            continue
        path = os.fspath(data)
        if not isinstance(path, str) or URL.match(path):
            yield NamedItem(_name(path), item)
            continue
        try:
            files = _local_items(path, modality, suffixes, enters)
        except InputError as error:
            yield NamedItem(path, error)
            continue
        for file in files:
            same = file.item if file.item != path else item
            yield replace(file, item=replace(item, data=same) if type(item) is Media and type(same) is str else same)


def _local_items(path: str, modality: str, suffixes: Iterable[str], enters: Entered | None = None) -> list[NamedItem]:
    """Return the files of a folder or those that match a pattern, sorted by name; the path itself if it is neither.

    A subfolder that is entered and cannot be listed is an item with its error.

    Raises:
        InputError: there are none, or the folder cannot be read.
    """
    if not path:
        raise InputError("the path is empty; give a file, a folder or a pattern", param=modality)
    expanded = os.path.expanduser(path)
    try:
        is_folder, exists = Path(expanded).is_dir(), Path(expanded).exists()
    except (OSError, ValueError):  # no file can have this name; reading it says so
        return [NamedItem(shorten_name(path), path)]
    if is_folder:
        return _files_below(path, modality, (*SUFFIXES[modality], *suffixes), enters)
    if exists or not glob.has_magic(path):
        return [NamedItem(shorten_name(path), path)]
    try:
        files = sorted(file for file in glob.glob(expanded, recursive=True) if Path(file).is_file())
    except OSError as error:
        raise _unlisted(path, error, modality) from None
    if not files:
        raise InputError(f"no file matches {short_repr(path)}; give another pattern or a path", param=modality)
    return [NamedItem(shorten_name(file), file) for file in files]


def _files_below(path: str, modality: str, suffixes: Sequence[str], enters: Entered | None) -> list[NamedItem]:
    """Return the files of a folder and of the subfolders that are entered; see `_local_items`. Links are not followed."""
    folder, waiting, items = os.path.expanduser(path), [""], list[NamedItem]()
    while waiting:
        subfolder = waiting.pop()
        current = os.path.join(folder, subfolder) if subfolder else folder
        try:
            with os.scandir(current) as entries:
                shown = [entry for entry in entries if not entry.name.startswith(".")]
            files = [one.path for one in shown if Path(one.path).is_file() and Path(one.name).suffix[1:].lower() in suffixes]
            folders = [one for one in shown if enters and one.is_dir(follow_symlinks=False) and enters(one.path)]
        except OSError as error:
            if not subfolder:
                raise _unlisted(path, error, modality) from None
            items.append(NamedItem(shorten_name(current), _unlisted(current, error, modality), os.path.dirname(subfolder)))
            continue
        items += [NamedItem(shorten_name(file), file, subfolder) for file in files]
        waiting += [os.path.join(subfolder, one.name) for one in folders]
    if not items:
        kinds = ", ".join(suffixes)
        reason = f"the folder {short_repr(path)} holds no file of the kinds {kinds}; give another folder, or the files by name"
        raise InputError(reason, param=modality)
    return sorted(items, key=lambda item: item.source)


def _unlisted(path: str, error: OSError, modality: str) -> InputError:
    reason = f"the files of {short_repr(path)} cannot be listed ({error.strerror}); change the folder's rights, or give another"
    return InputError(reason, param=modality, code="invalid_media")


def local_files(path: str, modality: str, suffixes: Iterable[str] = ()) -> list[str]:
    """Return the files of a folder or those that match a pattern, sorted by name; the path itself if it is neither.

    Raises:
        InputError: there are none, or the folder cannot be read.
    """
    return [str(file.item) for file in _local_items(path, modality, suffixes)]


def images_and_pages(items: Iterable[object], policy: MediaPolicy | None = None) -> Iterator[NamedItem]:
    """Yield `named_items` of images, and each page of a PDF or TIFF and each frame of an animation as an item of its own.

    A page of a local file is its path and number, and the engine reads the file when it comes to the page: a folder of
    PDFs need not fit into memory. PDFs from URLs and bytes are read once and kept. Of each http(s) URL, the first bytes are
    fetched to see what it holds, of several URLs at once.

    Args:
        policy: limits of PDFs and of what is fetched; None: the default ones.
    """
    from ..mm.media.policy import DEFAULT_POLICY
    from ..mm.types import Media

    for named, data, kind in _kinds(named_items(items, "image", (_PDF_SUFFIX,)), policy or DEFAULT_POLICY):
        pages = _pages(data, kind, policy)
        if isinstance(pages, InputError):
            yield NamedItem(named.source, pages)
        elif not pages:
            yield named
        for page in () if isinstance(pages, InputError) else pages:
            item = replace(named.item, data=page) if type(named.item) is Media else page
            yield NamedItem(f"{named.source}#page={page.number}", item)


def _kinds(items: Iterator[NamedItem], policy: MediaPolicy) -> Iterator[tuple[NamedItem, Any, str]]:
    """Yield each item with its data and `_kind_of_pages`."""
    from ..mm.types import Media

    with ThreadPoolExecutor(_AT_ONCE) as threads:  # a thread starts only when it is needed
        while batch := list(islice(items, _AT_ONCE)):
            data = [item.item.data if type(item.item) is Media else item.item for item in batch]
            remote = [threads.submit(_kind_of_pages, value, policy) if _is_remote(value) else None for value in data]
            for item, value, fetched in zip(batch, data, remote, strict=True):
                yield item, value, fetched.result() if fetched is not None else _kind_of_pages(value, policy)


def _is_remote(value: object) -> bool:
    from ..mm.media.source import is_http

    return type(value) is str and is_http(value)


def _is_a(value: Any, *kinds: type) -> bool:
    """Return `isinstance` by the type alone: the `__class__` of a broken object may raise."""
    return issubclass(type(value), kinds)


def _kind_of_pages(data: Any, policy: MediaPolicy) -> str:
    """Return "pdf", "pictures" for a TIFF or an animation, or "" for an item that has no pages.

    The first bytes decide, or the name or type of a file whose bytes are not at hand or tell nothing.
    """
    from ..mm.media.data_url import is_data_url, split_data_url
    from ..mm.media.image_pages import HEADER_BYTES, may_hold_pages
    from ..mm.media.pdf import is_pdf
    from ..mm.media.source import read_head

    head = read_head(data, HEADER_BYTES, policy)
    if is_pdf(head) or may_hold_pages(head):
        return "pdf" if is_pdf(head) else "pictures"
    path = getattr(data, "name", None) if hasattr(data, "read") else data
    name = str(path) if _is_a(path, str, os.PathLike) else ""
    if is_data_url(name):
        parts = split_data_url(name)
        return "pdf" if parts is not None and parts.media_type == "application/pdf" else ""
    name = re.split("[?#]", name, maxsplit=1)[0] if URL.match(name) else name
    return "pdf" if name.rstrip().lower().endswith(".pdf") else ""


def _pages(file: Any, kind: str, policy: MediaPolicy | None) -> Sequence[PdfPage] | InputError:
    """Return the pages of a file: none if it has one picture. Return the error if a PDF cannot be opened.

    A broken picture is reported later by the engine.
    """
    from ..mm.media.pdf import pdf_pages
    from ..mm.media.policy import DEFAULT_POLICY, PdfPage
    from ..mm.media.source import local_path

    if not kind:
        return ()
    file = local_path(file)
    try:
        pages = pdf_pages(file, policy or DEFAULT_POLICY)
    except InputError as error:
        return error if kind == "pdf" else ()
    if kind == "pictures" and len(pages) == 1:
        return ()
    is_local = isinstance(file, os.PathLike) or (isinstance(file, str) and not URL.match(file))
    return [PdfPage(file, page.number) for page in pages] if is_local else pages


def _name(data: object) -> str:
    """Return what names an item: the path or URL, that of an open file or of a PIL image, or that of a PDF with the page."""
    from ..mm.media.policy import PdfPage, source_of

    try:
        if isinstance(data, PdfPage):
            return f"{data.source}#page={data.number}" if data.source else ""
        return shorten_name(data if isinstance(data, str) else source_of(data) or source_of(getattr(data, "filename", "")))
    except Exception:  # of the caller's object
        return ""


def shorten_name(name: str) -> str:
    """Return a path or URL as it was given; a data: URL or an overlong path is cut."""
    limit = _MAX_DATA_URL if name[:5].lower() == "data:" else _MAX_NAME
    return name if len(name) <= limit else f"{name[:limit]}..."
