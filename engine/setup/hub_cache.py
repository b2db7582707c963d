"""The Hugging Face Hub's cache on disk, in the layout of huggingface_hub, which other programs share.

models--ORG--NAME/refs/<branch or tag>       the commit of a revision
                  trees/<commit>.json        the files of a commit, with sizes and hashes
                  blobs/<hash>               contents; <hash>.incomplete during a download
                  snapshots/<commit>/<name>  links to blobs
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ...callers.errors import CheckpointError, ConfigError, SensoriumError, short_repr
from ...checkpoints.external import PARTS, external_parts
from ...checkpoints.folder import INDEX_END, WEIGHTS_END, CheckpointFolder
from ...checkpoints.gguf.reader import SUFFIX
from ...checkpoints.weight_files import ADAPTER_WEIGHTS
from ...processors.files import ADAPTER, MODULES
from ...processors.sentence_transformers import SETTINGS
from ..model_files import nested_adapters

COMMIT = re.compile(r"[0-9a-f]{40}")
MAIN = "main"
_HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_PART = r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_NAME = re.compile(f"{_PART}/{_PART}")
_NESTED = re.compile(rf"\w[\w.-]*/{re.escape(ADAPTER)}")
_FOLDERS = "|".join(re.escape(part.folder) for part in PARTS if part.folder)
_IN_FOLDER = re.compile(rf"({_FOLDERS})/((preprocessor_)?config|model\.safetensors\.index)\.json")
_MODULE = re.compile(r"\d+_\w+/config\.json")  # of sentence-transformers; _MODULE_WEIGHTS: of the modules that have weights
_MODULE_WEIGHTS = re.compile(r"\d+_(Dense|LayerNorm)/model\.safetensors")
_VOICE = re.compile(r"voices/\w+\.pt")  # of Kokoro; `checkpoints.torch_file` reads them without unpickling
_MAX_NAME = 96  # characters of a name on the Hub
_FILES = (
    "*config.json",
    "params.json",
    MODULES,
    SETTINGS,
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "tokenizer.model",
    "tokenizer.model.v*",
    "tiktoken.model",
    "spiece.model",
    "*.tiktoken",
    "chat_template.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "consolidated.safetensors.index.json",
    "spk_dict.pt",  # voices of Qwen2.5-Omni; `checkpoints.torch_file` reads it without unpickling
    "*.ttf",  # draws timestamps onto the frames of Ernie-4.5-VL
)
"""Patterns of the files that are read beside the weights. Code and pickled weights match none."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a commit. `hash`: SHA-256 of the content or, for files outside Git LFS, git's SHA-1. It names the blob."""

    name: str
    size: int
    hash: str


def is_name(model: str) -> bool:
    """Return whether a string can name a model on the Hub: ORG/NAME. A folder of that path takes precedence."""
    plain = len(model) <= _MAX_NAME and _NAME.fullmatch(model) and not model.endswith(".git")
    return bool(plain) and "--" not in model and ".." not in model


def cache_folder() -> Path:
    """Return the folder that HF_HUB_CACHE or HF_HOME names, else ~/.cache/huggingface/hub."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def check_revision(revision: str) -> str:
    """Return the revision. Raise ConfigError if it is no name of a branch, a tag or a commit."""
    if not re.fullmatch(r"\w[\w./+@-]*", revision) or ".." in revision or "//" in revision or revision.endswith("/"):
        reason = f"<<param=>>{short_repr(revision)} is not the name of a branch, a tag or a commit"
        raise ConfigError(f"{reason}; leave it out for the branch main", param="revision")
    return revision


class CachedModel:
    """The cache of one model. Reading it needs no network."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self.name = name
        self.folder = folder or cache_folder() / f"models--{name.replace('/', '--')}"
        self.blobs = self.folder / "blobs"

    def commit(self, revision: str) -> str | None:
        """Return the commit that a revision had when it was last downloaded, or None."""
        if COMMIT.fullmatch(revision):
            return revision if self.snapshot(revision).is_dir() else None
        try:
            text = (self.folder / "refs" / revision).read_text("utf-8").strip()
        except (OSError, UnicodeError):
            return None
        return text if COMMIT.fullmatch(text) else None

    def revisions(self) -> Iterator[tuple[str, str]]:
        """Yield (revision, commit) of each snapshot: its branches and tags, or the commit if it has none."""
        refs = self.folder / "refs"
        named = [str(path.relative_to(refs)) for path in sorted(refs.rglob("*")) if path.is_file()]
        named_commits = [(ref, commit) for ref in named if (commit := self.commit(ref)) and self.snapshot(commit).is_dir()]
        yield from named_commits
        commits = {commit for _, commit in named_commits}
        for path in sorted((self.folder / "snapshots").glob("*")):
            if COMMIT.fullmatch(path.name) and path.name not in commits:
                yield path.name, path.name

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def files(self, commit: str) -> dict[str, RemoteFile] | None:
        """Return the files of a commit as they were on the Hub, or None if that is not known."""
        try:
            entries = json.loads((self.folder / "trees" / f"{commit}.json").read_bytes())["files"]
            return {name: remote_file(name, entry) for name, entry in entries.items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None

    def has(self, commit: str, file: RemoteFile) -> bool:
        return size_of(self.snapshot(commit) / file.name) == file.size

    def missing(self, commit: str, weights: bool = True) -> list[str]:
        """Return the names of files that the engine needs and the snapshot lacks. Raise CheckpointError for a broken index."""
        folder, files = self.snapshot(commit), self.files(commit)
        if files is None:  # downloaded by another program: only the weights are known to be needed
            if is_adapter(folder):
                return [] if (folder / ADAPTER_WEIGHTS).is_file() or not weights else [ADAPTER_WEIGHTS]
            names = [name for name in ("config.json", "params.json") if (folder / name).is_file()][:1] or ["config.json"]
            names += [file.name for file in CheckpointFolder(folder).weight_files()] if weights else []
            return [name for name in names if not (folder / name).is_file()]
        absent = [name for name in small_files(files) if not self.has(commit, files[name])]
        if absent or not weights:
            return absent
        return [file.name for file in remote_weights(self.name, files, folder) if not self.has(commit, file)]

    def is_complete(self, commit: str, weights: bool = True) -> bool:
        try:
            return not self.missing(commit, weights)
        except SensoriumError:
            return False

    def write_files(self, commit: str, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Store the files of a commit, as `files` and huggingface_hub read them."""
        _write(self.folder / "trees" / f"{commit}.json", json.dumps({"format_version": 1, "files": entries}, indent=1))

    def write_ref(self, revision: str, commit: str) -> None:
        if self.commit(revision) != commit:
            _write(self.folder / "refs" / revision, commit)

    def link(self, commit: str, file: RemoteFile) -> None:
        """Make the snapshot's file a link to its blob. It replaces a file of another size."""
        target = self.snapshot(commit) / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".link-") as folder:
            os.symlink(os.path.relpath(self.blobs / file.hash, target.parent), os.path.join(folder, "link"))
            os.replace(os.path.join(folder, "link"), target)


def cached_models() -> Iterator[CachedModel]:
    """Yield the models of the cache, by name."""
    for folder in sorted(cache_folder().glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/")
        if is_name(name) and folder.is_dir():
            yield CachedModel(name, folder)


def remote_file(name: str, entry: Mapping[str, Any]) -> RemoteFile:
    """Return a file from its entry in `trees`. Raise ValueError if the entry is not valid."""
    size, code = entry.get("lfs_size", entry["size"]), entry.get("lfs_sha256", entry["blob_id"])
    if not isinstance(size, int) or size < 0 or not isinstance(code, str) or not _HASH.fullmatch(code):
        raise ValueError(f"{name} has no size and hash")
    return RemoteFile(name, size, code)


def small_files(files: Mapping[str, RemoteFile]) -> list[str]:
    """Return the names of the files beside the weights. Of folders: voices, and settings of adapters, encoders and modules."""
    plain = [name for name in files if "/" not in name and any(fnmatchcase(name, pattern) for pattern in _FILES)]
    return plain + [
        name for name in files if any(pattern.fullmatch(name) for pattern in (_MODULE, _NESTED, _IN_FOLDER, _VOICE))
    ]


def remote_weights(name: str, files: Mapping[str, RemoteFile], folder: Path) -> list[RemoteFile]:
    """Return the weights of a commit and of the adapters that it has. `folder` holds the files beside the weights.

    Raises:
        CheckpointError: there are no weights that are read, or the index names files that are not there.
    """
    saved = CheckpointFolder(folder, files).saved
    if saved is None and not any(file.endswith((WEIGHTS_END, INDEX_END)) and "/" not in file for file in files):
        gguf = next((file for file in files if file.endswith(SUFFIX)), None)
        if gguf is not None:
            raise CheckpointError(
                f"{name} has GGUF files; run `hf download {name} {short_repr(gguf)}` and give the file's path"
            )
        reason = f"{name} has no safetensors weights on the Hub, and no others are read, since they may hold code"
        raise CheckpointError(f"{reason}; use a model or a revision with safetensors")
    names = [ADAPTER_WEIGHTS] if ADAPTER in files and ADAPTER_WEIGHTS in files else []
    checkpoint = CheckpointFolder(folder, files)
    if not names or checkpoint.has_safetensors:
        names = [path.name for path in (checkpoint.safetensors() if saved is None else [saved])] + names
    if any(map(_NESTED.fullmatch, files)):
        nested = (f"{subfolder}/{ADAPTER_WEIGHTS}" for subfolder in nested_adapters(folder))
        names += [name for name in nested if name in files]
    for _, subfolder in external_parts(checkpoint.json("config.json")):
        inside = {file.removeprefix(f"{subfolder}/") for file in files if file.startswith(f"{subfolder}/")}
        part = CheckpointFolder(folder / subfolder, inside)
        names += [f"{subfolder}/{path.name}" for path in part.safetensors()] if part.has_safetensors else []
    names += [name for name in files if _MODULE_WEIGHTS.fullmatch(name)]
    absent = [name for name in names if name not in files]
    if absent:
        raise CheckpointError(
            f"the index of {name} names {short_repr(absent[0])}, which is not on the Hub; try another revision"
        )
    return [files[name] for name in names]


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter without the weights of its base model."""
    if not os.path.isfile(folder / ADAPTER):  # False for a path that is too long
        return False
    has_model = CheckpointFolder(folder).has_safetensors
    return not (folder / "config.json").is_file() or ((folder / ADAPTER_WEIGHTS).is_file() and not has_model)


def size_of(path: Path) -> int:
    """Return the bytes of a file, or -1 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _write(path: Path, text: str) -> None:
    """Replace a file at once, so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".write-") as folder:
        written = Path(folder) / "file"
        written.write_text(text, "utf-8")
        os.replace(written, path)
