"""Makes the drafter of an engine, or says why it has none, and what drafts in its worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from ...callers.errors import ConfigError
from ...kernels import bodies, native
from ...kernels.linear.int4 import Int4Options
from ...kernels.measure import row_costs
from ...models.decoder_model import DecoderModel
from ...models.interface import Model
from ...models.layers.linear import Linear
from ..config import EngineConfig
from ..drafts.depth import STEP_COSTS, StepCosts
from ..drafts.drafter import Drafter
from ..drafts.proposer import MakeProposer
from ..speculative_config import read_speculative_config
from ..worker.draft_cache import DraftCache
from ..worker.encoder_store import EncoderStore
from ..worker.predictor import Predictor
from .draft_cache_size import draft_cache_blocks, draft_specs
from .draft_model import find_draft, make_draft_runner
from .eagle3 import find_eagle3, make_eagle3_runner
from .memory import MaxSizes
from .model_source import ModelSource

_FALLBACK = "fallback"  # folder of the classes that run another library's layers


def make_drafter(config: EngineConfig, model: Model, dtype: torch.dtype) -> tuple[Drafter | None, str]:
    """Return the drafter, or None and the reason as in `EngineStats.no_drafts`.

    Raises:
        ConfigError: `speculative_config` asks for drafts that would change answers.
    """
    limits = read_speculative_config(config.speculative_config)
    if not limits.depth:
        return None, "off"
    if not _keeps_rows(config, model, dtype):
        if config.speculative_config is not None:
            reason = (
                "needs rows whose bits do not depend on the other rows of a step; give batch_invariant=True, or leave it out"
            )
            raise ConfigError(f"<<param>> {reason}", param="speculative_config", code="unsupported")
        return None, "rows"
    if any(spec.answer_window is not None for spec in model.cache_specs):
        if config.speculative_config is not None:
            reason = "is not supported for this model, whose answers keep the keys of their last tokens only; leave it out"
            raise ConfigError(f"<<param>> {reason}", param="speculative_config", code="unsupported")
        return None, "window"
    has_states = any(spec.kind == "state" for spec in model.cache_specs)
    proposers = list[MakeProposer]()
    if limits.custom:
        from ..drafts.custom import make_custom

        proposers = [make_custom(limits.custom)]
    return Drafter(limits, StepCosts(first_costs(config, model)), model.vocab_size, proposers, has_states=has_states), ""


def first_costs(config: EngineConfig, model: Model) -> Sequence[float]:
    """Return the cost of a step of 1, 2, ... rows relative to one row, before any step was measured."""
    if config.torch_device.type == "cpu" and bodies.may_measure():
        return row_costs(main_weights(model))
    return STEP_COSTS.get(native.products() or "", STEP_COSTS[""])


def main_weights(model: Model) -> str:
    """Return the type of the weights of most outputs that a decoded token needs, one of WEIGHTS in kernels/measure.py."""
    sizes: Counter[str] = Counter()
    encoders = set[nn.Module]()
    if isinstance(model, DecoderModel):
        encoders.update(*(part.modules() for _, part in model.encoder_parts))
    for layer in cast(nn.Module, model).modules():
        if isinstance(layer, Linear) and layer not in encoders:
            sizes[_weights_of(layer)] += layer.outputs
    return sizes.most_common(1)[0][0] if sizes else "bfloat16"


def _weights_of(layer: Linear) -> str:
    """Return the type of a layer's weight; of several with as many bits, the one that is measured."""
    if isinstance(layer.quantization, Int4Options):
        return "w4a8" if layer.quantization.int8_rows else "int4"
    if layer.formats:
        return "int4"
    if layer.quantization in ("int8", "fp8"):
        return "int8"
    return "float32" if layer.dtype == torch.float32 and layer.quantization is None else "bfloat16"


def make_predictor(
    config: EngineConfig, model: Model, sizes: MaxSizes, store: EncoderStore, target: ModelSource | None
) -> Predictor | None:
    """Return what drafts in the worker after each step, with its caches; None if `speculative_config` asks for nothing.

    Raises:
        ConfigError: as `find_draft`, `make_draft_runner` and `make_eagle3_runner`.
    """
    source = find_draft(config, model)
    if source is not None:
        return make_draft_runner(config, source, model, sizes, store, target)
    head = find_eagle3(config, model)
    if head is not None:
        return make_eagle3_runner(config, head, sizes)
    specs, device = draft_specs(config, model), config.torch_device
    if not specs:
        return None
    from ..worker.mtp_runner import MtpRunner

    cache = DraftCache(specs, draft_cache_blocks(config, specs, sizes.max_model_len), config.block_size, device)
    return MtpRunner(read_speculative_config(config.speculative_config).predicted, cache, device)


def _keeps_rows(config: EngineConfig, model: Model, dtype: torch.dtype) -> bool:
    """Return whether a row has the same bits alone and among others: with the C++ kernels, or if that is required."""
    if config.batch_invariant:
        return True
    is_fallback = _FALLBACK in type(model).__module__.split(".")
    return native.obstacle(config.torch_device, dtype) is None and not config.kernels and not is_fallback
