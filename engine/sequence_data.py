"""The tokens and items of a sequence, which the scheduler and the worker both keep."""

from __future__ import annotations

from ..mm.types import MultiModalFeature
from .types import CROSS, EngineRequest


class SequenceData:
    """A sequence from its EngineRequest on.

    Attributes:
        message: the request as it came.
        token_ids: all tokens that are known on the host.
        features: items in order of their offset.
        prompt_length: tokens that the sequence began with, less those rolled back.
        cross_rows: encoder rows that the sequence reads through cross-attention.
    """

    def __init__(self, message: EngineRequest) -> None:
        self.message, self.request_id = message, message.request_id
        self.token_ids = list(message.prompt_token_ids)
        self.features = list(message.features)
        self.prompt_length = len(self.token_ids)
        self.cross_rows = sum(item.range.num_embeds for item in message.cross)

    def item(self, index: int) -> MultiModalFeature:
        """Return the item with this index; from CROSS down, those of the encoder input."""
        return self.message.cross[CROSS - index] if index <= CROSS else self.features[index]

    def cut(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and the items that begin among them."""
        del self.token_ids[num_tokens:]
        self.features = [feature for feature in self.features if feature.range.offset < num_tokens]
        self.prompt_length = min(self.prompt_length, num_tokens)
