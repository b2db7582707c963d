"""Decoder layers as an encoder: input rows attend to one another; learned queries attend to all rows and earlier queries."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...kernels.metadata import AttentionMetadata
from ..layers.basic import Norm, TensorModule
from .decoder import DecoderLayer
from .rope import Rotary
from .spec import AttentionSpec, DecoderSpec


class QueryEncoder(TensorModule):
    """The layers and the final norm of a decoder stack, without token embeddings; its KV cache lives for one call."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        attention = spec.attentions[0]
        assert isinstance(attention, AttentionSpec), "latent attention is not supported in an encoder"
        self.spec, self.shape = spec, (attention.kv_heads, attention.head_dim)
        self.layers = nn.ModuleList(DecoderLayer(layer, spec, dtype, device) for layer in spec.layers)
        self.norm = Norm(spec.hidden_size, spec.eps, False, dtype, device, offset=spec.norm_offset)
        self.rotaries = [Rotary(rope, device) for rope in spec.ropes]

    def forward(self, rows: Tensor, queries: Tensor) -> Tensor:
        """Encode `[rows, hidden]` and `[queries, hidden]` -> the normed rows of the queries `[queries, hidden]`."""
        x, device = torch.cat((rows, queries)), rows.device
        count, position = len(x), torch.arange(len(x), device=device)
        stops = torch.where(position < len(rows), len(rows), position + 1)
        attn = AttentionMetadata(
            query_start_loc=(0, count),
            seq_lens=(count,),
            block_tables=torch.zeros(1, 1, dtype=torch.int32, device=device),
            slot_mapping=position,
            block_size=count,
            key_range=torch.stack((torch.zeros_like(stops), stops)),
        )
        cache = x.new_empty(2, 1, count, *self.shape)  # reused by every layer
        cos_sin = [*(rotary(position[None]) for rotary in self.rotaries), None][0]
        add = None
        for layer in self.layers:
            add = layer(x, add, cos_sin, cache, attn, None)
        return self.norm(x, add)[len(rows) :]
