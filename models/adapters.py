"""Attaches LoRA adapters that come with a checkpoint to the decoder.

The family's processor decides which prompts use an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from ..callers.errors import ConfigError
from ..checkpoints.adapters import AdapterSpec
from .decoder_model import DecoderModel
from .interface import Model
from .layers.adapter import LowRank
from .layers.linear import Linear
from .layers.moe import Mixture, ModalityMixture


def attach(model: Model, specs: Sequence[AdapterSpec]) -> None:
    """Add the adapters to the model's decoder. Call it before weights are loaded.

    Raises:
        ConfigError: the model supports no adapters, or an adapter has no target in its decoder.
    """
    if specs and not isinstance(model, DecoderModel):
        raise ConfigError("this model supports no adapters (adapter_config.json); merge the adapter into the model")
    for number, spec in enumerate(specs):
        assert isinstance(model, DecoderModel)
        targets = [shard for shard in shards_of(model.language_model, "language_model") if _is_target(shard[1], spec)]
        if not targets:
            wanted = ", ".join(spec.targets) or (spec.pattern and spec.pattern.pattern)
            reason = "layers outside the experts, which adapters cannot change" if _has_experts(model) else "layer"
            raise ConfigError(f"adapter_config.json targets {wanted}; the decoder has no such {reason}")
        for layer, stem, start, rows in targets:
            layer.add_adapter(LowRank(stem, layer, rows, spec, number, model.adapter_mask), start)
    if isinstance(model, DecoderModel):
        model.adapters = tuple(spec.name for spec in specs)


def shards_of(
    root: nn.Module, path: str, left_out: tuple[type[nn.Module], ...] = (Mixture, ModalityMixture)
) -> Iterator[tuple[Linear, str, int, int]]:
    """Yield each shard of every Linear: the layer, the shard's canonical name, its first output and its number of outputs.

    Modules of the classes `left_out` are not searched: experts get other rows than those of the step.
    """
    if isinstance(root, Linear):
        start = 0
        for name, rows in root.shards.items():
            yield root, f"{path[: path.rfind('.') + 1]}{name}", start, rows
            start += rows
    for name, child in root.named_children():
        if not isinstance(child, left_out):
            yield from shards_of(child, f"{path}.{name}", left_out)


def _has_experts(model: DecoderModel) -> bool:
    return any(isinstance(module, Mixture | ModalityMixture) for module in model.language_model.modules())


def _is_target(name: str, spec: AdapterSpec) -> bool:
    if spec.pattern is not None:
        return spec.pattern.fullmatch(name) is not None
    return any(name.endswith(f".{target}") for target in spec.targets)
