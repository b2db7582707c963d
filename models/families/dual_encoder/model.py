"""CLIP, SigLIP and SigLIP 2: an encoder of texts and one of images, whose vectors are compared.

The encoder row of an image is its vector. Its prompt is one token, whose row the text encoder does not change.

Sources: arXiv 2103.00020, 2303.15343, 2502.14786.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....callers.errors import ConfigError
from ....checkpoints.config import check_activation, positive_int
from ....kernels.activation import activation
from ...decoder_model import DecoderModel
from ...interface import ForwardBatch, StepLimits
from ...layers.basic import EmbeddingTable, Norm, TensorModule
from ...layers.builder import StoredTensor
from ...layers.linear import Linear
from ...memory_formulas import OpBytes
from ...text.decoder import Decoder
from ...text.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec
from ...vision.encoders import encoder_spec
from ...vision.spec import TableSpec, TowerSpec
from ...vision.vit import VisionTower, tower_bytes

_SMALL = 1 << 10  # bytes of tensors whose size does not depend on the rows
MAX_PATCHES = 1024  # of an image that keeps its aspect ratio
_CLIP_TEXT: dict[str, Any] = {
    "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8,
    "max_position_embeddings": 77, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip
_SIGLIP_TEXT = _CLIP_TEXT | {
    "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
    "max_position_embeddings": 64, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
_NAMES = (
    ("text_model.embeddings.token_embedding.", "language_model.embed_tokens."),
    ("text_model.embeddings.position_embedding.", "language_model.embed_positions."),
    ("text_model.encoder.layers.", "language_model.layers."),
    ("text_model.final_layer_norm.", "language_model.norm."),
    ("text_model.head.", "text_projection."),
    ("vision_model.head.", "pooler."),
    ("vision_model.", "tower."),
)
_LAYER_NAMES = (
    (".layer_norm1.", ".input_layernorm."),
    (".layer_norm2.", ".post_attention_layernorm."),
    (".out_proj.", ".o_proj."),
)


def text_spec(text: Mapping[str, Any]) -> DecoderSpec:
    """Read the text encoder. The prompt may fill all positions, so there is one more for a token that is never generated."""
    width, heads = positive_int(text, "hidden_size"), positive_int(text, "num_attention_heads")
    attention = AttentionSpec(heads, heads, width // heads, (width // heads) ** -0.5, None, bias=True, out_bias=True)
    act = check_activation("hidden_act", text["hidden_act"])
    mlp = MlpSpec(positive_int(text, "intermediate_size"), act, bias=True, plain=("fc1", "fc2"))
    return DecoderSpec(
        vocab_size=positive_int(text, "vocab_size"),
        hidden_size=width,
        layers=(LayerSpec(attention, mlp),) * positive_int(text, "num_hidden_layers"),
        eps=text["layer_norm_eps"],
        max_positions=positive_int(text, "max_position_embeddings") + 1,
        tied=True,
        norm="layer",
    )


class ClipTextEncoder(Decoder):
    """Token and position embeddings, and the layers. Ids beyond the vocabulary stand for images; their rows are not used."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        self.embed_positions = EmbeddingTable(spec.max_positions - 1, spec.hidden_size, dtype, device)

    def embed(self, batch: ForwardBatch) -> Tensor:
        x = self.embed_tokens(batch.input_ids.clamp(max=self.spec.vocab_size - 1))
        return x.add_(self.embed_positions(batch.positions[0]))


class AttentionPooling(TensorModule):
    """A learned query reads all patches of an image: `[patches, width] -> [width]`."""

    def __init__(self, tower: TowerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        width, self.heads = tower.width, tower.heads
        self.act = check_activation("vision hidden_act", tower.act)
        self.probe = StoredTensor((1, 1, width), dtype, device)
        self.query = Linear(width, {"q_proj": width}, True, dtype, device)
        self.key_value = Linear(width, {"k_proj": width, "v_proj": width}, True, dtype, device)
        self.out = Linear(width, {"out_proj": width}, True, dtype, device)
        self.layernorm = Norm(width, tower.eps, True, dtype, device)
        self.fc1 = Linear(width, {"fc1": tower.inner}, True, dtype, device)
        self.fc2 = Linear(tower.inner, {"fc2": width}, True, dtype, device)

    def forward(self, rows: Tensor) -> Tensor:
        q = self.query(self.probe.weight[0]).view(1, 1, self.heads, -1).transpose(1, 2)
        k, v = self.key_value(rows).view(1, len(rows), 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = self.out(F.scaled_dot_product_attention(q, k, v).flatten(1))
        return (x + self.fc2(activation(self.act, self.fc1(self.layernorm(x)))))[0]


class DualEncoder(DecoderModel, ABC):
    """Base of the family. `patches`: the most patches of an image. `logit_bias` is None where scores are cosines."""

    text_parts = ("language_model", "head", "text_projection", "logit_scale", "logit_bias")
    text_projection: Linear
    logit_scale: StoredTensor

    def __init__(
        self, text: Mapping[str, Any], tower: TowerSpec, patches: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        spec = text_spec(text)
        super().__init__(spec, dtype, device, ClipTextEncoder(spec, dtype, device))
        self.head, self.patches = None, patches
        self.ignored = ("language_model.embeddings.", "text_model.embeddings.position_ids", "tower.embeddings.position_ids")
        self.vocab_size, self.row_size = spec.vocab_size + 1, size
        self.hidden_size = self.vector_size = self.token_size = size
        self.tower = VisionTower(tower, dtype, device)
        self.logit_bias: StoredTensor | None = None

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden = self.text_projection(self.language_model(replace(batch, embed_index=None, embed_rows=None)))
        if batch.embed_index is not None and batch.embed_rows is not None:
            hidden[batch.embed_index] = batch.embed_rows.to(hidden.dtype)
        return hidden

    @abstractmethod
    def pool_image(self, rows: Tensor) -> Tensor:
        """Return the vector of an image's last state `[patches, width]`, which begins with the class token, if any."""

    def similarity(self) -> tuple[float, float | None]:
        bias = None if self.logit_bias is None else float(self.logit_bias.weight)
        return math.exp(float(self.logit_scale.weight)), bias

    def choose_head(self, headers: Mapping[str, Tensor]) -> None:
        """Do nothing: there is no head."""

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        grids = [(int(t), int(h), int(w)) for t, h, w in tensors["grid"].tolist()]
        rows = self.tower(tensors["pixel_values"], grids)[-1]
        counts = [h * w + self.tower.spec.class_token for _, h, w in grids]
        return [self.pool_image(item)[None] for item in rows.split(counts)]

    def input_bytes(self, modality: str, rows: int) -> int:
        return rows * self.patches * self.tower.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        tower = self.tower.spec
        pooled = OpBytes(self.dtype, limits).linear(tower.width, 2 * tower.width, self.patches) * self.patches
        return tower_bytes(tower, rows * self.patches, None, self.dtype, limits) + pooled

    def forward_bytes(self, limits: StepLimits) -> int:
        row = 2 * (self.row_size + self.spec.hidden_size) * self.dtype.itemsize + 2 * 8  # positions, vectors; ids
        return super().forward_bytes(limits) + limits.rows * row + _SMALL

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            for old, new in _NAMES:
                name = new + name.removeprefix(old) if name.startswith(old) else name
            if name.startswith("language_model.layers."):
                for old, new in _LAYER_NAMES:
                    name = name.replace(old, new)
            yield name, tensor


class Clip(DualEncoder):
    """CLIP: a text's vector is that of its last token, an image's that of the class token."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text = _CLIP_TEXT | dict(config.get("text_config") or {})
        tower = encoder_spec(config.get("vision_config") or {}, "clip_vision_model", post_norm=True, keep_class=True)
        size = positive_int({"projection_dim": 512, **config}, "projection_dim")
        assert tower.table is not None
        super().__init__(text, tower, tower.table.side**2, size, dtype, device)
        self.text_projection = Linear(self.spec.hidden_size, {"text_projection": size}, False, dtype, device, exact=True)
        self.visual_projection = Linear(tower.width, {"visual_projection": size}, False, dtype, device, exact=True)
        self.logit_scale = StoredTensor((), torch.float32, device)

    def pool_image(self, rows: Tensor) -> Tensor:
        return self.visual_projection(rows[:1])[0]


class Siglip(DualEncoder):
    """SigLIP, and SigLIP 2 at a fixed size: a text is padded and attends to its padding; images are pooled by attention."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text, vision = _SIGLIP_TEXT | dict(config.get("text_config") or {}), dict(config.get("vision_config") or {})
        if not vision.get("vision_use_head", True):
            raise ConfigError("vision_use_head is false; only checkpoints with a pooling head embed images")
        tower, patches = self.read_tower(vision)
        size = positive_int({"projection_size": text["hidden_size"], **_present(text)}, "projection_size")
        super().__init__(text, tower, patches, size, dtype, device)
        self.text_projection = Linear(self.spec.hidden_size, {"text_projection": size}, True, dtype, device, exact=True)
        self.pooler = AttentionPooling(tower, dtype, device)
        self.logit_scale = StoredTensor((1,), torch.float32, device)
        self.logit_bias = StoredTensor((1,), torch.float32, device)
        if tower.width != size:
            raise ConfigError(f"images have vectors of {tower.width} numbers, texts of {size}; they cannot be compared")

    def read_tower(self, vision: Mapping[str, Any]) -> tuple[TowerSpec, int]:
        """Return the tower and the most patches of an image."""
        tower = encoder_spec(vision, "siglip_vision_model", post_norm=True)
        assert tower.table is not None
        return tower, tower.table.side**2

    def pool_image(self, rows: Tensor) -> Tensor:
        return self.pooler(rows)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().convert_weights(weights):
            if name.startswith("pooler.attention.in_proj_"):
                kind = name.rpartition("_")[2]
                yield from zip((f"pooler.{part}_proj.{kind}" for part in "qkv"), tensor.chunk(3), strict=True)
            else:
                yield name.replace("pooler.attention.", "pooler.").replace("pooler.mlp.", "pooler."), tensor


class SiglipNaflex(Siglip):
    """SigLIP 2 with the image's aspect ratio: the position table is fitted to the grid."""

    def read_tower(self, vision: Mapping[str, Any]) -> tuple[TowerSpec, int]:
        side = math.isqrt(positive_int({"num_patches": 256, **vision}, "num_patches"))
        size = side * positive_int({"patch_size": 16, **vision}, "patch_size")
        fixed = {**vision, "model_type": "siglip_vision_model", "image_size": size}
        table = TableSpec(side, "bilinear", antialias=True)
        return encoder_spec(fixed, "siglip_vision_model", post_norm=True, table=table), max(MAX_PATCHES, side**2)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors; the numbers of a patch are stored row by row, those of a pixel side by side."""
        for name, tensor in super().convert_weights(weights):
            if name == "tower.embeddings.patch_embedding.weight" and tensor.ndim == 2:
                side = math.isqrt(tensor.shape[1] // 3)
                tensor = tensor.view(-1, side, side, 3).permute(0, 3, 1, 2).flatten(1)
            yield name, tensor


def _present(text: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in text.items() if value is not None}
