"""Layers for multi-token prediction, which draft tokens beyond the next one from the decoder's last hidden states.

Source: arXiv 2412.19437, section 2.2. Token embeddings and head are the decoder's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...kernels.metadata import AttentionMetadata
from ..layers.basic import TensorModule
from ..layers.linear import Linear
from .decoder import DecoderLayer, build_norm
from .rope import CosSin
from .spec import DecoderSpec, MtpSpec

MTP = "mtp_layers"
"""Path of the layers in a model."""

_LAYERS, _OWN = "language_model.layers.", "mtp."
_PARTS: Mapping[str, Sequence[tuple[str, str]]] = {
    "layers": (
        ("enorm.", "enorm."),
        ("hnorm.", "hnorm."),
        ("eh_proj.", "eh_proj."),
        ("shared_head.norm.", "norm."),
        ("", "layer."),
    ),
    "mtp": (
        ("pre_fc_norm_embedding.", "enorm."),
        ("pre_fc_norm_hidden.", "hnorm."),
        ("fc.", "eh_proj."),
        ("norm.", "norm."),
        ("layers.0.", "layer."),
        ("", ""),
    ),
}
"""Names of MtpSpec -> prefixes of stored names within a layer, and the path in MtpLayer that each stands for."""
COPIES = ("layer.embed_tokens.", "layer.shared_head.head.")
"""Paths within a layer of tensors that repeat the token embeddings and the head. They are not read."""


class MtpLayer(TensorModule):
    """A decoder layer whose input is a projection of a token's embedding and a hidden state.

    Args:
        first: the layer whose norms and projection this one uses, too; None: it has its own.

    Attributes:
        cache_spec: of the layer's own KV cache.
    """

    def __init__(
        self,
        mtp: MtpSpec,
        stack: DecoderSpec,
        dtype: torch.dtype,
        device: torch.device,
        first: MtpLayer | None = None,
    ) -> None:
        super().__init__()
        hidden = stack.hidden_size
        self.first = [self if first is None else first]  # in a list: not a part of this layer
        if first is None:
            self.enorm, self.hnorm, self.norm = (build_norm(stack, dtype, device) for _ in range(3))
            self.eh_proj = Linear(2 * hidden, {"eh_proj": hidden}, False, dtype, device)
        self.layer = DecoderLayer(mtp.layer, stack, dtype, device)
        (mixer,) = self.layer.mixers
        self.cache_spec = mixer.cache_spec

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        cos_sin: CosSin | None,
        cache: Tensor,
        attn: AttentionMetadata,
        modality_ids: Tensor | None,
    ) -> Tensor:
        """Return normed hidden states `[rows, hidden]` from the embeddings of tokens and hidden states, both of this shape."""
        (first,) = self.first
        x = first.eh_proj(torch.cat((first.enorm(embedded), first.hnorm(hidden)), 1))
        return first.norm(x, self.layer(x, None, cos_sin, cache, attn, modality_ids))


def build_mtp(stack: DecoderSpec, dtype: torch.dtype, device: torch.device) -> list[MtpLayer]:
    """Build the layers that `stack.mtp` describes."""
    assert stack.mtp is not None
    first = MtpLayer(stack.mtp, stack, dtype, device)
    shared = first if stack.mtp.names == "mtp" else None
    return [first, *(MtpLayer(stack.mtp, stack, dtype, device, shared) for _ in range(1, stack.mtp.count))]


def mtp_prefixes(spec: DecoderSpec, prefixes: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield (stored, canonical) prefixes of the tensors of all MtpLayers. `prefixes`: those of the model's other tensors."""
    assert spec.mtp is not None
    if spec.mtp.names == "mtp":
        for index in range(1, spec.mtp.count):
            yield f"{_OWN}layers.{index}.", f"{MTP}.{index}.layer."
    for index in range(1 if spec.mtp.names == "mtp" else spec.mtp.count):
        for stem in [_OWN] if spec.mtp.names == "mtp" else stored_stems(len(spec.layers) + index, prefixes):
            for stored, canonical in _PARTS[spec.mtp.names]:
                yield f"{stem}{stored}", f"{MTP}.{index}.{canonical}"


def stored_stems(layer: int, prefixes: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the beginnings that names of a layer after the decoder's last can have.

    Checkpoints with encoders may name it like a layer of a text model.
    """
    canonical = f"{_LAYERS}{layer}."
    for stored, prefix in prefixes:
        if canonical.startswith(prefix):
            yield stored + canonical.removeprefix(prefix)
    yield f"model.layers.{layer}."
    yield canonical
