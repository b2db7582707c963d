"""What an attention kernel needs to know of a batch. A kernels type: built by the runner, read by every backend."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """Rows of several requests in one packed step; prompt chunks and decode rows mixed.

    Request i owns the query rows `[query_start[i], query_start[i + 1])`; they are the *last* rows of its
    `seq_lens[i]` positions (causal). Python ints sit beside the tensors so that CPU paths never read a tensor back.

    Args:
        query_start: `num_requests + 1` ints, starting with 0.
        seq_lens: keys of each request after this step, this step's rows included.
        block_tables: int32 `[num_requests, max_blocks]`, physical block of each logical block; unused entries 0.
        slot_mapping: int64 `[rows]`, physical slot (`block * block_size + offset`) each row's key and value go to.
        block_size: tokens per block.
    """

    query_start: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_tables: Tensor
    slot_mapping: Tensor
    block_size: int
