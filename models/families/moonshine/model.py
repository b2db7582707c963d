"""Moonshine (arXiv 2410.15608) and Moonshine Streaming: encoders of waveforms, and a decoder with rotary positions.

Each row of the streaming encoder depends on nearby samples only, so the open window of a live stream is encoded piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....callers.errors import ConfigError
from ....checkpoints.config import check_activation, positive_int
from ....kernels.activation import activation
from ...audio.local_encoder import LocalEncoder, WindowStates
from ...audio.mel_encoder import (
    EPS,
    MelEncoderLayer,
    MelEncoderNames,
    MelEncoderSpec,
    attention_tiles,
    encoder_norm,
    mel_layer_bytes,
)
from ...interface import StepLimits
from ...layers.basic import Norm
from ...layers.linear import Linear
from ...memory_formulas import FLOAT32, SMALL, OpBytes
from ...text.attention_config import rope_spec
from ...text.encoder_decoder import CrossDecoderNames, CrossDecoderSpec
from ...text.rope import Rotary
from ...text.spec import RopeSpec
from ...text.stack import Stack
from ..whisper.model import PREFIXES, Whisper

_GROUPED = "{} in config.json is below the number of heads; the published decoder fails with such a value"
_NORMS = ("input_layernorm", "post_attention_layernorm", "final_layernorm")
_MLP = ("mlp.fc1", "mlp.fc2")
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32768, "hidden_size": 288, "intermediate_size": 1152, "max_position_embeddings": 512,
    "encoder_num_hidden_layers": 6, "encoder_num_attention_heads": 8, "encoder_hidden_act": "gelu", "hidden_act": "silu",
    "decoder_num_hidden_layers": 6, "decoder_num_attention_heads": 8, "partial_rotary_factor": 0.9,
}  # fmt: skip
_STREAMING: dict[str, Any] = {
    "vocab_size": 32768, "hidden_size": 320, "intermediate_size": 1280, "max_position_embeddings": 4096,
    "num_hidden_layers": 6, "num_attention_heads": 8, "hidden_act": "silu", "partial_rotary_factor": 0.8,
    "tie_word_embeddings": False,
}  # fmt: skip
_STREAMING_ENCODER: dict[str, Any] = {
    "hidden_size": 320, "intermediate_size": 1280, "num_hidden_layers": 6, "num_attention_heads": 8, "hidden_act": "gelu",
    "sample_rate": 16_000, "frame_ms": 5.0, "sliding_windows": ((16, 4), (16, 4), (16, 0), (16, 0), (16, 4), (16, 4)),
}  # fmt: skip


class MoonshineEncoder(nn.Module):
    """Samples of items, concatenated -> `[rows, width]` per item, normed. Three convolutions give a row per 384 samples."""

    __call__: Callable[..., list[Tensor]]

    def __init__(self, c: MelEncoderSpec, rope: RopeSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config, self.dtype = c, dtype
        self.conv1 = Linear(127, {"conv1": c.width}, False, dtype, device)
        self.groupnorm = Norm(c.width, EPS, True, dtype, device)
        self.groupnorm.takes_adapters = False
        self.conv2 = Linear(7 * c.width, {"conv2": 2 * c.width}, True, dtype, device)
        self.conv3 = Linear(3 * 2 * c.width, {"conv3": c.width}, True, dtype, device)
        self.rotary = Rotary(rope, device)
        self.layers = nn.ModuleList(MelEncoderLayer(c, dtype, device) for _ in range(c.layers))
        self.layer_norm = encoder_norm(c, c.names.end, dtype, device)

    def forward(self, samples: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        items = [self._convolve(part) for part in samples.to(self.dtype).split(list(lengths))]
        rows = [len(item) for item in items]
        x = torch.cat(items)
        cos, sin, *_ = self.rotary(torch.cat([torch.arange(n, device=x.device) for n in rows])[None])
        for layer in self.layers:
            x = layer(x, rows, (cos, sin))
        return list(self.layer_norm(x).split(rows))

    def _convolve(self, samples: Tensor) -> Tensor:
        x = self.conv1(samples.unfold(0, 127, 64).contiguous()).tanh_()
        x = F.group_norm(x.T[None], 1, self.groupnorm.weight, self.groupnorm.bias, EPS)[0].T
        x = activation("gelu", self.conv2(x.unfold(0, 7, 3).flatten(1)))
        return activation("gelu", self.conv3(x.unfold(0, 3, 2).flatten(1)))

    def input_bytes(self, rows: int) -> int:
        """Return the bytes of the samples. An item of one row has at most 895 + 383 of them."""
        return rows * 1278 * self.dtype.itemsize

    def encoder_bytes(self, rows: int, limits: StepLimits) -> int:
        """Return the larger need: of one item of `rows` rows in the convolutions, or of `rows` short items in the layers."""
        c, ops, s = self.config, OpBytes(self.dtype, limits), self.dtype.itemsize
        row, second = c.width * s, 2 * rows + 2
        first = 3 * second + 6
        convolutions = max(
            first * (127 * s + ops.linear(127, c.width, first)),
            first * 3 * row,
            first * row + second * (7 * row + ops.linear(7 * c.width, 2 * c.width, second)),
            first * row + second * 4 * row,
            second * 2 * row + rows * (6 * row + ops.linear(6 * c.width, c.width, rows)),
        )
        layers = rows * (c.rotary_dim * FLOAT32 + mel_layer_bytes(c, rows, ops)) + attention_tiles(c, rows, ops)
        return SMALL + max((64 * first + 126) * s + convolutions, self.input_bytes(rows) + layers)


class Moonshine(Whisper):
    """A model of waveforms. Its decoder has rotary positions, a gated MLP, and no biases in norms and attention."""

    defaults = _DEFAULTS
    encoder: MoonshineEncoder | LocalEncoder  # type: ignore[assignment]

    def _build_encoder(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> CrossDecoderSpec:
        encoder, other = _side(config, "encoder"), _side(config, "decoder")
        if encoder["kv_heads"] != encoder["heads"]:
            raise ConfigError(_GROUPED.format("encoder_num_key_value_heads"))
        # the published decoder has as many heads as the encoder, whatever decoder_num_attention_heads says
        decoder = _decoder_spec(config, {**other, "heads": encoder["heads"], "kv_heads": encoder["heads"]})
        rope, width = decoder.rope, decoder.hidden_size
        assert rope is not None
        self.encoder = MoonshineEncoder(
            _encoder_spec(encoder, width, decoder.inner, decoder.head_dim, "layer_norm", rope), rope, dtype, device
        )
        return decoder

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        return self.encoder(tensors["input_values"], tensors["audio_samples"].tolist())

    def input_bytes(self, modality: str, rows: int) -> int:
        return self.encoder.input_bytes(rows)

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        return self.encoder.encoder_bytes(rows, limits)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return weights


class MoonshineStreaming(Moonshine):
    """The streaming models: an encoder of frames of 5 ms that may be wider or narrower than the decoder."""

    prefixes = (("model.decoder.pos_emb.", "encoder.pos_emb."), ("model.decoder.proj.", "encoder.proj."), *PREFIXES)
    defaults = _STREAMING
    encoder: LocalEncoder
    max_streams = 1
    keeps_open_windows = True

    def _build_encoder(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> CrossDecoderSpec:
        audio = {**_STREAMING_ENCODER, **(config.get("encoder_config") or {})}
        encoder, width = _side(audio, ""), positive_int(audio, "hidden_size")
        other = _side(config, "")
        if other["kv_heads"] != other["heads"]:
            raise ConfigError(_GROUPED.format("num_key_value_heads"))
        decoder = _decoder_spec(config, other)
        near = tuple((int(before), int(after)) for before, after in audio["sliding_windows"])
        if len(near) != encoder["layers"]:
            raise ConfigError(f"sliding_windows in config.json has {len(near)} entries for {encoder['layers']} layers")
        head_dim = audio.get("head_dim") or width // encoder["heads"]
        spec = _encoder_spec(encoder, width, positive_int(audio, "intermediate_size"), head_dim, "final_norm", None)
        spec = replace(spec, out_bias=spec.qkv_bias)
        frame = round(positive_int(audio, "sample_rate") * audio["frame_ms"] / 1000)
        self.encoder = LocalEncoder(spec, frame, near, decoder, dtype, device)
        self._windows = WindowStates(self.encoder)
        return decoder

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Return the rows of each item.

        With `audio_stream`, int64 `[items, 2]`, items are windows of live streams: the number of each, and 1 if it is closed.
        """
        if "audio_stream" not in tensors:
            return super().embed_multimodal(modality, tensors)
        lengths, frame = tensors["audio_samples"].tolist(), self.encoder.frame
        items = tensors["input_values"].split([-(-length // frame) * frame for length in lengths])
        windows = zip(tensors["audio_stream"].tolist(), items, lengths, strict=True)
        return [
            self._windows.encode(int(number), item, n, 0 if last else self.max_streams) for (number, last), item, n in windows
        ]

    def stream_bytes(self, rows: int) -> int:
        return self.encoder.window_bytes(rows)

    def free_stream(self, stream: int) -> None:
        self._windows.drop(stream)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Rename the weights of norms and of the compression."""
        for name, tensor in weights:
            yield name.replace(".gamma", ".weight").replace("embedder.comp.log_k", "log_k"), tensor


def _side(config: Mapping[str, Any], side: str) -> dict[str, Any]:
    """Return the sizes of a side, "encoder", "decoder" or "" for keys without one: heads, layers, activation and biases."""
    names = {"heads": "num_attention_heads", "layers": "num_hidden_layers"}
    before = f"{side}_" if side else ""
    sizes: dict[str, Any] = {key: positive_int(config, before + name) for key, name in names.items()}
    kv_heads = config.get(f"{before}num_key_value_heads") or sizes["heads"]
    sizes |= {"kv_heads": kv_heads, "qkv_bias": bool(config.get("attention_bias"))}
    act = config.get(f"{before}hidden_act") or config["hidden_act"]
    return sizes | {"act": check_activation(f"{before}hidden_act", act)}


def _encoder_spec(
    sizes: Mapping[str, Any], width: int, inner: int, head_dim: int, end: str, rope: RopeSpec | None
) -> MelEncoderSpec:
    return MelEncoderSpec(
        mels=1,
        width=width,
        inner=inner,
        positions=0,
        rope=rope,
        interleaved=True,
        bias=False,
        norm_offset=0.0 if rope else 1.0,
        attention_dim=head_dim,
        names=MelEncoderNames(_NORMS[:2], "o_proj", _MLP, end),
        **sizes,
    )


def _decoder_spec(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> CrossDecoderSpec:
    width = positive_int(config, "hidden_size")
    sizes = {name: value for name, value in sizes.items() if name != "kv_heads"}
    head_dim = config.get("head_dim") or width // sizes["heads"]
    return CrossDecoderSpec(
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=width,
        inner=positive_int(config, "intermediate_size"),
        positions=positive_int(config, "max_position_embeddings"),
        rope=rope_spec(config, Stack(interleaved=True), head_dim, "full_attention"),
        bias=False,
        gated=True,
        attention_dim=head_dim,
        names=CrossDecoderNames(_NORMS, "o_proj", _MLP, "norm"),
        **sizes,
    )
