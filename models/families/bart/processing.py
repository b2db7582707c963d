"""Inputs of BART: the text that the encoder reads, and the first tokens of the decoder."""

from __future__ import annotations

from ....processors.bases.encoder_text import EncoderTextInfo


class BartProcessingInfo(EncoderTextInfo):
    """ProcessingInfo of BART."""

    text_config_defaults = {
        "vocab_size": 50265, "hidden_size": 1024, "max_position_embeddings": 1024, "decoder_start_token_id": 2,
    }  # fmt: skip
