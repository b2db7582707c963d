"""The JSON files of a checkpoint folder that describe input processing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..mm.errors import CheckpointError, ConfigError, InputError, check_utf8, clip, short_repr
from ..mm.files import open_regular
from ..mm.gguf import find_encoder, find_gguf, read_gguf
from .gguf_images import image_settings
from .text.tekken import tekken_template

ADAPTER = "adapter_config.json"
POOLING = "1_Pooling/config.json"  # this and MODULES: files of sentence-transformers
MODULES = "modules.json"


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty if the file is missing. CheckpointError if it is unreadable or not a regular file."""
    text = read_file(path)
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def read_file(path: Path) -> bytes | None:
    """Return the bytes of a file; None if it is missing. CheckpointError if it is unreadable or not a regular file."""
    try:
        with open_regular(path) as file:
            return file.read()
    except CheckpointError:
        raise
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no file can have this name
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from None


@dataclass(frozen=True)
class ProcessorFiles:
    """The raw JSON that a ProcessingInfo is made from, and functions of the tokenizer. A missing file is an empty object.

    Args:
        generation: generation_config.json, which names tokens of speech models.
        encode: token ids of plain text; special tokens are neither added nor recognised.
        decode: text of ids, without special tokens.
        token_to_id: id of the single token that spells a text, or None.
        folder: the checkpoint folder.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    image: Mapping[str, Any] = field(default_factory=dict)
    video: Mapping[str, Any] = field(default_factory=dict)
    audio: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    encode: Callable[[str], list[int]] | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    token_to_id: Callable[[str], int | None] | None = None
    folder: Path | None = None

    def mismatch_error(self, statement: str, value: object) -> ConfigError:
        """Return the error for a `statement` about another file that contradicts `value` of the preprocessor's JSON."""
        if self.image or self.audio:
            return ConfigError(f"{statement}, but the preprocessor's JSON sets {value}, or omits it and {value} is the default")
        return ConfigError(
            f"{statement}, but preprocessor_config.json is missing and the default is {value}; download it as well"
        )


def read_preprocessors(path: str | Path) -> ProcessorFiles:
    """Read config.json and the preprocessors' files of a folder.

    Newer checkpoints nest the latter in processor_config.json, which takes precedence, as in transformers.
    """
    folder = Path(path)
    gguf = find_gguf(folder)
    if gguf is not None:
        encoder = find_encoder(gguf)
        return ProcessorFiles(image={} if encoder is None else image_settings(read_gguf(encoder).metadata), folder=folder)
    nested, plain = read_json(folder / "processor_config.json"), read_json(folder / "preprocessor_config.json")
    # older image processors are called feature extractors, too (CLIPFeatureExtractor)
    resizes = "do_resize" in plain and plain.keys().isdisjoint(("image_processor_type", "sampling_rate"))
    has_audio = "feature_extractor_type" in plain and not resizes
    has_images = "image_processor_type" in plain or not has_audio
    # in a file for both, do_normalize is an option of the image processor
    audio = {key: value for key, value in plain.items() if not (has_images and key == "do_normalize")}
    return ProcessorFiles(
        config=read_json(folder / "config.json"),
        image=nested.get("image_processor") or (plain if has_images else {}),
        video=nested.get("video_processor") or read_json(folder / "video_preprocessor_config.json"),
        audio=nested.get("feature_extractor") or nested.get("audio_processor") or (audio if has_audio else {}),
        generation=read_json(folder / "generation_config.json"),
        folder=folder,
    )


def read_template(given: str | os.PathLike[str]) -> str:
    """Return the Jinja source of a chat template that is given as source, or as the path of a file.

    A text with a brace or a line break is source, as in vLLM.

    Raises:
        InputError: there is no such file, or it cannot be read.
    """
    if isinstance(given, str) and not {"{", "}", "\n"}.isdisjoint(given):
        return given
    check_utf8(os.fspath(given), "chat_template")
    try:
        with open_regular(Path(given).expanduser()) as file:
            return file.read().decode("utf-8")
    except (OSError, ValueError) as error:
        reason = clip(str(getattr(error, "strerror", None) or error), 100)
        how = "give Jinja source, or the path of a file that holds it"
        text = f"chat_template={short_repr(os.fspath(given))} cannot be read ({reason}); {how}"
        raise InputError(text, param="chat_template") from None


def find_template(path: str | Path) -> str | None:
    """Return the chat template of a checkpoint: chat_template.jinja, chat_template.json, tokenizer_config.json or GGUF's own.

    A folder without these but with a tekken.json gets the template of its tokenizer version. CheckpointError if the template
    cannot be read.
    """
    try:
        return _template(Path(path))
    except (UnicodeError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the chat template of {path} cannot be read ({error}); download it again") from None


def _template(folder: Path) -> str | None:
    gguf = find_gguf(folder)
    if gguf is not None:
        own = read_gguf(gguf).metadata.get("tokenizer.chat_template")
        return own if isinstance(own, str) else None
    jinja = read_file(folder / "chat_template.jinja")
    if jinja is not None:
        return jinja.decode("utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(folder / name).get("chat_template")
        if isinstance(template, list):  # several templates, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if isinstance(template, str):
            return template
    return tekken_template(read_json(folder / "tekken.json"))
