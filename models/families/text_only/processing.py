"""Text-only checkpoints: prompts without items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from ....callers.errors import ConfigError, InputError
from ....mm.types import MediaHeader, MediaItem
from ....processors.bases.attention_rules import PROMPT_WINDOWS
from ....processors.bases.base import BaseProcessingInfo
from ....processors.files import ProcessorFiles
from ...text.bidirectional import attends_to_all
from ...text.stack import Stack
from ...text.stacks import STACKS


class TextProcessingInfo(BaseProcessingInfo):
    """The inputs of a model that takes no items."""

    embeds_layout = None

    def __init__(self, files: ProcessorFiles, *kwargs: Mapping[str, Any]) -> None:
        if names := sorted({name for options in kwargs for name in options}):
            raise ConfigError(f"this model takes text only; leave out {names[0]!r}", param="mm_processor_kwargs")
        super().__init__(files, *kwargs)
        if attends_to_all(self.text_config, STACKS.get(str(self.text_config.get("model_type")), Stack())):
            self.prompt_attention = PROMPT_WINDOWS

    def resolve_spec(self, modality: str) -> NoReturn:
        raise ConfigError(f"this model takes text only; leave out {modality!r}")

    def geometry(self, header: MediaHeader) -> NoReturn:
        raise InputError(f"this model takes text only; leave out the {header.modality}", code="unsupported")

    def process(self, item: MediaItem, dtype: torch.dtype) -> NoReturn:
        raise InputError(f"this model takes text only; leave out the {item.header.modality}", code="unsupported")
