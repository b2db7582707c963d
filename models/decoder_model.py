"""A decoder with its head: what every family of models with one is built on. Knows no tower and no connector."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from .activations import adapter_bytes, decoder_bytes, gathered_bytes
from .interface import ForwardBatch, Work
from .layers.adapter import LowRank, Switch
from .layers.linear import Head
from .text.decoder import Decoder
from .text.spec import DecoderSpec
from .weights import fill

TEXT_PREFIXES = (
    ("model.language_model.", "language_model."),
    ("language_model.model.", "language_model."),
    ("language_model.lm_head.", "head.lm_head."),
    ("lm_head.", "head.lm_head."),
)
"""Names of the decoder and its head beside a tower, of transformers 5 and 4."""


class DecoderModel(nn.Module):
    """See `models.interface.Model`. A family adds its tower, and what embeds items and counts their bytes.

    Attributes:
        prefixes: (as stored, canonical) beginnings of names, the first match wins. `TEXT_PREFIXES` serve checkpoints that
            keep the decoder under `language_model.`; a family puts its own before them.
        ignored: beginnings of canonical names of stored tensors that nothing here uses.
        kept: those of tensors that are for later use; where the checkpoint has them, they are in `spare`, by name.
    """

    prefixes: ClassVar[Sequence[tuple[str, str]]] = ()
    ignored: Sequence[str] = ()
    kept: Sequence[str] = ()
    routes_by_modality: Mapping[str, int] = {}
    adapters: Sequence[str] = ()
    recordable = True

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.dtype, self.switch = spec, dtype, Switch()
        self.rope_axes, self.vocab_size, self.max_positions = spec.rope_axes, spec.vocab_size, spec.max_positions
        self.hidden_size, self.row_size = spec.hidden_size, spec.hidden_size * (1 + len(spec.deepstack))
        self.language_model = Decoder(spec, dtype, device)
        self.cache_specs = self.language_model.cache_specs
        table = self.language_model.embed_tokens.weight if spec.tied else None
        self.head = Head(spec.hidden_size, spec.vocab_size, table, dtype, device, scale=spec.logit_scale, cap=spec.logit_cap)

    def forward(self, batch: ForwardBatch) -> Tensor:
        self.switch.turn(batch.adapters, len(self.adapters))
        return self.language_model(batch)  # type: ignore[no-any-return]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)  # type: ignore[no-any-return]

    def forward_bytes(self, work: Work) -> int:
        added = [one for one in self.modules() if isinstance(one, LowRank)]
        parts = [[one for one in added if f".{part}." in one.stem] for part in ("self_attn", "mlp")]
        beside = adapter_bytes(parts[0], work, self.dtype), adapter_bytes(parts[1], work, self.dtype)
        return decoder_bytes(self.spec, work, self.dtype, beside) + gathered_bytes(self.spec, work, self.dtype)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        aliases = {"head.lm_head.weight": "language_model.embed_tokens.weight"} if self.spec.tied else {}
        self.spare = fill(self, weights, self.prefixes, aliases, tuple(self.ignored), tuple(self.kept))
