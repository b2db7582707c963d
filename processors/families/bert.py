"""Text encoders: all tokens of a prompt attend to each other."""

from __future__ import annotations

from .text_only import TextProcessingInfo


class BertProcessingInfo(TextProcessingInfo):
    """The inputs of an encoder, which takes no items."""

    prompt_attention = "bidirectional_prompt"
