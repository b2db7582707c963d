"""Proposes what the worker has drafted: the model's own layers, an EAGLE-3 head or a smaller model."""

from __future__ import annotations

from collections.abc import Sequence

from .proposer import DraftedSequence


class PredictedProposer:
    """Returns the predictions that the worker sent with the last token. `name`: the method that made them."""

    matched = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def propose(self, sequence: DraftedSequence, budget: int) -> Sequence[int]:
        length, tokens = sequence.predicted
        return tokens[:budget] if length == len(sequence.token_ids) else ()
