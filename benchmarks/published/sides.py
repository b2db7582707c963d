"""A published model folder as sensorium and as transformers read it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from sensorium.callers.errors import ConfigError, SensoriumError
from sensorium.checkpoints.config import SECTIONS
from sensorium.checkpoints.files import read_json
from sensorium.engine.model_files import ModelFiles, load_model_files
from sensorium.engine.setup.resolve import load_processing
from sensorium.models.fallback.borrowed import class_of
from sensorium.processors.files import find_template
from sensorium.processors.interface import ProcessingInfo
from sensorium.processors.text.tokenizer import Tokenizer

VOCABULARY = ("vocab.json", "merges.txt")
_SHARES_VOCABULARY = ("Qwen2Tokenizer", "Qwen2TokenizerFast")  # Qwen2, 2.5 and 3 have these two files in common
_VOCABULARY_SIZE = 152_064  # of their largest models; later models have another vocabulary
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "tiktoken.model")


class Missing(Exception):
    """The folder lacks a file, or transformers lacks a class, that a check needs."""


class Sides:
    """One folder. Each property is read on first use and raises the error of its reader, or `Missing`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def files(self) -> ModelFiles:
        if not (self.folder / "config.json").exists():
            base = read_json(self.folder / "adapter_config.json").get("base_model_name_or_path")
            raise Missing(f"an adapter; its base model {base} is another repository")
        return load_model_files(self.folder)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if not any((self.folder / name).exists() for name in _TOKENIZERS):
            raise Missing("the folder has no tokenizer")
        return Tokenizer(self.folder)

    @cached_property
    def info(self) -> ProcessingInfo:
        return load_processing(self.files, {}, self.tokenizer)

    @cached_property
    def template(self) -> str:
        found = self.info.chat_template or find_template(self.folder)
        if found is None:
            raise Missing("the folder has no chat template")
        return found

    @cached_property
    def their_tokenizer(self) -> Any:
        try:
            return self._theirs("AutoTokenizer")
        except Missing:  # it can be misled by the model_type; the named class is not
            named = str(read_json(self.folder / "tokenizer_config.json").get("tokenizer_class"))
            if self.files.remote_code or named not in _SHARES_VOCABULARY:
                raise
            return self._theirs(named)

    @cached_property
    def their_processor(self) -> Any:
        found = self._theirs("AutoProcessor")
        if not hasattr(found, "tokenizer"):
            raise Missing("transformers has no processor")
        found.tokenizer.init_kwargs.pop("max_length", None)  # prompts are cut at a limit that training left in tokenizer.json
        return found

    @cached_property
    def their_class(self) -> Any:
        name = self.files.architecture.partition("/")[0]
        try:
            return class_of({"architectures": [name]})
        except (ConfigError, ImportError):
            raise Missing(f"transformers has no {name}") from None

    @cached_property
    def their_config(self) -> Any:
        config = self.their_class.config_class.from_pretrained(self.folder, local_files_only=True)
        unread = [key for key in self.files.config if key in SECTIONS and isinstance(getattr(config, key, None), dict)]
        if unread:
            raise Missing(f"transformers' class does not read {', '.join(unread)} of config.json")
        return config

    def _theirs(self, kind: str) -> Any:
        import transformers

        try:
            return getattr(transformers, kind).from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever its classes raise
            raise Missing(f"transformers has no {kind.removeprefix('Auto').lower()}: {line(error)}") from None


def line(error: BaseException, most: int = 110) -> str:
    """Return an error as one line of a Markdown table. If our own models and transformers refuse, only the latter's reason."""
    text = " ".join(str(error).split()).replace("|", "\\|") or type(error).__name__
    text = text.rpartition("; and through transformers: ")[2]
    if not isinstance(error, SensoriumError | Missing):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= most else text[: most - 3] + "..."


def attempt(read: Callable[[], Any]) -> Any:
    """Return what `read` returns, or the error that it raises."""
    try:
        return read()
    except Exception as error:
        return error


def complete(folder: Path, root: Path, target: Path) -> list[str]:
    """Link the files of a folder into `target`, with a vocabulary that the folder lacks and another one under `root` has.

    Returns:
        What was added, for the table.
    """
    target.mkdir(parents=True)
    for file in folder.iterdir():
        os.symlink(file.resolve(), target / file.name)
    config = read_json(target / "config.json")
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size", 0)
    if not _shares_vocabulary(target) or any((target / name).exists() for name in _TOKENIZERS) or size > _VOCABULARY_SIZE:
        return []
    donor = next((one.parent for one in sorted(root.glob("*/*/merges.txt")) if _shares_vocabulary(one.parent)), None)
    if donor is None:
        return []
    for name in VOCABULARY:
        os.symlink((donor / name).resolve(), target / name)
    return [f"vocabulary of {donor.name}"]


def _shares_vocabulary(folder: Path) -> bool:
    return read_json(folder / "tokenizer_config.json").get("tokenizer_class") in _SHARES_VOCABULARY
