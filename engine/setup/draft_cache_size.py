"""Sizes the KV cache of what drafts tokens in the worker, in closed form."""

from __future__ import annotations

from collections.abc import Sequence

from ...models.interface import CacheSpec, Model
from ..config import EngineConfig, cache_budget
from ..speculative_config import read_speculative_config


def draft_specs(config: EngineConfig, model: Model) -> Sequence[CacheSpec]:
    """Return the cache formats of the model's own layer that drafts; none if none does."""
    mtp: Sequence[CacheSpec] = getattr(model, "mtp_cache_specs", ())
    limits = read_speculative_config(config.speculative_config)
    return mtp[:1] if limits.predicted and limits.method == "mtp" else ()


def draft_cache_blocks(config: EngineConfig, specs: Sequence[CacheSpec], max_model_len: int) -> int:
    """Return the blocks for `max_num_seqs` sequences or, if the budget of the KV cache is smaller, for as many as fit.

    One sequence has room in any case. Each has its tokens and the predicted ones.
    """
    size, predicted = config.block_size, read_speculative_config(config.speculative_config).predicted
    per_sequence = -(-(max_model_len + predicted) // size)
    fit = cache_budget(config, config.torch_device) // block_bytes(specs, size)
    return max(per_sequence, min(config.max_num_seqs * per_sequence, fit))


def draft_cache_bytes(config: EngineConfig, model: Model, max_model_len: int) -> int:
    """Return the bytes of the cache of the model's own layer that drafts."""
    specs = draft_specs(config, model)
    return draft_cache_blocks(config, specs, max_model_len) * block_bytes(specs, config.block_size) if specs else 0


def block_bytes(specs: Sequence[CacheSpec], block_size: int) -> int:
    """Return the bytes of one block over all layers."""
    return sum(spec.block_bytes(block_size) for spec in specs)
