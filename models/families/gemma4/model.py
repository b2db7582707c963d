"""Gemma 4: a tower that averages rows over squares, the encoder of the Universal Speech Model, a Gemma 4 decoder."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...audio.usm import Usm, usm_bytes, usm_spec
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.basic import Norm, TensorModule
from ...layers.linear import Linear
from ...native_model import TENSORS
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from ...vision.pooled import PooledTower, pooled_tower_bytes, pooled_tower_spec

VISION: Mapping[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12, "head_dim": 64,
    "num_key_value_heads": 12, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "pooling_kernel_size": 3,
    "patch_size": 16, "position_embedding_size": 10240, "use_clipped_linears": False, "standardize": False,
}  # fmt: skip
AUDIO: Mapping[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8, "hidden_act": "silu",
    "subsampling_conv_channels": (128, 32), "conv_kernel_size": 5, "residual_weight": 0.5, "attention_chunk_size": 12,
    "attention_context_left": 13, "attention_context_right": 0, "attention_logit_cap": 50.0, "use_clipped_linears": True,
    "rms_norm_eps": 1e-6, "gradient_clipping": 1e10, "output_proj_dims": 1536,
}  # fmt: skip
_MAX_AUDIO_ROWS = 750  # of an item


class RowProjection(TensorModule):
    """Norms encoder rows without a weight and projects them to the decoder's width."""

    def __init__(self, width: int, eps: float, out: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.norm = Norm(width, eps, False, dtype, device, learned=False)
        self.projection = Linear(width, {"embedding_projection": out}, False, dtype, device)

    def forward(self, rows: Tensor) -> Tensor:
        return self.projection(self.norm(rows))


class Gemma4(DecoderModel):
    """A model of images, videos and audio; the checkpoint may lack the encoder of images and videos, or that of audio."""

    prefixes = (
        ("model.vision_tower.", "visual."),
        ("model.audio_tower.", "audio."),
        ("model.embed_", "embed_"),
        ("vision_tower.", "visual."),
        ("audio_tower.", "audio."),
        *TEXT_PREFIXES,
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        stack = STACKS["gemma4_text"]
        super().__init__(decoder_spec(config, stack), dtype, device)
        self.renames, hidden = stack.renames, self.hidden_size
        vision, audio = config.get("vision_config"), config.get("audio_config")
        self.visual: PooledTower | None = None
        self.audio: Usm | None = None
        if vision is not None:
            spec = pooled_tower_spec({**VISION, **vision})
            self.visual = PooledTower(spec, dtype, device)
            self.embed_vision = RowProjection(spec.width, spec.eps, hidden, dtype, device)
        if audio is not None:
            usm = usm_spec({**AUDIO, **audio})
            self.audio = Usm(usm, dtype, device)
            self.embed_audio = RowProjection(usm.out or usm.width, usm.eps, hidden, dtype, device)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Rename the parts of the experts, and bring the numbers of a patch into the order channel, row, column."""
        for name, tensor in weights:
            if "language_model." in name:
                for old, new in self.renames:
                    name = name.replace(old, new)
            elif "audio_tower." in name:
                name = name.replace(".norm_post_attn.", ".self_attn.post_norm.")
            elif name.endswith("patch_embedder.input_proj.weight"):
                side = round((tensor.shape[1] / 3) ** 0.5)
                tensor = tensor.unflatten(1, (side, side, 3)).permute(0, 3, 1, 2).flatten(1)
            yield name, tensor

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        if modality == "audio":
            assert self.audio is not None
            frames = tensors["audio_frames"].tolist()
            rows = self.embed_audio(self.audio(tensors["input_features"], frames))
            return list(rows.split([self.audio.spec.rows(n) for n in frames]))
        assert self.visual is not None
        pixels, grid = (tensors[name] for name in TENSORS[modality])
        grids = [(int(t), int(h), int(w)) for t, h, w in grid.tolist()]
        square = self.visual.spec.merge**2
        return list(self.embed_vision(self.visual(pixels, grids)).split([t * h * w // square for t, h, w in grids]))

    def keep_encoders(self, modalities: Collection[str]) -> None:
        super().keep_encoders(modalities)
        if self.audio is not None and "audio" not in modalities:
            self._remove("audio", "embed_audio")
        if self.visual is not None and not {*modalities} - {"audio"}:
            self._remove("visual", "embed_vision")

    def input_bytes(self, modality: str, rows: int) -> int:
        if modality == "audio":
            assert self.audio is not None
            return rows * 4 * self.audio.spec.channels[0] * self.dtype.itemsize
        assert self.visual is not None
        return rows * self.visual.spec.merge**2 * self.visual.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        if modality == "audio":
            assert self.audio is not None
            return usm_bytes(self.audio.spec, rows, _MAX_AUDIO_ROWS, self.dtype, limits)
        assert self.visual is not None
        return pooled_tower_bytes(self.visual.spec, rows * self.visual.spec.merge**2, self.dtype, limits)
