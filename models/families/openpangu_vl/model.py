"""openPangu-VL: a tower of windows, several of whose states are merged and added, and a decoder with M-RoPE.

Source: vLLM's openpangu_vl.py and openpangu.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import get_text_config, positive_int, positive_number, require
from ....kernels.activation import activation
from ...decoder_model import DecoderModel
from ...interface import StepLimits
from ...layers.basic import Norm, TensorModule
from ...layers.connectors import Projector, ProjectorSpec, projector_bytes
from ...layers.linear import Linear
from ...memory_formulas import OpBytes
from ...native_model import TENSORS
from ...text.decoder_config import decoder_spec
from ...text.spec import DecoderSpec
from ...text.stack import Stack
from ...vision.spec import GATED_BLOCKS, TowerNames
from ...vision.vit import VisionTower, tower_bytes
from ..qwen2_vl.model import PREFIXES, qwen25_tower

_TEXT: dict[str, Any] = {
    "vocab_size": 153376, "hidden_size": 4096, "intermediate_size": 12800, "num_hidden_layers": 34, "num_attention_heads": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 6.4e7, "max_position_embeddings": 32768,
    "use_sliding_window": False,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "depth": 26, "hidden_size": 1536, "intermediate_size": 4608, "num_heads": 16, "out_hidden_size": 3584, "hidden_act": "gelu",
    "fullatt_block_indexes": (5, 12, 19, 25), "mm_unit_vision_select_layer": (-1, -3),
}  # fmt: skip
_SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
_PLAIN_BLOCKS = TowerNames(mlp=("mlp.up_proj", "mlp.down_proj"))
_OWN = {"merger.": "merger.", "final_layernorm.": "merger.final_layernorm.", "vision_projection.": "merger."}


def sections_in_turn(sections: tuple[int, ...]) -> tuple[int, ...]:
    """Let axes alternate so that each is used up evenly; the last frequency is of time. `(3, 2, 2)` gives 0 1 2 0 1 2 0."""
    counts = (sections[0] - 1, *sections[1:])
    used, axes = [0] * len(counts), list[int]()
    for _ in range(sum(counts)):
        left = [axis for axis, count in enumerate(counts) if used[axis] < count]
        axis = min([axis for axis in left if [axis] != axes[-1:]] or left, key=lambda axis: (used[axis] / counts[axis], axis))
        used[axis] += 1
        axes.append(axis)
    return (*axes, 0)


class AddedMergers(TensorModule):
    """States of the tower `[patches, width]` -> the sum of their merged rows, activated and projected: `[rows, out]`.

    All states pass the same norm. Each has a merger of its own; the first one reads the last state. `spec`: of one merger.
    """

    def __init__(self, spec: ProjectorSpec, count: int, out: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.out = spec, out
        self.final_layernorm = Norm(spec.width, spec.eps, False, dtype, device)
        self.mergers = [Projector(spec, dtype, device) for _ in range(count)]
        for number, merger in enumerate(self.mergers):
            self.add_module(str(number), merger)
        self.vision_projection = Linear(spec.out, {"fc1": out}, True, dtype, device)

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        first, *others = (
            merger(self.final_layernorm(state)) for merger, state in zip(self.mergers, reversed(states), strict=True)
        )
        for merged in others:
            first.add_(merged)
        return self.vision_projection(activation("silu", first))

    def bytes(self, patches: int, dtype: torch.dtype, limits: StepLimits) -> int:
        """Return the bytes alive in `forward`, the states included, for this many patches of each state."""
        ops, s, count, rows = OpBytes(dtype, limits), dtype.itemsize, len(self.mergers), patches // self.spec.group
        merged = ops.linear_result(self.spec.out, rows)
        merging = patches * (count * self.spec.width * s + projector_bytes(self.spec, 1, patches, dtype, limits))
        last = rows * (count * self.spec.group * self.spec.width * s + 2 * merged + ops.linear(self.spec.out, self.out, rows))
        return max(merging + (count - 1) * rows * merged, last)


class OpenPanguVL(DecoderModel):
    """A model of images and videos."""

    prefixes = (
        *((f"{model}visual.{stored}", name) for model in ("model.", "") for stored, name in _OWN.items()),
        *PREFIXES,
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = {**_VISION, **require(config, "vision_config")}
        tower, merger = qwen25_tower(vision, GATED_BLOCKS if vision["hidden_act"] == "silu" else _PLAIN_BLOCKS)
        eps = positive_number({"rms_norm_eps": 1e-6, **vision}, "rms_norm_eps")
        tower = replace(tower, eps=eps, features=_features(vision))
        super().__init__(_decoder(config), dtype, device)
        self.visual = VisionTower(tower, dtype, device)
        self.merger = AddedMergers(replace(merger, eps=eps), len(tower.features), self.hidden_size, dtype, device)
        self.ignored = tuple(f"visual.{name}" for name in tower.unbuilt)
        self.frames = positive_int({"temporal_patch_size": 2, **vision}, "temporal_patch_size")

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Read the tensors of NativeModel; patches have one frame, which fills all frames of the weights."""
        pixels, grid = (tensors[name] for name in TENSORS[modality])
        grids = [(int(t), int(h), int(w)) for t, h, w in grid.tolist()]
        rows = self.merger(self.visual(self._filled(pixels), grids))
        return list(rows.split([t * h * w // self.merger.spec.group for t, h, w in grids]))

    def _filled(self, pixels: Tensor) -> Tensor:
        """Repeat the frame of each patch: `[patches, 3 * side^2]` -> `[patches, 3 * frames * side^2]`."""
        return pixels.view(len(pixels), 3, 1, -1).expand(-1, -1, self.frames, -1).flatten(1)

    def keep_encoders(self, modalities: Collection[str]) -> None:
        super().keep_encoders(modalities)
        if not modalities:
            self._remove("visual", "merger")

    def input_bytes(self, modality: str, rows: int) -> int:
        return rows * self.merger.spec.group * self.visual.spec.patch_dim // self.frames * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        patches, size = rows * self.merger.spec.group, self.dtype.itemsize
        tower = tower_bytes(self.visual.spec, patches, None, self.dtype, limits)
        result = 2 * rows * self.hidden_size * size  # rows of all items, and of each
        return self.input_bytes(modality, rows) + max(tower, self.merger.bytes(patches, self.dtype, limits), result)


def _features(vision: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the states that are merged, counted from 1; the config counts layers from the end."""
    depth, chosen = positive_int(vision, "depth"), vision["mm_unit_vision_select_layer"]
    layers = {depth + number for number in chosen}
    if not layers or not layers <= {*range(depth)} or len(layers) < len(chosen):
        raise ConfigError(
            f"mm_unit_vision_select_layer {list(chosen)} in vision_config must be layers from -{depth} to -1, each once"
        )
    return tuple(sorted(layer + 1 for layer in layers))


def _decoder(config: Mapping[str, Any]) -> DecoderSpec:
    """Read the decoder. `bias` is that of all projections of attention, unless `qkv_bias` says otherwise."""
    text = {**get_text_config(config)}
    bias = bool(text.get("attention_bias") or text.get("bias"))
    text |= {"attention_bias": text.pop("qkv_bias", bias), "attention_out_bias": bias}
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    in_turn = rope.get("mrope_interleaved")
    if rope.get("rope_type") == "openpangu":
        rope["rope_type"] = "default"
    stack = Stack(_TEXT, axes=sections_in_turn if in_turn else None)
    if text.get("sandwich_norm"):
        stack = replace(stack, norms=_SANDWICH)
    return decoder_spec({**config, "text_config": {**text, "rope_parameters": rope}}, stack)
