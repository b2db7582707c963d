"""Text encoders: all tokens of a prompt attend to each other."""

from __future__ import annotations

from ....processors.bases.attention_rules import PREFIX_LM
from ..text_only.processing import TextProcessingInfo


class BertProcessingInfo(TextProcessingInfo):
    """The inputs of an encoder, which takes no items."""

    prompt_attention = PREFIX_LM
