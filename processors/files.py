"""The JSON files of a checkpoint folder that say how inputs are made. Knows where they lie, not what they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..mm.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where the file is missing; CheckpointError where it is unreadable."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path.name} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} is not a JSON object")
    return content


def read_preprocessors(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """`(preprocessor, video_preprocessor)` JSON for a ProcessingInfo, empty where missing.

    Newer checkpoints nest both in processor_config.json, which then wins, as it does for transformers.
    """
    folder = Path(path)
    nested = read_json(folder / "processor_config.json")
    image = nested.get("image_processor") or read_json(folder / "preprocessor_config.json")
    return image, nested.get("video_processor") or read_json(folder / "video_preprocessor_config.json")


def find_template(path: str | Path) -> str | None:
    """The chat template of a checkpoint folder: chat_template.jinja, chat_template.json or tokenizer_config.json."""
    folder = Path(path)
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text("utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(folder / name).get("chat_template")
        if isinstance(template, list):  # several by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if isinstance(template, str):
            return template
    return None
