"""A diffusion transformer that turns codes of speech into a log-mel spectrogram by flow matching (arXiv 2210.02747).

The flow from noise to the spectrogram is integrated with the 3/8 rule, with classifier-free guidance. Frames attend within
blocks, in some layers also to the block before or after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels.activation import activation
from ...mm.errors import ConfigError
from ..config import positive_int, require
from ..layers.basic import Embedding, TensorModule
from ..layers.builder import Builder
from .ecapa import EcapaEncoder, EcapaSpec, ecapa_spec

STEPS = 10  # points in time
GUIDANCE = 0.5
_TIME_WIDTH = 256
_EPS = 1e-6


@dataclass(frozen=True)
class FlowSpec:
    """Sizes of the transformer.

    Args:
        repeats: frames per code. codes: number of codes; the table has one row more.
        code_width, speaker_width: numbers of an embedded code and of a speaker's vector.
        before, after: layers that attend to the block before, and after.
        max_frames: maximum number of frames.
    """

    width: int
    layers: int
    heads: int
    head_dim: int
    inner: int
    mels: int
    repeats: int
    codes: int
    code_width: int
    speaker_width: int
    block: int
    before: frozenset[int]
    after: frozenset[int]
    theta: float
    max_frames: int
    reference: EcapaSpec

    def peak_bytes(self, frames: int) -> int:
        """Return the bytes alive for so many frames: the stream, modulated rows, and attention or MLP, each guided and not."""
        heads = self.heads * self.head_dim
        conditions = self.mels + self.reference.out + self.code_width + self.speaker_width
        row = 4 * self.width + max(2 * self.inner, 14 * heads) + 2 * conditions
        return (2 * row + 8 * self.mels) * (frames + self.block) * 4


def flow_spec(config: Mapping[str, Any]) -> FlowSpec:
    """Read `dit_config`. Raise ConfigError for a rope type other than default."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(f"rope type {rope['rope_type']!r} of dit_config in config.json is not supported; known is default")
    width, head_dim = positive_int(config, "hidden_size"), positive_int(config, "head_dim")
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} of dit_config in config.json must be even")
    return FlowSpec(
        width,
        positive_int(config, "num_hidden_layers"),
        positive_int(config, "num_attention_heads"),
        head_dim,
        int(width * positive_int(config, "ff_mult")),
        positive_int(config, "mel_dim"),
        positive_int(config, "repeats"),
        positive_int(config, "num_embeds"),
        positive_int(config, "emb_dim"),
        positive_int(config, "enc_emb_dim"),
        positive_int(config, "block_size"),
        frozenset(require(config, "look_backward_layers")),
        frozenset(require(config, "look_ahead_layers")),
        float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        positive_int(config, "max_position_embeddings"),
        ecapa_spec(config),
    )


class _Attention(TensorModule):
    """Attention within blocks of frames, and to neighbouring blocks. Only the first head is rotated."""

    def __init__(self, spec: FlowSpec, layer: int, build: Builder) -> None:
        super().__init__()
        self.heads, self.dim, self.block = spec.heads, spec.head_dim, spec.block
        self.sides = (int(layer in spec.before), int(layer in spec.after))
        inner = spec.heads * spec.head_dim
        self.qkv = build.linear(["to_q", "to_k", "to_v"], spec.width, [inner] * 3, True)
        self.out = build.linear(["to_out.0"], inner, [spec.width], True)

    def forward(self, x: Tensor, frames: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend over `x [2 * frames, width]`, two spectrograms."""
        qkv = self.qkv(x).view(2, frames, 3, self.heads, self.dim)
        even, odd = qkv[:, :, :2, 0, 0::2].clone(), qkv[:, :, :2, 0, 1::2].clone()
        qkv[:, :, :2, 0, 0::2] = even * cos - odd * sin
        qkv[:, :, :2, 0, 1::2] = odd * cos + even * sin
        blocks, (before, after) = -(-frames // self.block), self.sides
        padded = F.pad(qkv, (0, 0, 0, 0, 0, 0, before * self.block, (blocks + after) * self.block - frames))
        size = (1 + before + after) * self.block
        q = padded[:, before * self.block : (before + blocks) * self.block, 0].reshape(2 * blocks, self.block, self.heads, -1)
        # [2, blocks, heads, dim, size]
        k, v = (padded[:, :, i].unfold(1, size, self.block).flatten(0, 1).transpose(2, 3) for i in (1, 2))
        place = torch.arange(-before * self.block, (blocks + after) * self.block, device=x.device)
        valid = ((place >= 0) & (place < frames)).unfold(0, size, self.block).repeat(2, 1)[:, None, None]
        attended = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, valid)
        return self.out(attended.transpose(1, 2).reshape(2, blocks * self.block, -1)[:, :frames].flatten(0, 1))


class _Layer:
    """Attention and MLP, whose inputs and outputs are scaled and shifted by functions of the time."""

    def __init__(self, spec: FlowSpec, layer: int, build: Builder) -> None:
        self.modulation = build.linear(["attn_norm.linear"], spec.width, [6 * spec.width], True)
        self.attention = _Attention(spec, layer, build.scope("attn"))
        self.up = build.linear(["ff.ff.0"], spec.width, [spec.inner], True)
        self.down = build.linear(["ff.ff.3"], spec.inner, [spec.width], True)

    def __call__(self, x: Tensor, time: Tensor, frames: int, cos: Tensor, sin: Tensor) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(time).chunk(6, 1)
        x = x + gate * self.attention(_normed(x) * (1 + scale) + shift, frames, cos, sin)
        return x + mlp_gate * self.down(activation("gelu_pytorch_tanh", self.up(_normed(x) * (1 + mlp_scale) + mlp_shift)))


def _normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[1:], eps=_EPS)


class FlowDecoder(nn.Module):
    """Codes of speech `[n]` -> log-mel frames `[n * repeats, mels]`, float32."""

    def __init__(self, spec: FlowSpec, device: torch.device) -> None:
        super().__init__()
        self.spec, build = spec, Builder(self, torch.float32, device)
        self.time_in = build.linear(["time_embed.time_mlp.0"], _TIME_WIDTH, [spec.width], True)
        self.time_out = build.linear(["time_embed.time_mlp.2"], spec.width, [spec.width], True)
        conditions = spec.mels + spec.reference.out + spec.code_width + spec.speaker_width
        self.inputs = build.linear(["input_embed.proj"], conditions, [spec.width], True)
        encoder = EcapaEncoder(spec.reference, device)
        self.get_submodule("input_embed").add_module("spk_encoder", encoder)
        table = Embedding(spec.codes + 1, spec.code_width, torch.float32, device)
        self.text_embed = nn.Module()
        self.text_embed.add_module("codec_embed", table)
        self.encode_reference, self.embed_codes = [encoder], [table]
        self.blocks = [_Layer(spec, i, build.scope(f"transformer_blocks.{i}")) for i in range(spec.layers)]
        self.last_modulation = build.linear(["norm_out.linear"], spec.width, [2 * spec.width], True)
        self.outputs = build.linear(["proj_out"], spec.width, [spec.mels], True)

    def sample(self, codes: Sequence[int], speaker: Tensor, reference: Tensor, noise: Tensor) -> Tensor:
        """Integrate the flow from `noise [frames, mels]`, which is the state at time 0.

        Args:
            speaker: the speaker's vector, `[1, speaker_width]`.
            reference: log-mel frames of the speaker, `[1, frames, mels]`.
        """
        conditions = self._conditions(codes, speaker, reference)
        place = torch.arange(len(noise), device=noise.device, dtype=torch.float32)[:, None, None]
        powers = torch.arange(0, self.spec.head_dim, 2, device=noise.device).float() / self.spec.head_dim
        angles = place / self.spec.theta**powers
        rotation = angles.cos(), angles.sin()
        times = torch.linspace(0, 1, STEPS)
        times = times - ((pi / 2 * times).cos() - 1 + times)  # denser towards the noise

        def velocity(time: Tensor, x: Tensor) -> Tensor:
            guided, free = self._predict(time, x, conditions, *rotation).chunk(2)
            return guided + (guided - free) * GUIDANCE

        x = noise
        for start, end in pairwise(times):
            step = end - start
            first = velocity(start, x)
            second = velocity(start + step / 3, x + step * first / 3)
            third = velocity(start + step * (2 / 3), x + step * (second - first / 3))
            fourth = velocity(end, x + step * (first - second + third))
            x = x + (first + 3 * (second + third) + fourth) * step / 8
        return x

    def _conditions(self, codes: Sequence[int], speaker: Tensor, reference: Tensor) -> Tensor:
        """Return `[2 * frames, reference, code and speaker widths]`: with all conditions, then without any."""
        (encode,), (embed,) = self.encode_reference, self.embed_codes
        ids = torch.tensor(codes, device=speaker.device).repeat_interleave(self.spec.repeats)
        guided = encode(reference).expand(len(ids), -1), embed(ids), speaker.expand(len(ids), -1)
        free = encode(torch.zeros_like(reference)).expand(len(ids), -1), embed(ids.new_zeros(1)).expand(len(ids), -1)
        return torch.cat((torch.cat(guided, 1), torch.cat((*free, torch.zeros_like(guided[2])), 1)))

    def _predict(self, time: Tensor, x: Tensor, conditions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = _TIME_WIDTH // 2
        rates = torch.exp(torch.arange(half).float() * -(log(10000) / (half - 1)))
        angles = (1000 * time * rates).to(x.device)
        embedded = self.time_out(F.silu(self.time_in(torch.cat((angles.sin(), angles.cos()))[None])))
        embedded = F.silu(embedded)
        rows = self.inputs(torch.cat((x.repeat(2, 1), conditions), 1))
        for layer in self.blocks:
            rows = layer(rows, embedded, len(x), cos, sin)
        scale, shift = self.last_modulation(embedded).chunk(2, 1)
        return self.outputs(_normed(rows) * (1 + scale) + shift)
