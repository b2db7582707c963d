"""Inputs of commands: files, folders, globs, URLs, and `-` for stdin."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..callers.errors import ConfigError, short_repr
from ..pipelines.files import URL, local_files, shorten_name

_MAX_PATH = 4096  # characters shown of a path


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
        InputError: nothing has this name. ConfigError: stdin is a terminal or is named twice.
    """
    sources, words = list[Source](), list(words)
    check_stdin_once(words)
    for word in words:
        if word == "-":
            sources.append(Source("-", read_stdin(f"{modality} file")))
        else:
            files = [word] if URL.match(word) else local_files(word, modality, suffixes)
            sources += [Source(shorten_name(file), file) for file in files]
    return sources


def check_stdin_once(words: Sequence[str]) -> None:
    """Raise ConfigError if stdin is named twice."""
    if words.count("-") > 1:
        raise ConfigError("- is given twice, but stdin holds one file; give it once")


def check_files(sources: Sequence[Source], every: bool) -> None:
    """Raise ConfigError, before a model is loaded, if a file cannot be read. With `every`=False one that can is enough."""
    wrong = [reason for source in sources if (reason := _why_unreadable(source.item))]
    if wrong and (every or len(wrong) == len(sources)):
        raise ConfigError(f"{wrong[0]}; give another path")


def _why_unreadable(item: str | bytes) -> str:
    """Return why a local file cannot be read, or "". A path that no file can have is left to the engine, as URLs are."""
    if isinstance(item, bytes) or URL.match(item):
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
