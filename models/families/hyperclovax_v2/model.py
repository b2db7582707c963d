"""HyperCLOVA X SEED Think: the tower of Qwen2.5-VL, another linear layer after its merger, and HyperCLOVA X.

Sources: the class of transformers 5.23; vLLM's hyperclovax_vision_v2.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....checkpoints.config import require
from ...layers.builder import Builder
from ...layers.connectors import Projector, ProjectorSpec
from ...native_model import NativeModel
from ...text.decoder_config import decoder_spec
from ...text.stacks import stack_of
from ...vision.spec import GATED_BLOCKS
from ..qwen2_vl.model import qwen25_tower

_PROJECTORS = ("projector", "vision_projector", "mm_projector")  # transformers' name, and those of published files


@dataclass(frozen=True)
class ProjectedMergerSpec(ProjectorSpec):
    """Qwen2.5-VL's merger to `merged` numbers, and a linear layer to `out`, whose result is multiplied by `factor`."""

    merged: int = 0
    factor: float = 1.0


class ProjectedMerger(Projector):
    """`[patches, width]` -> `[rows, out]`."""

    def __init__(self, spec: ProjectedMergerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(replace(spec, out=spec.merged), dtype, device)
        project = Builder(self, dtype, device).linear(["projector"], spec.merged, [spec.out], True)
        self.last = (project,)  # in a tuple: its only name is the checkpoint's
        self.factor, self.row_bytes = spec.factor, (spec.merged + 2 * spec.out) * dtype.itemsize

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.last[0](super().forward(x))
        return rows if self.factor == 1.0 else rows.mul_(self.factor)

    def extra_bytes(self, rows: int) -> int:
        return rows * self.row_bytes


class HyperClovaXV2(NativeModel):
    """A model of images and videos. Its rows have positions of one axis."""

    prefixes = (
        *((f"{model}{name}.", "merger.projector.") for model in ("model.", "") for name in _PROJECTORS),
        ("model.vision_model.merger.", "merger."),
        ("vision_model.merger.", "merger."),
        ("model.vision_model.", "visual."),
        ("vision_model.", "visual."),
        ("model.language_model.model.", "language_model."),
        ("model.language_model.lm_head.", "head.lm_head."),
        ("model.language_model.", "language_model."),
        ("language_model.model.", "language_model."),
        ("language_model.lm_head.", "head.lm_head."),
        ("lm_head.", "head.lm_head."),
    )
    ignored = ("model.discrete_vision_model.", "discrete_vision_model.")
    merger_class = ProjectedMerger

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        decoder = decoder_spec(config, stack_of(config, "hyperclovax"))
        tower, merger = qwen25_tower(require(config, "vision_config"), GATED_BLOCKS)
        fields = {name: getattr(merger, name) for name in merger.__dataclass_fields__}
        # the published model scales everything that goes into the decoder, encoder rows included
        spec = ProjectedMergerSpec(**{**fields, "out": decoder.hidden_size}, merged=merger.out, factor=decoder.embed_scale)
        super().__init__(decoder, tower, (spec,), dtype, device)
