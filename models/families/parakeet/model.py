"""Parakeet (arXiv 2305.05084): FastConformer with a CTC head, which names a token per row, or a transducer (TDT, RNN-T)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....checkpoints.config import positive_int
from ...audio.cache_aware import CacheAwareConformer
from ...audio.ctc import CtcState, decode_ctc
from ...audio.fastconformer import FastConformer, fastconformer_bytes, fastconformer_spec
from ...audio.transducer import STEP_ROWS, Transducer, TransducerState, transducer_bytes, transducer_prefixes, transducer_spec
from ...encoder_only import EncoderOnlyModel
from ...interface import LogitsRule, StepLimits
from ...layers.linear import Linear, LmHead
from ...weights import check, fill

_ROWS = 256  # whose logits are computed at a time
_DECODED_ROWS = 4096  # of a sequence in a step


class Parakeet(EncoderOnlyModel):
    """A model of audio. `prefixes`: (stored, canonical) prefixes of the head's tensors."""

    prefixes: Sequence[tuple[str, str]]

    def __init__(self, config: Mapping[str, Any], vocab: int, dtype: torch.dtype, device: torch.device) -> None:
        encoder = self.make_encoder(config.get("encoder_config") or {}, dtype, device)
        super().__init__(encoder.spec.width, vocab, encoder.spec.positions, dtype)
        self.encoder = encoder
        self.ignored = tuple(f"encoder.{name}" for name in self.encoder.unused)

    def make_encoder(
        self, audio: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> FastConformer | CacheAwareConformer:
        """Return the encoder of the raw `encoder_config`."""
        return FastConformer(fastconformer_spec(audio), dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        frames = tensors["audio_frames"].tolist()
        return list(self.encoder(tensors["input_features"], frames).split([self.encoder.spec.num_rows(n) for n in frames]))

    def input_bytes(self, modality: str, rows: int) -> int:
        return rows * self.encoder.spec.factor * self.encoder.spec.mels * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        return fastconformer_bytes(self.encoder.spec, rows, self.dtype, limits)

    def is_unused(self, name: str) -> bool:
        return name in self.ignored

    def check_weights(self, headers: Mapping[str, Tensor]) -> None:
        check(self, headers.items(), self.prefixes, self.ignored)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        fill(self, weights, self.prefixes, self.ignored)


class ParakeetCtc(Parakeet):
    """The vector of a row is its likeliest token and the log probability of that.

    Implements `models.interface.SupportsRowDecoding` for requests with logits processors, whose tokens depend on each other.
    """

    prefixes = (("ctc_head.", "head.lm_head."),)
    step_rows, decodes_always = _DECODED_ROWS, False

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vocab = positive_int({"vocab_size": 1025, **config}, "vocab_size")
        super().__init__(config, vocab, dtype, device)
        self.head = LmHead(self.row_size, vocab, None, dtype, device, bias=True)
        self.blank: int = config.get("pad_token_id", 1024)  # the processor checks it
        self.vector_size = self.token_size = 2

    def project_hidden(self, hidden: Tensor, tokens: bool) -> Tensor:
        """Return float32 `[n, 2]`: token and log probability."""
        parts = []
        for rows in hidden.split(_ROWS):
            logprob, token = self.head(rows).log_softmax(-1).max(-1)
            parts.append(torch.stack((token.float(), logprob), 1))
        return torch.cat(parts)

    def decode_rows(
        self, hidden: Sequence[Tensor], before: Sequence[CtcState | None], rules: Sequence[LogitsRule | None]
    ) -> list[CtcState]:
        blank, states = self.blank, list[CtcState]()
        for item_rows, state, rule in zip(hidden, before, rules, strict=True):
            after = state or CtcState(blank=blank)
            for rows in item_rows.split(_ROWS):
                after = decode_ctc(self.head(rows).log_softmax(-1), after, rule)
            states.append(after)
        return states

    def decoded(self, state: CtcState) -> Tensor:
        return torch.tensor([token.row() for token in state.tokens], dtype=torch.float32).view(len(state.tokens), 4)


class ParakeetTransducer(Parakeet):
    """The vector of a row is the one that the joint network reads; those of all rows are decoded to tokens.

    Implements `models.interface.SupportsRowDecoding`. `has_durations`: the joint network also predicts how many rows a token
    lasts.
    """

    has_durations = False
    step_rows, decodes_always = STEP_ROWS, True

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        spec = transducer_spec(config, self.has_durations)
        super().__init__(config, spec.vocab, dtype, device)
        self.encoder_projector = Linear(self.row_size, {"encoder_projector": spec.width}, True, dtype, device)
        self.transducer = Transducer(spec, dtype, device)
        self.prefixes = transducer_prefixes(spec.layers)
        self.vector_size = self.token_size = spec.width

    def project_hidden(self, hidden: Tensor, tokens: bool) -> Tensor:
        return self.encoder_projector(hidden)

    def decode_rows(
        self, hidden: Sequence[Tensor], before: Sequence[TransducerState | None], rules: Sequence[LogitsRule | None]
    ) -> list[TransducerState]:
        rows = self.encoder_projector(torch.cat(list(hidden))).split(list(map(len, hidden)))
        return self.transducer.decode(rows, before, rules)

    def decoded(self, state: TransducerState) -> Tensor:
        return torch.tensor(state.tokens, dtype=torch.float32).view(len(state.tokens), 4)

    def forward_bytes(self, limits: StepLimits) -> int:
        return super().forward_bytes(limits) + transducer_bytes(self.transducer.spec, limits.rows, limits.rows, self.dtype)


class ParakeetTdt(ParakeetTransducer):
    has_durations = True
