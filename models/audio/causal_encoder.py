"""A causal audio encoder: two causal convolutions, then layers of a decoder with a sliding window.

Its state after n frames is the last frames of both convolutions, and the keys and values of a window: later frames are
encoded without the earlier ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ...callers.errors import ConfigError, InputError
from ...checkpoints.config import positive_int
from ...kernels.activation import activation
from ...kernels.metadata import AttentionMetadata
from ..interface import StepLimits
from ..layers.basic import Norm
from ..layers.linear import Linear
from ..memory_formulas import SMALL, OpBytes
from ..text.attention import gathered_bytes
from ..text.decoder import DecoderLayer, decoder_bytes
from ..text.decoder_config import decoder_spec
from ..text.rope import Rotary
from ..text.spec import AttentionSpec, DecoderSpec
from ..text.stack import Stack

_BLOCK = 16  # rows per block of keys and values
MAX_CHUNK = 256  # rows of a chunk of a stream
_STACK = Stack(
    {
        "vocab_size": 1, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 32,
        "max_position_embeddings": 1500, "rms_norm_eps": 1e-5, "sliding_window": 750, "head_dim": 64, "mlp_bias": True,
    },
    bias=True,
    out_bias=True,
    norms=("self_attn_layer_norm", None, "final_layer_norm", None),
)  # fmt: skip
_ALIASES = {
    "d_model": "hidden_size",
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
}
_WITHOUT_BIAS = re.compile(r"(.*audio_tower\.layers\.\d+\.(?:self_attn\.k_proj|mlp\.gate_proj|mlp\.up_proj))\.weight")


@dataclass(frozen=True)
class CausalEncoderSpec:
    """`mels`: bands per frame. `stack`: the layers."""

    mels: int
    stack: DecoderSpec

    @property
    def attention(self) -> AttentionSpec:
        spec = self.stack.attentions[0]
        assert isinstance(spec, AttentionSpec)
        return spec


def encoder_spec(audio: Mapping[str, Any], interleaved: bool = False) -> CausalEncoderSpec:
    """Read the raw `audio_config`. Raise ConfigError for a missing key or an unsupported feature.

    `interleaved`: rotated pairs are adjacent numbers, as in RopeSpec.
    """
    audio = {_ALIASES.get(key, key): value for key, value in audio.items()}
    mels, stack = positive_int({"num_mel_bins": 128, **audio}, "num_mel_bins"), replace(_STACK, interleaved=interleaved)
    spec = CausalEncoderSpec(mels, decoder_spec(audio, stack))
    if spec.attention.window is None or spec.attention.rope is None:
        raise ConfigError("audio_config has no sliding_window; only encoders with a window are supported")
    return spec


def _ring_shape(spec: CausalEncoderSpec) -> tuple[int, ...]:
    """Return the shape of the keys and values that a layer keeps of a stream."""
    attention = spec.attention
    blocks = -(-((attention.window or 0) + MAX_CHUNK) // _BLOCK) + 1
    return 2, blocks, _BLOCK, attention.kv_heads, attention.head_dim


class StreamState:
    """The encoder's state of a stream: keys and values of a window, in a ring of blocks, and last inputs of the convolutions.

    A chunk can be encoded again until the next one is encoded.
    """

    def __init__(self, spec: CausalEncoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        shape, width = _ring_shape(spec), spec.stack.hidden_size
        self.caches = [torch.zeros(shape, dtype=dtype, device=device) for _ in spec.stack.layers]
        zeros = (torch.zeros(2, spec.mels, dtype=dtype, device=device), torch.zeros(1, width, dtype=dtype, device=device))
        self.tails: dict[int, tuple[Tensor, Tensor]] = {0: zeros}  # rows encoded -> last inputs of both convolutions


class StreamStates:
    """The states of the streams that are open, by the stream's number."""

    def __init__(self) -> None:
        self._states: dict[int, StreamState] = {}

    def get(self, stream: int, start: int, make: Callable[[], StreamState]) -> StreamState:
        """Return the state before row `start`; a new one for 0. Raise InputError if it is not that of `start`."""
        if start == 0:
            self.drop(stream)  # before the new one takes memory
            self._states[stream] = make()
        state = self._states.get(stream)
        if state is None or start not in state.tails:
            raise InputError(f"the encoder has no state of this stream before row {start}; begin a new stream")
        return state

    def drop(self, stream: int) -> None:
        self._states.pop(stream, None)


class CausalEncoder(nn.Module):
    """Log-mel frames `[frames, mels]` of one item, or of a chunk of a stream -> `[frames // 2, width]`, normed."""

    __call__: Callable[..., Tensor]

    def __init__(self, spec: CausalEncoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.dtype, self.device = spec, dtype, device
        width = spec.stack.hidden_size
        self.embedder = nn.ModuleDict(
            {
                "conv1": Linear(3 * spec.mels, {"conv1": width}, True, dtype, device),
                "conv2": Linear(3 * width, {"conv2": width}, True, dtype, device),
            }
        )
        self.layers = nn.ModuleList(DecoderLayer(layer, spec.stack, dtype, device) for layer in spec.stack.layers)
        self.norm = Norm(width, spec.stack.eps, False, dtype, device)
        self.rotary = Rotary(spec.stack.ropes[0], device)

    def new_state(self) -> StreamState:
        return StreamState(self.spec, self.dtype, self.device)

    def forward(self, features: Tensor, state: StreamState | None = None, start: int = 0) -> Tensor:
        """Encode an item or, with the `state` of a stream after `start` rows, its next frames, of at most `MAX_CHUNK` rows."""
        x, end = features.to(self.dtype), start + len(features) // 2
        first, second = (None, None) if state is None else state.tails[start]
        x, first = causal_windows(x, first, 2, 1)
        x, second = causal_windows(activation("gelu", self.embedder["conv1"](x)), second, 1, 2)
        x = activation("gelu", self.embedder["conv2"](x))
        blocks, attention = -(-end // _BLOCK), self.spec.attention
        if state is None:
            shape = (2, blocks, _BLOCK, attention.kv_heads, attention.head_dim)
            caches = [torch.zeros(shape, dtype=self.dtype, device=self.device)] * len(self.layers)  # each layer overwrites it
        else:
            caches, state.tails = state.caches, {start: state.tails[start], end: (first, second)}
        table, rows = (
            torch.arange(blocks, device=self.device) % caches[0].shape[1],
            torch.arange(start, end, device=self.device),
        )
        attn = AttentionMetadata(
            (0, end - start),
            (end,),
            table.int()[None],
            table[rows // _BLOCK] * _BLOCK + rows % _BLOCK,
            _BLOCK,
            batch_invariant=True,
            window=attention.window,
        )
        cos_sin, add = self.rotary(rows[None]), None
        for layer, cache in zip(self.layers, caches, strict=True):
            add = layer(x, add, cos_sin, cache, attn, None)
        return self.norm(x, add)


def causal_windows(x: Tensor, before: Tensor | None, left: int, stride: int) -> tuple[Tensor, Tensor]:
    """Return the inputs of a convolution of three taps, `[n // stride, 3 * c]` of `x [n, c]`, and its last `left` inputs.

    `before`: the last inputs of the chunk before; None: zeros.
    """
    padded = torch.cat((x.new_zeros(left, x.shape[1]) if before is None else before, x))
    return padded.unfold(0, 3, stride).flatten(1), padded[-left:].clone()  # [rows, c, 3], as the weights are stored


def with_zero_biases(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Add zero biases for the key, gate and up projections, which are merged with projections that have biases."""
    for name, tensor in weights:
        yield name, tensor
        projection = _WITHOUT_BIAS.fullmatch(name)
        if projection is not None:
            yield f"{projection[1]}.bias", tensor.new_zeros(len(tensor))


def stream_state_bytes(spec: CausalEncoderSpec, dtype: torch.dtype) -> int:
    """Return the bytes of a StreamState, with the last inputs before and after its last chunk."""
    tails = 2 * (2 * spec.mels + spec.stack.hidden_size)
    return (len(spec.stack.layers) * prod(_ring_shape(spec)) + tails) * dtype.itemsize


def causal_encoder_bytes(c: CausalEncoderSpec, rows: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in CausalEncoder for `rows` rows of one item, without its features."""
    limits = replace(limits, rows=rows, keys=rows, longest=rows)
    ops, s, attention = OpBytes(dtype, limits), dtype.itemsize, c.attention
    width, mels = c.stack.hidden_size, c.mels
    first = 2 * rows * (4 * mels * s + max(ops.linear(3 * mels, width, 2 * rows), 2 * width * s))
    second = rows * (7 * width * s + ops.linear(3 * width, width, rows))
    cache = 2 * (rows + _BLOCK) * attention.kv_heads * attention.head_dim * s
    layers = cache + decoder_bytes(c.stack, limits, dtype, encoders=False) + gathered_bytes(c.stack, limits, dtype)
    return SMALL + max(first, second, layers)
