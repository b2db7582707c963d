"""The input of Kokoro: the tokens of phonemes, each one a character of the vocabulary in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....mm.speech import PhonemeRule
from ....processors.bases.attention_rules import PREFIX_LM
from ....processors.files import ProcessorFiles
from ...audio.istftnet import RATE
from ...audio.styletts2 import styletts2_spec
from ..text_only.processing import TextProcessingInfo
from .config import EDGE, read_albert, read_vocabulary


class KokoroProcessingInfo(TextProcessingInfo):
    """Implements `processors.interface.SupportsPhonemes`."""

    prompt_attention = PREFIX_LM

    def __init__(self, files: ProcessorFiles, *kwargs: Mapping[str, Any]) -> None:
        super().__init__(files, *kwargs)
        spec, positions = styletts2_spec(files.config), int(read_albert(files.config)["max_position_embeddings"])
        self._rule = PhonemeRule(
            read_vocabulary(files.config), EDGE, positions - 2, 2 * spec.style, RATE, spec.samples_per_frame
        )

    def phoneme_rule(self) -> PhonemeRule:
        return self._rule
