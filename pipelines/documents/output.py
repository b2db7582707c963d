"""The folder of outputs: a file for each document, written at once, and the manifest of its pages."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from ...callers.errors import ConfigError, is_disk_full
from ...mm.media.policy import MediaPolicy
from ..files import NamedItem
from .manifest import NAME
from .owner import has_ended
from .projections import SUFFIXES, Projected, project
from .searchable import searchable_pdf

_PARTS = ".sensorium-read-parts"


class DocumentFolder:
    """Names and writes the outputs of documents. Those of subfolders are in subfolders of the same names.

    Raises:
        ConfigError: the folder cannot be created or written to, an earlier run wrote there and this one does not resume it, it
            holds a file with the name of an output that no run wrote, or two documents would have the same output.
    """

    def __init__(self, path: Path, items: Sequence[NamedItem], output_format: str, resume: bool, policy: MediaPolicy) -> None:
        self.path, self.format = path, output_format
        self._items, self._policy = items, policy
        self._names = output_names(items, SUFFIXES[output_format])
        _make_folder(path)
        taken = next((name for name in self._names if os.path.lexists(path / name)), None)
        if taken is not None and not self.manifest.exists():  # in this order: another process may begin at this moment
            raise ConfigError(f"{path / taken} exists and would be overwritten; move it, or give another <<output_dir>>")
        if self.manifest.exists() and not resume:
            reason = f"the folder {path} holds the records of an earlier run"
            raise ConfigError(f"{reason}; add <<resume>> to go on with it, or give another <<output_dir>>")

    @property
    def manifest(self) -> Path:
        return self.path / NAME

    def write(self, index: int, document: Projected, owner: str) -> Path:
        """Write the output of a document, of which nobody sees a part. Return its path.

        Raises:
            InputError: it is a PDF, and the document cannot be opened or changed.
            ConfigError: the file cannot be written.
        """
        path, folder = self.path / self._names[index], self.path / _PARTS / owner.replace(":", "-")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            part = folder / path.name
            with open(part, "wb") as file:
                if self.format == "pdf":
                    file.write(searchable_pdf(self._items[index].item, document.pages, self._policy))
                else:
                    file.writelines(part.encode() for part in project(document, self.format))
            part.replace(path)
        except OSError as error:
            if is_disk_full(error):
                raise
            raise ConfigError(f"{path} cannot be written: {error.strerror}; give another <<output_dir>>") from None
        return path

    def clean(self, owner: str) -> None:
        """Remove the unfinished outputs of this owner, and of processes that have ended."""
        folder = self.path / _PARTS
        for part in folder.iterdir() if folder.is_dir() else ():
            if part.name == owner.replace(":", "-") or has_ended(_owner_of(part.name)):
                shutil.rmtree(part, ignore_errors=True)
        with suppress(OSError):  # it is not there, or another process writes there
            folder.rmdir()


def _owner_of(name: str) -> str:
    """Return the owner whose colons were replaced in the name of a folder: the machine has dashes of its own."""
    machine, *rest = name.rsplit("-", 3)
    return ":".join([machine, *rest])


def output_names(items: Sequence[NamedItem], suffix: str) -> list[str]:
    """Return a file name for each document: its own without the suffix, or with it if two documents differ only there.

    The name of a document from a subfolder has the path of the subfolder before it.

    Raises:
        ConfigError: two documents have the same name, or that of a subfolder.
    """
    names = [_file_name(item.source) for item in items]
    stems = [(item.subfolder, Path(name).stem) for item, name in zip(items, names, strict=True)]
    counts = Counter(stems)
    outputs = [
        os.path.join(subfolder, f"{name if counts[subfolder, stem] > 1 else stem}{suffix}")
        for (subfolder, stem), name in zip(stems, names, strict=True)
    ]
    owners = {str(folder): item.source for item in items for folder in (Path(item.subfolder), *Path(item.subfolder).parents)}
    for output, item in zip(outputs, items, strict=True):
        if output in owners:
            reason = f"{owners[output]} and {item.source} would both be written to {output}"
            raise ConfigError(f"{reason}; rename one, or read them into two folders")
        owners[output] = item.source
    return outputs


def _make_folder(path: Path) -> None:
    """Make the folder of outputs, if it is not there. Raise ConfigError if it cannot be made, or no file can be made in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {path} cannot be created: {error.strerror}; give another <<output_dir>>") from None
    try:
        TemporaryFile(dir=path).close()
    except OSError as error:
        reason = f"no file can be written into the folder {path}: {error.strerror}"
        raise ConfigError(f"{reason}; change the folder's rights, or give another <<output_dir>>") from None


def _file_name(source: str) -> str:
    """Return the name of a path's or URL's file."""
    path = re.split(r"[?#]", source)[0] if "://" in source[:10] else source
    name = re.split(r"[/\\]", path)[-1]
    return "stdin" if source in ("-", "") else name or "document"
