"""Aria (arXiv 2410.05993): SigLIP at an image's own aspect ratio, learned queries that read its rows, a decoder of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int, require
from ....kernels.activation import activation
from ...decoder_model import DecoderModel
from ...interface import StepLimits
from ...layers.basic import Converter, Convertible, Norm, TensorModule
from ...layers.builder import StoredTensor
from ...layers.linear import Linear
from ...memory_formulas import OpBytes
from ...text.decoder_config import decoder_spec
from ...text.stacks import stack_of
from ...tower_model import TOWER_PREFIXES, feature_states
from ...vision.vit import VisionTower, tower_bytes
from ..idefics3.model import VISION, bucketed_tower

_QUERIES: Mapping[str, int] = {"1225": 128, "4900": 256}
"""Patches of a padded image -> its rows, if config.json has no projector_patch_to_query_dict."""
_MOST = "max_value_projector_patch_to_query_dict"
_EPS = 1e-5  # of the projector's norms
_ACT = "gelu_pytorch_tanh"


class TwiceProjected(TensorModule, Convertible):
    """Attention of queries to rows whose inputs pass two projections: q_proj, k_proj, v_proj, then those of the attention."""

    def __init__(self, width: int, heads: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        linear, norm = partial(Linear, dtype=dtype, device=device), partial(Norm, width, _EPS, True, dtype, device)
        self.heads, self.layer_norm, self.layer_norm_kv = heads, norm(), norm()
        self.query = linear(width, {"q_proj": width}, False)
        self.key_value = linear(width, {"k_proj": width, "v_proj": width}, False)
        self.inner = torch.nn.ModuleList(linear(width, {name: width}, True) for name in ("query", "key", "value"))
        self.out = linear(width, {"multihead_attn.out_proj": width}, True)
        self.last = linear(width, {"linear": width}, True)

    def forward(self, queries: Tensor, rows: Tensor) -> Tensor:
        """`[queries, width]` and `[rows, width]` -> `[queries, width]`."""
        inputs = (self.query(self.layer_norm(queries)), *self.key_value(self.layer_norm_kv(rows)).chunk(2, 1))
        q, k, v = (
            layer(part.contiguous()).view(1, len(part), self.heads, -1).transpose(1, 2)
            for layer, part in zip(self.inner, inputs, strict=True)
        )
        return self.last(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(queries.shape)))

    def converters(self, path: str) -> Iterator[tuple[str, Converter]]:
        for part in ("weight", "bias"):
            yield f"{path}.multihead_attn.in_proj_{part}", partial(self._split, path, part)

    def _split(self, path: str, part: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        for name, part_rows in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
            yield f"{path}.inner.{name}.{part}", part_rows


class AriaProjector(TensorModule):
    """The first `count` learned queries read the rows of one image: `[rows, width]` -> `[count, out]`."""

    def __init__(self, queries: int, width: int, heads: int, out: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.query = StoredTensor((queries, width), dtype, device)
        self.cross_attn = TwiceProjected(width, heads, dtype, device)
        self.layer_norm = Norm(width, _EPS, True, dtype, device)
        self.first = Linear(width, {"feed_forward.linear_in": out}, False, dtype, device)
        self.last = Linear(out, {"feed_forward.linear_out": out}, False, dtype, device)

    def forward(self, rows: Tensor, count: int) -> Tensor:
        read = self.layer_norm(self.cross_attn(self.query.weight[:count], rows))
        return self.last(activation(_ACT, self.first(read)))


class Aria(DecoderModel):
    """A model of images. Each image, or each crop of it, becomes as many rows as the projector has queries for its size."""

    prefixes = TOWER_PREFIXES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(decoder_spec(config, stack_of(config, "aria_text")), dtype, device)
        vision = require(config, "vision_config")
        tower = bucketed_tower({**VISION, **vision})
        tower = replace(tower, post_norm=False, features=feature_states(config.get("vision_feature_layer", -1), tower.depth))
        self.tower = VisionTower(tower, dtype, device)
        self.queries = {
            int(patches): int(n) for patches, n in (config.get("projector_patch_to_query_dict") or _QUERIES).items()
        }
        queries = positive_int({_MOST: max(self.queries.values()), **config}, _MOST)
        if queries < max(self.queries.values()):
            raise ConfigError(f"{_MOST} in config.json is {queries}; projector_patch_to_query_dict has more")
        self.projector = AriaProjector(queries, tower.width, tower.heads, self.hidden_size, dtype, device)
        self.ignored = tuple(f"tower.{name}" for name in tower.unbuilt)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Encode items. `grids`: int64 `[images, 3]` per item, the grid of each crop; `queries`: the rows of each crop."""
        items = [[(t, h, w) for t, h, w in grids.tolist()] for grids in tensors["grids"]]
        counts = [int(count) for count in tensors["queries"].flatten().tolist()]
        grids = [grid for item in items for grid in item]
        patches = self.tower(tensors["pixel_values"], grids)[-1].split([h * w for _, h, w in grids])
        each = (count for item, count in zip(items, counts, strict=True) for _ in item)
        rows = torch.cat([self.projector(image, count) for image, count in zip(patches, each, strict=True)])
        return list(rows.split([len(item) * count for item, count in zip(items, counts, strict=True)]))

    def max_patches(self, rows: int) -> int:
        """Return the most patches of all images that give `rows` rows."""
        return max(-(-rows // count) * patches for patches, count in self.queries.items())

    def input_bytes(self, modality: str, rows: int) -> int:
        return self.max_patches(rows) * self.tower.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        """Return the peak in the tower, which takes all images together, or after it, where one image follows another."""
        tower, size, patches = self.tower.spec, self.dtype.itemsize, self.max_patches(rows)
        most = max(self.queries.items())
        image = projector_bytes(tower.width, self.hidden_size, most[0], most[1], OpBytes(self.dtype, limits))
        result = rows * self.hidden_size * size
        base = patches * (tower.patch_dim + tower.width) * size + result
        return max(tower_bytes(tower, patches, None, self.dtype, limits), base + max(image, result))


def projector_bytes(width: int, out: int, patches: int, queries: int, ops: OpBytes) -> int:
    """Return the bytes alive in AriaProjector for one image of this many patches, without its input rows."""
    row, many = width * ops.dtype.itemsize, replace(ops, limits=replace(ops.limits, rows=patches))
    both = many.linear_result(2 * width, patches)
    first = row + many.linear(width, 2 * width, patches)
    second = both + 2 * row + many.linear(width, width, patches)  # one part as a copy, and the key's result beside the value's
    attend = both + 2 * many.linear_result(width, patches) + ops.attention_copies(width)
    few = 6 * row + ops.mlp(width, out, out, queries)
    return patches * max(first, second, attend) + queries * few
