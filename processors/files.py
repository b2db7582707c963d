"""The JSON files of a checkpoint folder that say how inputs are made. Knows where they lie, not what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..mm.errors import CheckpointError, ConfigError
from .text.tekken import tekken_template

ADAPTER = "adapter_config.json"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where the file is missing; CheckpointError where it is unreadable."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


@dataclass(frozen=True)
class ProcessorFiles:
    """The raw JSON that a ProcessingInfo is made from; a missing file is an empty object.

    `generation` is generation_config.json, where families that write prompts of their own find their tokens. `encode` gives
    the token ids of plain text (no special tokens added or recognised), for families whose items are written with text of
    their own; `decode` gives the text of ids without special tokens; `token_to_id` gives the id of the one token that spells a
    text, None where there is none. `folder` is where they were read.
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

    def mismatch_error(self, said: str, have: object) -> ConfigError:
        """For what is `said` elsewhere of an input, where the preprocessor's JSON means `have`."""
        if self.image or self.audio:
            return ConfigError(f"{said}, but the preprocessor's JSON makes {have}, or leaves it out and means that")
        return ConfigError(f"{said}, but preprocessor_config.json is missing, which means {have}; download it as well")


def read_preprocessors(path: str | Path) -> ProcessorFiles:
    """config.json and the preprocessors' files of a folder.

    Newer checkpoints nest the latter in processor_config.json, which then wins, as it does for transformers.
    """
    folder = Path(path)
    nested, plain = read_json(folder / "processor_config.json"), read_json(folder / "preprocessor_config.json")
    sound = "feature_extractor_type" in plain
    sees = "image_processor_type" in plain or not sound
    heard = {key: value for key, value in plain.items() if not (sees and key == "do_normalize")}  # there it is of pictures
    return ProcessorFiles(
        config=read_json(folder / "config.json"),
        image=nested.get("image_processor") or (plain if sees else {}),
        video=nested.get("video_processor") or read_json(folder / "video_preprocessor_config.json"),
        audio=nested.get("feature_extractor") or nested.get("audio_processor") or (heard if sound else {}),
        generation=read_json(folder / "generation_config.json"),
        folder=folder,
    )


def find_template(path: str | Path) -> str | None:
    """The chat template of a checkpoint folder: chat_template.jinja, chat_template.json or tokenizer_config.json.

    A folder without one but with a tekken.json has that of its vocabulary. CheckpointError for one that is no text.
    """
    try:
        return _template(Path(path))
    except (UnicodeError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the chat template of {path} cannot be read ({error}); download it again") from None


def _template(folder: Path) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text("utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(folder / name).get("chat_template")
        if isinstance(template, list):  # several by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if isinstance(template, str):
            return template
    return tekken_template(read_json(folder / "tekken.json"))
