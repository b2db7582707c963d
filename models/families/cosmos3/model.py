"""The reasoner of Cosmos 3: Qwen3-VL, whose weights may be stored beside those of a generator.

Sources: the class of transformers 5.23; vLLM's cosmos3.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from ...text.stacks import replace_parts
from ..qwen3_vl.model import PREFIXES, Qwen3VL

_ATTENTION = tuple(
    (f".self_attn.{other}.", f".self_attn.{name}.")
    for other, name in (
        *((f"to_{kind}", f"{kind}_proj") for kind in "qkv"),
        ("to_out", "o_proj"),
        *((f"norm_{kind}", f"{kind}_norm") for kind in "qk"),
    )
)
_IN_LAYERS = (
    *(f".{name}." for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "norm_added_q", "norm_added_k")),
    "moe_gen",
    ".k_norm_und_for_gen.",
)
"""Parts of the names of the generator's tensors in layers of the decoder."""
GENERATOR = (
    "proj_in.", "proj_out.", "time_embedder.",
    *(f"{kind}_{part}" for kind in ("audio", "action") for part in ("proj_in.", "proj_out.", "modality_embed")),
)  # fmt: skip
"""Prefixes of the generator's other tensors."""


class Cosmos3(Qwen3VL):
    """Qwen3-VL under its own names, or under the flat names of checkpoints with a generator."""

    prefixes = (
        *((f"{name}.", f"language_model.{name}.") for name in ("layers", "embed_tokens", "norm")),
        *((f"{name}.", f"visual.{name}.") for name in ("blocks", "patch_embed", "pos_embed")),
        ("merger.", "merger."),
        ("deepstack_merger_list.", "deepstack_mergers."),
        *PREFIXES,
    )
    ignored = GENERATOR

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return reasoner_weights(super().convert_weights(weights))


def reasoner_weights(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Leave out the generator's tensors in layers of the decoder, and yield the others with Qwen3-VL's names."""
    for name, tensor in weights:
        if not any(part in name for part in _IN_LAYERS):
            yield replace_parts(name, _ATTENTION), tensor
