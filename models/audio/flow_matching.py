"""A diffusion transformer that turns codes of speech into a log-mel spectrogram by flow matching (arXiv 2210.02747).

The flow from noise to the spectrogram is integrated with the 3/8 rule, with classifier-free guidance. Frames attend within
blocks, in some layers also to the block before or after. One evaluation of the flow therefore depends on few blocks, and the
whole integration on `FlowSpec.ahead` blocks after a block: a spectrogram is computed part by part while codes are made. Each
evaluation keeps what its next part needs and computes every block once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...callers.errors import ConfigError
from ...checkpoints.config import positive_int, require
from ...kernels.activation import activation
from ..layers.basic import EmbeddingTable, TensorModule
from ..layers.builder import Builder
from ..layers.convolution import Past
from ..text.attention_config import fixed_rope
from ..text.rope import scaled_frequencies
from ..text.spec import RopeSpec
from .ecapa import EcapaEncoder, EcapaSpec, ecapa_spec

STEPS = 10  # points in time
GUIDANCE = 0.5
_TIME_WIDTH = 256
_EPS = 1e-6
_POINTS: Sequence[tuple[float, Callable[..., Tensor]]] = (
    (0.0, lambda x, step: x),
    (1 / 3, lambda x, step, first: x + step * first / 3),
    (2 / 3, lambda x, step, first, second: x + step * (second - first / 3)),
    (1.0, lambda x, step, first, second, third: x + step * (first - second + third)),
)
"""Where the 3/8 rule evaluates the velocity: part of the step, and the state there from the velocities before."""
_EVALUATIONS = (STEPS - 1) * len(_POINTS)


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
    rope: RopeSpec
    max_frames: int
    reference: EcapaSpec

    @property
    def ahead(self) -> int:
        """Blocks after a block that it depends on."""
        return _EVALUATIONS * len(self.after)

    @property
    def conditions(self) -> int:
        """Numbers of a frame's conditions: the encoded reference, the embedded code and the speaker's vector."""
        return self.reference.out + self.code_width + self.speaker_width

    def peak_bytes(self, frames: int) -> int:
        """Return the bytes alive for so many frames: the stream, modulated rows, and attention or MLP, each guided and not."""
        heads = self.heads * self.head_dim
        row = 4 * self.width + max(2 * self.inner, 14 * heads) + 2 * (self.mels + self.conditions)
        return (2 * row + 8 * self.mels) * (frames + self.block) * 4

    @property
    def kept_bytes(self) -> int:
        """Bytes that live as long as an answer is heard: its noise, and of each evaluation its modulations and last blocks."""
        heads, sides = self.heads * self.head_dim, len(self.before) + len(self.after)
        waiting = 2 * heads + 2 * self.width + 5 * self.mels + self.conditions  # rows without the block after them
        rows = 4 * heads * sides + waiting * len(self.after)
        numbers = rows * self.block + (6 * self.layers + 2) * self.width
        return (_EVALUATIONS * numbers + self.mels * self.max_frames) * 4


def flow_spec(config: Mapping[str, Any]) -> FlowSpec:
    """Read `dit_config`. Raise ConfigError for a rope type that reads the length, and for sizes that do not fit together."""
    width, head_dim = positive_int(config, "hidden_size"), positive_int(config, "head_dim")
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} of dit_config in config.json must be even")
    block, repeats = positive_int(config, "block_size"), positive_int(config, "repeats")
    if block % repeats:
        raise ConfigError(f"block_size {block} of dit_config in config.json must be a multiple of repeats, which is {repeats}")
    return FlowSpec(
        width,
        positive_int(config, "num_hidden_layers"),
        positive_int(config, "num_attention_heads"),
        head_dim,
        int(width * positive_int(config, "ff_mult")),
        positive_int(config, "mel_dim"),
        repeats,
        positive_int(config, "num_embeds"),
        positive_int(config, "emb_dim"),
        positive_int(config, "enc_emb_dim"),
        block,
        frozenset(require(config, "look_backward_layers")),
        frozenset(require(config, "look_ahead_layers")),
        fixed_rope(config, "dit_config", head_dim),
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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: Past, last: bool) -> Tensor:
        """Attend over the next frames of two spectrograms, `x [2, frames, width]`: whole blocks, unless they are the last.

        Frames that attend to a block after these wait in `past`. Returns the frames that do not, `[2, n, width]`.
        """
        qkv = self.qkv(x.flatten(0, 1)).view(*x.shape[:2], 3, self.heads, self.dim)
        even, odd = qkv[:, :, :2, 0, 0::2].clone(), qkv[:, :, :2, 0, 1::2].clone()
        qkv[:, :, :2, 0, 0::2] = even * cos - odd * sin
        qkv[:, :, :2, 0, 1::2] = odd * cos + even * sin
        before, after = (side * self.block for side in self.sides)
        q, kv = past.append((self, "q"), qkv[:, :, 0], 1, after), past.append((self, "kv"), qkv[:, :, 1:], 1, before + after)
        frames = q.shape[1] - (0 if last else after)
        if not frames:
            return x[:, :0]
        blocks, size = -(-frames // self.block), before + self.block + after
        absent = before - (kv.shape[1] - q.shape[1])  # the first block has none before it
        end = absent + kv.shape[1]
        q = F.pad(q[:, :frames], (0, 0, 0, 0, 0, blocks * self.block - frames))
        kv = F.pad(kv, (0, 0, 0, 0, 0, 0, absent, before + blocks * self.block + after - end))
        # [2, blocks, heads, dim, size]
        k, v = (kv[:, :, i].unfold(1, size, self.block).flatten(0, 1).transpose(2, 3) for i in (0, 1))
        positions = torch.arange(kv.shape[1], device=x.device)
        valid = ((positions >= absent) & (positions < end)).unfold(0, size, self.block).repeat(2, 1)[:, None, None]
        q = q.reshape(2 * blocks, self.block, self.heads, -1).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, valid).transpose(1, 2)
        rows = attended.reshape(2, blocks * self.block, -1)[:, :frames]
        return self.out(rows.flatten(0, 1)).view(2, frames, -1)


class _FlowLayer:
    """Attention and MLP, whose inputs and outputs are scaled and shifted by functions of the time."""

    def __init__(self, spec: FlowSpec, layer: int, build: Builder) -> None:
        self.modulation = build.linear(["attn_norm.linear"], spec.width, [6 * spec.width], True)
        self.attention = _Attention(spec, layer, build.scope("attn"))
        self.up = build.linear(["ff.ff.0"], spec.width, [spec.inner], True)
        self.down = build.linear(["ff.ff.3"], spec.inner, [spec.width], True)
        self.after = spec.block * (layer in spec.after)

    def __call__(self, x: Tensor, modulation: Sequence[Tensor], cos: Tensor, sin: Tensor, past: Past, last: bool) -> Tensor:
        """Return the frames `[2, n, width]` that are complete after the next ones, `x`; see `_Attention.forward`."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation
        attended = self.attention(_normed(x) * (1 + scale) + shift, cos, sin, past, last)
        x = past.append(self, x, 1, self.after)[:, : attended.shape[1]] + gate * attended
        rows = self.up((_normed(x) * (1 + mlp_scale) + mlp_shift).flatten(0, 1))
        return x + mlp_gate * self.down(activation("gelu_pytorch_tanh", rows)).view_as(x)


def _normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=_EPS)


@dataclass(frozen=True, eq=False)
class _Modulation:
    """The modulations of one time step: six vectors `[1, width]` for each block, and the scale and shift of the output."""

    blocks: Sequence[Sequence[Tensor]]
    last: Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Guide:
    """The inputs and modulations that are the same for all frames of an answer.

    Args:
        heard: the encoded reference, `[1, n]`. speaker: the speaker's vector, `[1, speaker_width]`.
        free: a frame without conditions, `[1, n]`.
        steps: size of each step of the integration, and the modulations of its evaluations.
    """

    heard: Tensor
    speaker: Tensor
    free: Tensor
    steps: Sequence[tuple[Tensor, Sequence[_Modulation]]]


class FlowDecoder(nn.Module):
    """Codes of speech `[n]` -> log-mel frames `[n * repeats, mels]`, float32."""

    def __init__(self, spec: FlowSpec, device: torch.device) -> None:
        super().__init__()
        self.spec, build = spec, Builder(self, torch.float32, device)
        self.frequencies, self.rotation_scale = scaled_frequencies(spec.rope)
        self.time_in = build.linear(["time_embed.time_mlp.0"], _TIME_WIDTH, [spec.width], True)
        self.time_out = build.linear(["time_embed.time_mlp.2"], spec.width, [spec.width], True)
        conditions = spec.mels + spec.reference.out + spec.code_width + spec.speaker_width
        self.inputs = build.linear(["input_embed.proj"], conditions, [spec.width], True)
        encoder = EcapaEncoder(spec.reference, device)
        self.get_submodule("input_embed").add_module("spk_encoder", encoder)
        table = EmbeddingTable(spec.codes + 1, spec.code_width, torch.float32, device)
        self.text_embed = nn.Module()
        self.text_embed.add_module("codec_embed", table)
        self.encode_reference, self.embed_codes = [encoder], [table]
        self.blocks = [_FlowLayer(spec, i, build.scope(f"transformer_blocks.{i}")) for i in range(spec.layers)]
        self.last_modulation = build.linear(["norm_out.linear"], spec.width, [2 * spec.width], True)
        self.outputs = build.linear(["proj_out"], spec.width, [spec.mels], True)

    def parts(
        self, codes: Iterable[tuple[Sequence[int], bool]], speaker: Tensor, reference: Tensor, noise: Tensor
    ) -> Iterator[tuple[Tensor, bool]]:
        """Integrate the flow from `noise [frames or more, mels]`, which is the state at time 0.

        Yields frames `[n, mels]` in their order as soon as they are complete, and whether they are the last ones. Together they
        do not depend on how the codes are divided.

        Args:
            codes: parts of the codes, and whether a part is the last one. The others stand for whole blocks of frames.
            speaker, reference: see `guide`.
        """
        yield from self.guided_parts(codes, self.guide(speaker, reference), noise)

    def guide(self, speaker: Tensor, reference: Tensor) -> Guide:
        """Compute what all frames of an answer share, and so all of its windows.

        Args:
            speaker: the speaker's vector, `[1, speaker_width]`.
            reference: log-mel frames of the speaker, `[1, frames, mels]`.
        """
        (encode,), (embed,) = self.encode_reference, self.embed_codes
        heard, unheard = encode(reference), encode(torch.zeros_like(reference))
        free = torch.cat((unheard, embed(torch.zeros(1, dtype=torch.long, device=speaker.device)), speaker * 0), 1)
        times = torch.linspace(0, 1, STEPS)
        times = times - ((pi / 2 * times).cos() - 1 + times)  # denser towards the noise
        sizes = [(start, end - start) for start, end in pairwise(times)]
        steps = [(size, [self._modulate(start + size * part, free.device) for part, _ in _POINTS]) for start, size in sizes]
        return Guide(heard, speaker, free, steps)

    def guided_parts(
        self, codes: Iterable[tuple[Sequence[int], bool]], guide: Guide, noise: Tensor
    ) -> Iterator[tuple[Tensor, bool]]:
        """Yield frames as `parts` does."""
        (embed,), device = self.embed_codes, guide.speaker.device
        steps = [_FlowStep(self, size, modulations, guide.free) for size, modulations in guide.steps]
        start = 0
        for part, last in codes:
            ids = torch.tensor(part, device=device).repeat_interleave(self.spec.repeats)
            x = noise[start : start + len(ids)].to(device)
            conditions = torch.cat((guide.heard.expand(len(ids), -1), embed(ids), guide.speaker.expand(len(ids), -1)), 1)
            for step in steps:
                x, conditions = step(x, conditions, last)
            start += len(ids)
            if len(x):
                yield x, last

    def rotation(self, start: int, end: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the frames' places, `[frames, 1, head_dim / 2]`."""
        positions = torch.arange(start, end, device=device, dtype=torch.float32)[:, None, None]
        angles = positions * self.frequencies.to(device)
        return angles.cos().mul_(self.rotation_scale), angles.sin().mul_(self.rotation_scale)

    def _modulate(self, time: Tensor, device: torch.device) -> _Modulation:
        """Return the modulations of a time."""
        half = _TIME_WIDTH // 2
        rates = torch.exp(torch.arange(half).float() * -(log(10000) / (half - 1)))
        angles = (1000 * time * rates).to(device)
        embedded = F.silu(self.time_out(F.silu(self.time_in(torch.cat((angles.sin(), angles.cos()))[None]))))
        blocks = [block.modulation(embedded).chunk(6, 1) for block in self.blocks]
        return _Modulation(blocks, self.last_modulation(embedded).chunk(2, 1))


class _Velocity:
    """The velocity of the flow at one time, for frames that come part by part. `free`: a frame without conditions, `[1, n]`."""

    def __init__(self, decoder: FlowDecoder, modulation: _Modulation, free: Tensor) -> None:
        self.decoder, self.modulation, self.free, self.past, self.end = decoder, modulation, free, Past(), 0
        self.waiting = list[Tensor]()

    def __call__(self, x: Tensor, conditions: Tensor, last: bool, others: Sequence[Tensor]) -> list[Tensor]:
        """Return the velocity of the frames that are complete after the next ones, and the rows of `others` for these.

        Args:
            x, conditions: `[frames, mels]` and `[frames, n]`. others: further rows of these frames.
        """
        velocity = self._predict(x, conditions, last) if len(x) else x
        if self.waiting:
            others = [torch.cat(pair) for pair in zip(self.waiting, others, strict=True)]
        count = len(velocity)
        self.waiting = [rows[count:].clone() for rows in others]
        return [velocity, *(rows[:count] for rows in others)]

    def _predict(self, x: Tensor, conditions: Tensor, last: bool) -> Tensor:
        decoder = self.decoder
        rows = torch.cat((conditions, self.free.expand(len(x), -1)))
        rows = decoder.inputs(torch.cat((x.repeat(2, 1), rows), 1)).view(2, len(x), -1)
        self.end += len(x)
        end = self.end  # of the frames in `rows`
        rotation = decoder.rotation(end - len(x), end, x.device)
        for layer, modulation in zip(decoder.blocks, self.modulation.blocks, strict=True):
            rows = layer(rows, modulation, *rotation, self.past, last)
            if layer.after:
                end -= 0 if last else layer.after
                if not rows.shape[1]:
                    return x[:0]
                rotation = decoder.rotation(end - rows.shape[1], end, x.device)
        scale, shift = self.modulation.last
        guided, free = decoder.outputs((_normed(rows) * (1 + scale) + shift).flatten(0, 1)).chunk(2)
        return guided + (guided - free) * GUIDANCE


class _FlowStep:
    """A step of the integration, for frames that come part by part."""

    def __init__(self, decoder: FlowDecoder, size: Tensor, modulations: Sequence[_Modulation], free: Tensor) -> None:
        self.size, self.velocities = size, [_Velocity(decoder, modulation, free) for modulation in modulations]

    def __call__(self, x: Tensor, conditions: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        """Return the state after the step and the conditions of the frames that are complete after the next ones."""
        slopes = list[Tensor]()
        for velocity, (_, point) in zip(self.velocities, _POINTS, strict=True):
            rows = velocity(point(x, self.size, *slopes), conditions, last, [x, conditions, *slopes])
            slope, x, conditions, *slopes = rows
            slopes.append(slope)
        first, second, third, fourth = slopes
        return x + (first + 3 * (second + third) + fourth) * self.size / 8, conditions
