"""BLIP-2: an EVA tower, a query transformer, a linear layer and a decoder, usually OPT.

Sources: arXiv 2301.12597; the modelling file of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import check_activation, positive_int
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.builder import StoredTensor
from ...layers.linear import Linear
from ...layers.qformer import QFormer, qformer_bytes, qformer_spec
from ...text.decoder_config import decoder_spec
from ...text.stacks import replace_parts, stack_of
from ...vision.spec import TableSpec, TowerNames, TowerSpec
from ...vision.vit import VisionTower, tower_bytes

_VISION: dict[str, Any] = {
    "hidden_size": 1408, "intermediate_size": 6144, "num_hidden_layers": 39, "num_attention_heads": 16, "image_size": 224,
    "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "qkv_bias": True,
}  # fmt: skip
_QFORMER: dict[str, Any] = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    "cross_attention_frequency": 2,
}  # fmt: skip
_NAMES = TowerNames(
    patch="embeddings.patch_embedding",
    table="embeddings.position_embedding",
    class_token="embeddings.class_embedding",
    layers="encoder.layers",
    norms=("layer_norm1", "layer_norm2"),
    qkv=("self_attn.qkv",),
    out="self_attn.projection",
)
_PARTS = ("qformer", "query_tokens", "language_projection")


class Blip2(DecoderModel):
    """A model of images, each in as many rows as there are queries."""

    prefixes = (
        *((f"{start}vision_model.", "tower.") for start in ("model.", "")),
        *((f"model.{part}", part) for part in _PARTS),
        *((part, part) for part in _PARTS),
        *TEXT_PREFIXES,
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = {"text_config": {"model_type": "opt"}, **config}
        stack = stack_of(config, "opt")
        super().__init__(decoder_spec(config, stack), dtype, device)
        self.renames = stack.renames
        vision = _VISION | dict(config.get("vision_config") or {})
        tower = _tower_spec(vision)
        qformer = dict(config.get("qformer_config") or {})
        if qformer.get("use_qformer_text_input"):
            raise ConfigError("use_qformer_text_input of qformer_config is true, which is not supported; use a BLIP-2 model")
        self.qformer_spec = qformer_spec(_QFORMER | qformer | {"encoder_hidden_size": tower.width})
        self.queries = positive_int({"num_query_tokens": 32, **config}, "num_query_tokens")
        self.tower = VisionTower(tower, dtype, device)
        width = self.qformer_spec.width
        self.query_tokens = StoredTensor((1, self.queries, width), dtype, device)
        self.qformer = QFormer(self.qformer_spec, dtype, device)
        self.language_projection = Linear(width, {"language_projection": self.hidden_size}, True, dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        grids = [(int(t), int(h), int(w)) for item in tensors["grids"] for t, h, w in item.tolist()]
        state = self.tower(tensors["pixel_values"], grids)[-1]
        images = state.split([h * w + 1 for _, h, w in grids])
        # one by one, since the bits of torch's attention depend on the number of images
        rows = [self.qformer(self.query_tokens.weight, image[None])[0] for image in images]
        return list(self.language_projection(torch.cat(rows)).split(self.queries))

    def input_bytes(self, modality: str, rows: int) -> int:
        return self._patches(rows) * self.tower.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        """Return the peak in the tower, or after it: pixels, its state, all results so far, and the query transformer."""
        spec, size = self.tower.spec, self.dtype.itemsize
        images = -(-rows // self.queries)
        patches = self._patches(rows)
        tower = tower_bytes(spec, patches, None, self.dtype, limits)
        state = (patches + images) * spec.width * size
        results = rows * (2 * self.qformer_spec.width + self.hidden_size) * size
        keys = patches // images + 1
        qformer = qformer_bytes(self.qformer_spec, self.queries, keys, self.dtype, limits)
        return max(tower, self.input_bytes(modality, rows) + state + results + qformer)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if "vision_model.embeddings." in name and not name.startswith("language_model"):
                if name.endswith("class_embedding"):
                    tensor = tensor.flatten()
                elif name.endswith("position_embedding"):
                    tensor = tensor.flatten(0, 1)
            yield (replace_parts(name, self.renames) if "language_model." in name else name), tensor

    def _patches(self, rows: int) -> int:
        table = self.tower.spec.table
        assert table is not None
        return -(-rows // self.queries) * table.side**2


def _tower_spec(vision: Mapping[str, Any]) -> TowerSpec:
    patch, size = positive_int(vision, "patch_size"), positive_int(vision, "image_size")
    return TowerSpec(
        depth=positive_int(vision, "num_hidden_layers"),
        width=positive_int(vision, "hidden_size"),
        heads=positive_int(vision, "num_attention_heads"),
        inner=positive_int(vision, "intermediate_size"),
        patch_dim=3 * patch**2,
        act=check_activation("hidden_act of vision_config", vision["hidden_act"]),
        eps=vision["layer_norm_eps"],
        qkv_bias=bool(vision["qkv_bias"]),
        table=TableSpec(size // patch),
        class_token=True,
        keep_class=True,
        post_norm=True,
        names=_NAMES,
    )
