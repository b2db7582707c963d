"""The JSON files of a checkpoint folder that describe input processing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..callers.errors import CheckpointError, ConfigError, InputError, check_utf8, clip, short_repr
from ..checkpoints.files import open_regular, read_file, read_json
from ..checkpoints.folder import CheckpointFolder
from ..checkpoints.gguf.images import image_settings
from ..checkpoints.gguf.reader import find_gguf, read_gguf
from .text.tekken import tekken_template

ADAPTER = "adapter_config.json"
POOLING = "1_Pooling/config.json"  # this and MODULES: files of sentence-transformers
MODULES = "modules.json"


@dataclass(frozen=True)
class ProcessorFiles:
    """The raw JSON that a ProcessingInfo is made from, and functions of the tokenizer. A missing file is an empty object.

    Args:
        generation: generation_config.json, which names tokens of speech models.
        encode: token ids of plain text; special tokens are neither added nor recognised.
        encode_trusted: token ids of a text of the family itself; added tokens in it are recognised.
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
    encode_trusted: Callable[[str], list[int]] | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    token_to_id: Callable[[str], int | None] | None = None
    folder: Path | None = None

    def read_json(self, name: str) -> dict[str, Any]:
        """Return another JSON file of the folder; empty without it."""
        return {} if self.folder is None else read_json(self.folder / name)

    def mismatch_error(self, statement: str, value: object) -> ConfigError:
        """Return the error for a `statement` about another file that contradicts `value` of the preprocessor's JSON."""
        if self.image or self.audio:
            return ConfigError(f"{statement}, but the preprocessor's JSON sets {value}, or omits it and {value} is the default")
        return ConfigError(
            f"{statement}, but preprocessor_config.json is missing and the default is {value}; download it as well"
        )


def read_preprocessors(checkpoint: CheckpointFolder | str | Path) -> ProcessorFiles:
    """Read config.json and the preprocessors' files of a checkpoint.

    Newer checkpoints nest the latter in processor_config.json, which takes precedence, as in transformers.
    """
    checkpoint = checkpoint if isinstance(checkpoint, CheckpointFolder) else CheckpointFolder(checkpoint)
    folder, gguf = checkpoint.path, checkpoint.gguf
    if gguf is not None:
        return ProcessorFiles(image={} if gguf.encoder is None else image_settings(gguf.encoder.metadata), folder=folder)
    nested, plain = checkpoint.json("processor_config.json"), checkpoint.json("preprocessor_config.json")
    # older image processors are called feature extractors, too (CLIPFeatureExtractor)
    resizes = "do_resize" in plain and plain.keys().isdisjoint(("image_processor_type", "sampling_rate"))
    has_audio = "feature_extractor_type" in plain and not resizes
    has_images = "image_processor_type" in plain or not has_audio
    # in a file for both, do_normalize is an option of the image processor
    audio = {key: value for key, value in plain.items() if not (has_images and key == "do_normalize")}
    return ProcessorFiles(
        config=checkpoint.json("config.json"),
        image=nested.get("image_processor") or (plain if has_images else {}),
        video=nested.get("video_processor") or checkpoint.json("video_preprocessor_config.json"),
        audio=nested.get("feature_extractor") or nested.get("audio_processor") or (audio if has_audio else {}),
        generation=checkpoint.json("generation_config.json"),
        folder=folder,
    )


def read_template(template: str | os.PathLike[str]) -> str:
    """Return the Jinja source of a chat template that is given as source, or as the path of a file.

    A text with a brace or a line break is source, as in vLLM.

    Raises:
        InputError: there is no such file, or it cannot be read.
    """
    if isinstance(template, str) and not {"{", "}", "\n"}.isdisjoint(template):
        return template
    check_utf8(os.fspath(template), "chat_template")
    try:
        with open_regular(Path(template).expanduser()) as file:
            return file.read().decode("utf-8")
    except (OSError, ValueError) as error:
        reason = clip(str(getattr(error, "strerror", None) or error), 100)
        how = "give Jinja source, or the path of a file that holds it"
        text = f"<<param=>>{short_repr(os.fspath(template))} cannot be read ({reason}); {how}"
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
        stored = read_gguf(gguf).metadata.get("tokenizer.chat_template")
        return stored if isinstance(stored, str) else None
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
