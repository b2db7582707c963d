"""A decoder's layers used as an encoder: given rows see one another, learned queries read them one after another.

Knows no media and no checkpoint. A query sees all given rows and the queries up to itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...kernels.metadata import AttentionMetadata
from ..layers.basic import Norm
from .decoder import Layer
from .rope import Rotary
from .spec import AttentionSpec, DecoderSpec


class QueryEncoder(nn.Module):
    """`layers` and `norm` of a stack of equal layers, without a table of tokens and without a cache beyond a call."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        attention = spec.attentions[0]
        assert isinstance(attention, AttentionSpec), "latent attention as an encoder is unknown"
        self.spec, self.shape = spec, (attention.kv_heads, attention.head_dim)
        self.layers = nn.ModuleList(Layer(layer, spec, dtype, device) for layer in spec.layers)
        self.norm = Norm(spec.hidden_size, spec.eps, False, dtype, device, offset=spec.norm_offset)
        self.rotaries = [Rotary(rope, device) for rope in spec.ropes]

    def forward(self, rows: Tensor, queries: Tensor) -> Tensor:
        """`[rows, hidden]` and `[queries, hidden]` -> of each query a normed row `[queries, hidden]`."""
        x, device = torch.cat((rows, queries)), rows.device
        count, place = len(x), torch.arange(len(x), device=device)
        stops = torch.where(place < len(rows), len(rows), place + 1)
        attn = AttentionMetadata(
            query_start=(0, count),
            seq_lens=(count,),
            block_tables=torch.zeros(1, 1, dtype=torch.int32, device=device),
            slot_mapping=place,
            block_size=count,
            seen=torch.stack((torch.zeros_like(stops), stops)),
        )
        cache = x.new_empty(2, 1, count, *self.shape)  # of one layer at a time
        turns = [*(rotary(place[None]) for rotary in self.rotaries), None][0]
        add = None
        for layer in self.layers:
            add = layer(x, add, turns, cache, attn, None)
        return self.norm(x, add)[len(rows) :]  # type: ignore[no-any-return]
