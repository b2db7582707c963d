"""Fun-ASR-Nano (arXiv 2509.12508): SenseVoice's encoder, two transformer layers as adaptor, Qwen3."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import check_activation, positive_int
from ...audio.sanm import SanmEncoder, sanm_bytes, sanm_spec
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.connectors import Projector, ProjectorSpec, projector_bytes
from ...memory_formulas import SMALL
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from ...vision.spec import TowerNames, TowerSpec
from ...vision.vit import VisionTower, tower_bytes
from .config import hub_config

TEXT = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "max_position_embeddings": 40960,
}  # fmt: skip
_ADAPTOR: Mapping[str, Any] = {
    "hidden_size": 1024, "num_attention_heads": 8, "intermediate_size": 256, "num_hidden_layers": 2, "layer_norm_eps": 1e-5,
    "hidden_act": "relu", "projector_hidden_act": "relu", "projector_hidden_size": 2048,
}  # fmt: skip
_NAMES = TowerNames(
    layers="layers",
    norms=("input_layernorm", "post_attention_layernorm"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    mlp=("mlp.fc1", "mlp.fc2"),
)
_PUBLISHED = (
    ("audio_encoder.after_norm.", "audio_tower.layers.{after}.final_layernorm."),
    ("audio_encoder.tp_norm.", "audio_tower.layers.{last}.final_layernorm."),
    ("audio_adaptor.blocks.", "adaptor.layers."),
    ("audio_adaptor.linear1.", "multi_modal_projector.linear_1."),
    ("audio_adaptor.linear2.", "multi_modal_projector.linear_2."),
    ("llm.model.", "language_model."),
    ("llm.lm_head.", "head.lm_head."),
)
_PARTS = (
    (".norm1.", ".input_layernorm."), (".norm2.", ".post_attention_layernorm."), (".linear_out.", ".o_proj."),
    (".fsmn_block.", ".fsmn.conv."), (".feed_forward.w_1.", ".mlp.fc1."), (".feed_forward.w_2.", ".mlp.fc2."),
    (".linear_q.", ".q_proj."), (".linear_k.", ".k_proj."), (".linear_v.", ".v_proj."),
)  # fmt: skip
_BLOCK = re.compile(r"audio_encoder\.(encoders0|encoders|tp_encoders)\.(\d+)\.")


class FunAsrNano(DecoderModel):
    """A model of audio, in transformers' layout or in the publisher's, where only the first rows of an item are used."""

    prefixes = (
        ("model.audio_tower.", "audio_tower."),
        ("model.multi_modal_projector.layers.", "adaptor.layers."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        *TEXT_PREFIXES,
    )
    ignored = ("ctc_decoder.", "ctc.")

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = hub_config(config)
        text, adaptor = config.get("text_config") or TEXT, {**_ADAPTOR, **(config.get("adaptor_config") or {})}
        decoder = decoder_spec({"tie_word_embeddings": True, **config, "text_config": text}, STACKS["qwen3"])
        super().__init__(decoder, dtype, device)
        spec, width = sanm_spec(config.get("audio_config") or {}), positive_int(adaptor, "hidden_size")
        if width != decoder.hidden_size:
            raise ConfigError(f"hidden_size of adaptor_config is {width}, that of text_config {decoder.hidden_size}")
        self.rows_per_token = int(config.get("rows_per_token", 1))
        self.last_layers = min(spec.normed), spec.layers - 1  # for transcription, for timestamps
        self.audio_tower = SanmEncoder(spec, dtype, device)
        inner, act = positive_int(adaptor, "projector_hidden_size"), adaptor["projector_hidden_act"]
        layers = ("linear_1", "linear_2")
        self.multi_modal_projector = Projector(ProjectorSpec(spec.width, width, layers, inner=inner, act=act), dtype, device)
        self.adaptor = VisionTower(_adaptor_spec(adaptor, width), dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        lengths = tensors["audio_frames"].tolist()
        x = self.multi_modal_projector(self.audio_tower(tensors["input_features"], lengths))
        rows = self.adaptor(x, [(1, 1, n) for n in lengths])[-1]
        del x
        if self.rows_per_token == 1:
            return list(rows.split(lengths))
        counts = [-(-n // self.rows_per_token) for n in lengths]
        return list(torch.cat([item[:n] for item, n in zip(rows.split(lengths), counts, strict=True)]).split(counts))

    def input_bytes(self, modality: str, rows: int) -> int:
        return rows * self.rows_per_token * self.audio_tower.spec.inputs * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        count, spec, projector = rows * self.rows_per_token, self.audio_tower.spec, self.multi_modal_projector.spec
        inputs, result = self.input_bytes(modality, rows), count * self.hidden_size * self.dtype.itemsize
        joined = count * projector_bytes(projector, 1, count, self.dtype, limits)
        adapted = result + tower_bytes(self.adaptor.spec, count, None, self.dtype, limits)
        return max(sanm_bytes(spec, count, self.dtype, limits), SMALL + inputs + max(joined, adapted))

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors under our names; the publisher's layout has queries, keys and values of the encoder in one tensor."""
        after, last = self.last_layers
        starts = {"encoders0": 0, "encoders": 1, "tp_encoders": after + 1}
        for name, tensor in weights:
            name = _BLOCK.sub(lambda match: f"audio_tower.layers.{starts[match[1]] + int(match[2])}.", name)
            for old, new in _PUBLISHED:
                if name.startswith(old):
                    name = new.format(after=after, last=last) + name[len(old) :]
            for old, new in _PARTS:
                name = name.replace(old, new)
            if ".linear_q_k_v." in name:
                parts = (name.replace("linear_q_k_v", f"{part}_proj") for part in "qkv")
                yield from zip(parts, tensor.chunk(3), strict=True)
            else:
                yield name, tensor


def _adaptor_spec(adaptor: Mapping[str, Any], width: int) -> TowerSpec:
    return TowerSpec(
        depth=positive_int(adaptor, "num_hidden_layers"),
        width=width,
        heads=positive_int(adaptor, "num_attention_heads"),
        inner=positive_int(adaptor, "intermediate_size"),
        patch_dim=0,
        act=check_activation("hidden_act of adaptor_config", adaptor["hidden_act"]),
        eps=float(adaptor["layer_norm_eps"]),
        names=_NAMES,
    )
