"""The small protocol every model obeys, and the batch it is given. Knows no family and no engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.kv8 import width
from ..kernels.metadata import AttentionMetadata


@dataclass(frozen=True)
class CacheSpec:
    """How one attention layer caches, with the key/value heads and head size of one token.

    Kind "full": a key and a value per token of the sequence. "window": the same, but a row reads only the last `window` keys
    up to its own (and its own run of rows, where items see themselves), so that earlier ones are forgotten. "latent": one
    row per token, of one head, that is key and value in one. "cross": a key and a value per row of the encoder's output,
    written once. `codes`: of 8 bits, in which keys and values are kept (`kernels.kv8`); None: as they are, in `dtype`.
    """

    kind: str
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None
    codes: torch.dtype | None = None

    @property
    def planes(self) -> int:
        """Rows that are cached of a token: key and value, or one that is both."""
        return 1 if self.kind == "latent" else 2

    @property
    def stored(self) -> torch.dtype:
        return self.dtype if self.codes is None else self.codes

    @property
    def width(self) -> int:
        """Numbers that the cache has by head, with what scales take."""
        return self.head_dim if self.codes is None else width(self.kv_heads, self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        return self.planes * self.kv_heads * self.width * self.stored.itemsize


@dataclass(frozen=True)
class Work:
    """The most that a step computes, from which its memory follows, on `device`; `int8`: products in 8 bits.

    `codes`: keys and values are cached in 8 bits.

    Args:
        rows: of the step.
        keys: that all its sequences see together.
        longest: keys of one sequence.
    """

    rows: int
    keys: int
    longest: int
    device: torch.device
    int8: bool = False
    codes: bool = False


@dataclass(frozen=True)
class ForwardBatch:
    """One step's rows, packed over requests. A new need is a new field, never a new signature.

    Args:
        input_ids: int64 `[rows]`; at media placeholders any id of the vocabulary.
        positions: int64 `[axes, rows]`; axes as the model's `rope_axes` declares.
        attn: who owns which row, and where keys and values live, one per cache; caches of equal spec share the object.
        kv_caches: one per entry of the model's `cache_specs`, `[planes, num_blocks, block_size, kv_heads, width]`, keys then
            values.
        embed_index: int64 `[n]` rows of the batch to be replaced by `embed_rows`, or None for a text-only step.
        embed_rows: `[n, row_size]` encoder rows in that order: the first `hidden` take the place of token embeddings, each
            further `hidden` is added to the residual stream after one more of the first layers.
        cross_rows: `[n, hidden]` encoder rows whose keys and values the "cross" caches take in this step, at the slots of
            their `attn`; None when there are none.
        modality_ids: int64 `[rows]`, what `routes_by_modality` says of the item that a row is part of, its start and end
            tokens included, 0 for text; None where the model does not ask.
        adapters: int64 `[rows]`, which of the model's adapters computes a row, from 1, 0 for none; None where no row has one.
    """

    input_ids: Tensor
    positions: Tensor
    attn: Sequence[AttentionMetadata]
    kv_caches: Sequence[Tensor]
    embed_index: Tensor | None = None
    embed_rows: Tensor | None = None
    cross_rows: Tensor | None = None
    modality_ids: Tensor | None = None
    adapters: Tensor | None = None


class Model(Protocol):
    """A decoder with its encoders. Built as `cls(config: dict, dtype, device)` from the raw config.json."""

    rope_axes: int
    vocab_size: int
    hidden_size: int
    row_size: int  # numbers in an encoder row: `hidden_size`, and as much again for every level beyond the first
    max_positions: int  # config's max_position_embeddings
    cache_specs: Sequence[CacheSpec]  # one per attention layer, in the order of ForwardBatch.kv_caches
    routes_by_modality: Mapping[str, int]  # modality -> its number in ForwardBatch.modality_ids; empty: not wanted
    adapters: Sequence[str]  # by name, those it was given (`models.adapters`)
    recordable: bool  # whether `embed_multimodal` keeps no tensor from call to call, which a recorded one would go on with

    def embed_multimodal(self, modality: str, tensors: Mapping[str, object]) -> list[Tensor]:
        """Encode a merged batch of items (`mm.fields.merge` output): one `[rows, row_size]` tensor per item, in order."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Final normed hidden states `[rows, hidden]`; writes keys and values into the caches."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden]` -> float32 logits `[n, vocab]`."""

    def forward_bytes(self, work: Work) -> int:
        """At most so many bytes live during `forward` beside weights and caches, its inputs and result included."""

    def input_bytes(self, modality: str, rows: int) -> int:
        """Of the processed tensors from which so many encoder rows are made."""

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        """At most so many bytes live during `embed_multimodal` of items of so many rows together, on the device of `work`."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill and pack all weights from checkpoint names; CheckpointError on missing, surplus or misshapen ones."""
