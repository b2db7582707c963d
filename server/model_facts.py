"""What a server tells about a model, also while the model is not loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..engine.config import EngineConfig
from ..engine.core_info import CoreInfo
from ..engine.model_files import ModelFiles
from ..pipelines.speech.options import Times
from .parsers.answer import AnswerFormat


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model.

    Args:
        path: the folder or file of the checkpoint.
        architecture: the name of its class in config.json.
        dtype: how its weights are stored, or the dtype in which it computes.
        max_model_len: maximum number of tokens of prompt and answer together.
        capabilities: what GET /v1/models returns under this name.
        ollama_capabilities: the same in Ollama's words.
        classifies: its head gives classes of prompts.
    """

    path: Path
    architecture: str
    dtype: str
    max_model_len: int
    hidden_size: int
    chat_template: str
    capabilities: Mapping[str, Any]
    ollama_capabilities: Sequence[str]
    classifies: bool


def make_facts(
    config: EngineConfig,
    files: ModelFiles,
    core: CoreInfo,
    speech: Any,
    template: str | None,
    answers: AnswerFormat,
) -> ModelFacts:
    """Return the facts about a model.

    Args:
        speech: the model's interface for transcription, or None.
        template: its chat template.
        answers: how it writes reasoning and tool calls.
    """
    generates, chats = core.can_generate, core.can_generate and template is not None
    segments, words = transcript_times(speech)
    capabilities = {
        "modalities": core.modalities,
        "tasks": (["chat"] if chats else []) + list(speech.tasks if speech else ()),
        "segment_times": segments != "none",
        "word_times": words,
        "realtime": speech is not None,
        "documents": chats and find_spec("pypdfium2") is not None,
        "architecture": files.architecture,
        "patch_size": (files.config.get("vision_config") or {}).get("patch_size"),
    }
    in_ollama = {
        "completion": generates,
        "vision": generates and "image" in core.modalities,
        "tools": generates and answers.calls is not None,
        "thinking": generates and answers.reasoning is not None,
        "embedding": not generates,
    }
    return ModelFacts(
        Path(config.model),
        files.architecture or "unknown",
        str(config.quantization or core.dtype),
        core.max_model_len,
        core.hidden_size,
        template or "",
        capabilities,
        [name for name, applies in in_ollama.items() if applies],
        core.num_labels > 0 and not core.labels_tokens,
    )


def transcript_times(speech: Any) -> tuple[Times, bool]:
    """Return the argument `timestamps` of `transcribe` that gives segments, and whether the model times words.

    A model without timestamps whose words have times gives a segment for each window; "none" if it has neither.
    """
    words = speech is not None and (speech.alignment() is not None or speech.frame_rule() is not None)
    has_timestamps = speech is not None and speech.has_timestamps
    return "segment" if has_timestamps else "word" if words else "none", words
