"""Gemma 3n: MobileNetV5, the Universal Speech Model's encoder, a decoder with tables of its own for tokens of modalities."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int
from ...audio.usm import Usm, UsmSpec, usm_bytes, usm_spec
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import ForwardBatch, StepLimits
from ...layers.basic import EmbeddingTable, Norm, TensorModule
from ...layers.linear import Linear
from ...memory_formulas import SMALL, OpBytes
from ...text.altup import AltUpDecoder
from ...text.decoder_config import decoder_spec
from ...text.spec import DecoderSpec
from ...text.stacks import STACKS
from ...vision.mobilenet import MobileNet, mobilenet_bytes
from ...vision.mobilenet_spec import mobilenet_spec
from .config import AUDIO, conv_sizes

VISION: dict[str, Any] = {"hidden_size": 2048, "vocab_size": 128, "vocab_offset": 262144, "rms_norm_eps": 1e-6}
_NAMES = (
    (re.compile(r"subsample_conv_projection\.conv_"), "subsample_conv_projection.layer"),
    (re.compile(r"\.conformer\.(\d+)\.norm\."), r".layers.\1.norm_out."),
    (re.compile(r"\.conformer\."), ".layers."),
    (re.compile(r"\.ffw_layer_start\."), ".feed_forward1."),
    (re.compile(r"\.ffw_layer_end\."), ".feed_forward2."),
    (re.compile(r"\.attention\.attn\.relative_position_embedding\.pos_proj\."), ".self_attn.relative_k_proj."),
    (re.compile(r"\.attention\.attn\."), ".self_attn."),
    (re.compile(r"\.attention\.post\."), ".self_attn.post."),
    (re.compile(r"\.attention\.pre_attn_norm\."), ".norm_pre_attn."),
    (re.compile(r"\.attention\.post_norm\."), ".self_attn.post_norm."),
    (re.compile(r"\.([qkv]_proj|post|ffw_layer_[12]|linear_start|linear_end)\.weight$"), r".\1.linear.weight"),
)


def gemma3n_audio_spec(audio: Mapping[str, Any]) -> UsmSpec:
    """Read the raw `audio_config`, whose keys have prefixes such as `conf_`; ConfigError for unsupported values."""
    names = {
        "attention_chunk_size": "conf_attention_chunk_size",
        "attention_context_left": "conf_attention_context_left",
        "attention_context_right": "conf_attention_context_right",
        "attention_logit_cap": "conf_attention_logit_cap",
        "num_attention_heads": "conf_num_attention_heads",
        "num_hidden_layers": "conf_num_hidden_layers",
        "conv_kernel_size": "conf_conv_kernel_size",
        "residual_weight": "conf_residual_weight",
        "subsampling_conv_channels": "sscp_conv_channel_size",
    }
    renamed = {**audio, **{new: audio[old] for new, old in names.items()}, "hidden_act": "silu", "use_clipped_linears": False}
    spec = usm_spec(
        {**renamed, "output_proj_dims": None},
        looks_at_edges=True,
        key_scale=1.0,
        cumulative=audio["sscp_conv_group_norm_eps"],
        reduction=positive_int(audio, "conf_reduction_factor"),
        mels=positive_int(audio, "input_feat_size"),
        kernels=conv_sizes(audio, "sscp_conv_kernel_size"),
        strides=conv_sizes(audio, "sscp_conv_stride_size"),
    )
    if min(spec.bands(1), spec.bands()) < 1:
        raise ConfigError(f"sscp_conv_kernel_size {spec.kernels} of audio_config is too large for {spec.mels} mel bands")
    return spec


class ModalityEmbedder(TensorModule):
    """Norms encoder rows and the modality's token embeddings, and projects both to the decoder's width."""

    def __init__(self, section: Mapping[str, Any], out: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        width, eps = positive_int(section, "hidden_size"), section["rms_norm_eps"]
        self.embedding = EmbeddingTable(positive_int(section, "vocab_size"), width, dtype, device)
        self.hard_embedding_norm = Norm(width, eps, False, dtype, device)
        self.soft_embedding_norm = Norm(width, eps, False, dtype, device)
        self.projection = Linear(width, {"embedding_projection": out}, False, dtype, device)
        self.last_norm = Norm(out, eps, False, dtype, device, learned=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last_norm(self.projection(self.soft_embedding_norm(rows)))

    def token_rows(self) -> Tensor:
        """Return the embeddings of all tokens of the modality, `[tokens, out]`."""
        return self.last_norm(self.projection(self.hard_embedding_norm(self.embedding.weight)))


class Gemma3nDecoder(AltUpDecoder):
    """The decoder. Tokens from `first` on have embeddings of their own, `token_rows [tokens, hidden]`."""

    def __init__(self, spec: DecoderSpec, first: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        self.first, self.token_rows = first, torch.empty(tokens, spec.hidden_size, dtype=dtype, device=device)

    def embed(self, batch: ForwardBatch) -> Tensor:
        ids = batch.input_ids
        rows = self.token_rows.index_select(0, (ids - self.first).clamp(0, len(self.token_rows) - 1))
        return torch.where((ids >= self.first)[:, None], rows, self.embed_tokens(ids))


class Gemma3n(DecoderModel):
    """A model of images and audio. Items have fixed numbers of rows; those after the end of audio embed the last token."""

    prefixes = (
        ("model.vision_tower.timm_model.", "visual."),
        ("model.audio_tower.", "audio."),
        ("model.embed_", "embed_"),
        ("vision_tower.timm_model.", "visual."),
        ("audio_tower.", "audio."),
        *TEXT_PREFIXES,
    )
    language_model: Gemma3nDecoder

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        spec = decoder_spec(config, STACKS["gemma3n_text"])
        audio, vision = AUDIO | (config.get("audio_config") or {}), VISION | (config.get("vision_config") or {})
        tokens = [positive_int(section, "vocab_size") for section in (vision, audio)]
        if [vision["vocab_offset"] + tokens[0], audio["vocab_offset"] + tokens[1]] != [audio["vocab_offset"], spec.vocab_size]:
            raise ConfigError("the last tokens of the vocabulary must be those of vision_config and then of audio_config")
        super().__init__(spec, dtype, device, Gemma3nDecoder(spec, vision["vocab_offset"], sum(tokens), dtype, device))
        self.rows = positive_int({"audio_soft_tokens_per_image": 188, **config}, "audio_soft_tokens_per_image")
        self.padding = torch.empty(1, spec.hidden_size, dtype=dtype, device=device)
        self.embed_vision = ModalityEmbedder(vision, spec.hidden_size, dtype, device)
        self.embed_audio = ModalityEmbedder(audio, spec.hidden_size, dtype, device)
        self.audio: Usm | None = Usm(gemma3n_audio_spec(audio), dtype, device)
        self.visual: MobileNet | None = MobileNet(mobilenet_spec(vision), dtype, device)
        rows, encoded = config.get("vision_soft_tokens_per_image", 256), self.visual.spec.side**2
        if rows != encoded:
            raise ConfigError(f"vision_soft_tokens_per_image is {rows!r}, but the encoder returns {encoded} rows")

    @property
    def encoder_parts(self) -> Iterator[tuple[str, nn.Module]]:
        """See DecoderModel. Both embedders also make rows of the token embeddings."""
        return ((name, part) for name, part in super().encoder_parts if not isinstance(part, ModalityEmbedder))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(weights)
        self.padding = self.embed_audio.token_rows()[-1:].clone()  # a view would keep all rows
        if self.language_model is not None:
            self.language_model.token_rows = torch.cat((self.embed_vision.token_rows(), self.embed_audio.token_rows()))

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        for name, tensor in weights:
            if "audio_tower." in name:
                for pattern, new in _NAMES:
                    name = pattern.sub(new, name)
            yield name, tensor

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        if modality == "image":
            assert self.visual is not None
            spec = self.visual.spec
            return list(self.embed_vision(self.visual(tensors["pixel_values"]).mul_(spec.out**0.5)).split(spec.side**2))
        assert self.audio is not None
        frames = tensors["audio_frames"].tolist()
        counts = [-(-self.audio.spec.rows(n) // self.audio.spec.reduction) for n in frames]
        items = self.embed_audio(self.audio(tensors["input_features"], frames)).split(counts)
        return [torch.cat((rows, self.padding.expand(self.rows - len(rows), -1))) for rows in items]

    def keep_encoders(self, modalities: Collection[str]) -> None:
        """Remove the encoders that are not needed. The tables of tokens stay."""
        self.reads_encoder_rows = bool(modalities)
        self._remove(*(name for name, of in (("visual", "image"), ("audio", "audio")) if of not in modalities))

    def input_bytes(self, modality: str, rows: int) -> int:
        if modality == "image":
            assert self.visual is not None
            return rows * self.visual.spec.patch_dim * self.dtype.itemsize
        assert self.audio is not None
        c = self.audio.spec
        return rows * c.reduction * c.frames_per_row * c.mels * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        if modality == "image":
            assert self.visual is not None
            c, ops, out = self.visual.spec, OpBytes(self.dtype, limits), self.hidden_size
            encoder = mobilenet_bytes(c, -(-rows // c.side**2), self.dtype, limits)
            norm, project = ops.norm(c.out, True), c.out * self.dtype.itemsize + ops.linear(c.out, out, rows)
            embed = c.out * self.dtype.itemsize + max(norm, project, ops.linear_result(out, rows) + ops.norm(out, True))
            return SMALL + self.input_bytes(modality, rows) + max(encoder, rows * embed)
        assert self.audio is not None
        each = self.audio.spec.reduction
        return usm_bytes(self.audio.spec, rows * each, self.rows * each, self.dtype, limits)
