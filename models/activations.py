"""Bytes of weights, and of what a forward pass holds beside them, in closed form: upper bounds, each factor with its tensor.

`s` is the size of a number of the model's dtype. What torch frees before the peak is not counted, what a frame still names is.
"""

from __future__ import annotations

import torch

from ..kernels.dispatch import backend
from ..kernels.panels import WIDTH
from .audio.aut import AT_ONCE, AutSpec
from .audio.whisper_encoder import EncoderConfig
from .interface import Work
from .layers.connectors import ProjectorSpec
from .text.encoder_decoder import CrossDecoderSpec
from .text.spec import AttentionSpec, DecoderSpec, LatentSpec, MlpSpec, MoeSpec
from .vision.spec import TowerSpec

_WIDE = 4  # of a float32


def _as_float(s: int) -> int:
    """Of the float32 copy of a number; a float32 is not copied."""
    return 0 if s == _WIDE else _WIDE


def _rms_norm(width: int, s: int) -> int:
    """Its float32 copy, then the square of it or the scaled copy, then the result."""
    return width * (_as_float(s) + _WIDE + s)


def _linear(inner: int, outer: int, dtype: torch.dtype, work: Work) -> int:
    """Result, and in 8 bits: in C++ the row's bytes and scale, in torch its scaled copy, or its bytes with sums twice."""
    s = dtype.itemsize
    if not work.int8:
        return outer * s
    if backend("int8_linear", work.device, dtype) == "native":
        return outer * s + inner + 8
    return 64 + max(inner * (_as_float(s) + _WIDE + 1), inner + outer * 2 * _WIDE)  # scales and maxima


def _rotary(width: int, s: int) -> int:
    """Float32 copy, one product of half of it, result."""
    return width * (_as_float(s) + _WIDE // 2 + s)


def linear_weight_bytes(inner: int, outer: int, bias: bool, dtype: torch.dtype, device: torch.device, int8: bool) -> int:
    """Of one packed layer. In C++ panels are filled up, with a float32 bias, in 8 bits a shift and a scale too."""
    original = outer * bias * dtype.itemsize
    padded: int = -(-outer // WIDTH) * WIDTH
    if int8 and backend("int8_linear", device, dtype) == "native":
        return padded * (-(-inner // 4) * 4 + 3 * _WIDE) + original
    if int8:
        return outer * (inner + _WIDE) + original
    if backend("linear", device, dtype) == "native" and inner % 2 == 0:
        return padded * (inner * dtype.itemsize + _WIDE) + original
    return outer * inner * dtype.itemsize + original


def decoder_bytes(c: DecoderSpec, work: Work, dtype: torch.dtype) -> int:
    """Of `models.text.decoder.Decoder`, the keys that are gathered not included."""
    s, width = dtype.itemsize, c.hidden_size
    step = 8 + 16 * c.rope_axes + 8 + 32  # ids, positions twice, slots, bounds of sequences
    step += (2 + c.deepstack) * width * s  # x, encoder rows that are put in
    step += 3 * max((rope.dim for rope in c.ropes), default=0) * _WIDE * len(c.ropes)  # cosines, sines, angles before them
    parts = {_part_bytes(width, part, work, dtype) for layer in c.layers for part in (layer.attention, layer.mlp)}
    added = width * s  # x and the sum that takes its place
    return work.rows * (step + added + max(_rms_norm(width, s), width * s + max(parts)))  # parts beside the normed rows


def _part_bytes(width: int, part: AttentionSpec | LatentSpec | MlpSpec | MoeSpec, work: Work, dtype: torch.dtype) -> int:
    """Of a row, beside its normed input."""
    if isinstance(part, AttentionSpec):
        return _attention_bytes(width, part, work, dtype)
    if isinstance(part, LatentSpec):
        return _latent_bytes(width, part, work, dtype)
    if isinstance(part, MlpSpec):
        return _mlp_bytes(width, part.inner, work, dtype)
    return _mixture_bytes(width, part, work, dtype)


def _attention_bytes(width: int, a: AttentionSpec, work: Work, dtype: torch.dtype) -> int:
    s, q, kv = dtype.itemsize, a.heads * a.head_dim, a.kv_heads * a.head_dim
    qkv = (q + 2 * kv) * s
    return max(
        _linear(width, q + 2 * kv, dtype, work),
        qkv + _rotary(q + kv, s),
        qkv + _rms_norm(q, s) if a.qk_norm else 0,
        qkv + (q + kv) * s + 3 * q * s,  # rotated, and q and the result in the layout of torch's kernels
        qkv + (q + kv) * s + q * s + _linear(q, width, dtype, work),
    )


def _latent_bytes(width: int, a: LatentSpec, work: Work, dtype: torch.dtype) -> int:
    s, cached = dtype.itemsize, a.latent + a.rope.dim
    q, absorbed = a.heads * (a.nope_dim + a.rope.dim), a.heads * cached
    made = (cached + q) * s  # what is cached, queries
    return max(
        2 * (a.query_latent or 0) * s + _linear(a.query_latent or width, q, dtype, work),
        made + _rotary(a.heads * a.rope.dim, s),
        made + 3 * absorbed * s + a.heads * a.latent * s,  # queries in the cache's space, laid out, what they attend to
        made + a.heads * (a.latent + 2 * a.value_dim) * s + _linear(a.heads * a.value_dim, width, dtype, work),
    )


def _mlp_bytes(width: int, inner: int, work: Work, dtype: torch.dtype) -> int:
    s = dtype.itemsize
    return max(
        _linear(width, 2 * inner, dtype, work),
        4 * inner * s,  # gate and up, what the activation makes of gate, product
        3 * inner * s + _linear(inner, width, dtype, work),
    )


def _mixture_bytes(width: int, m: MoeSpec, work: Work, dtype: torch.dtype) -> int:
    """At the worst, all rows have one expert in common."""
    s = dtype.itemsize
    choice = 5 * m.experts * _WIDE + 4 * 8 * m.top_k  # scores, offered ones, those of groups; experts, their order
    made = m.top_k * width * s  # of every expert of the row
    one = width * s + _mlp_bytes(width, max(m.inner), work, dtype)
    total = 3 * width * _WIDE + width * s  # the sum and what is added to it
    shared = width * s + _mlp_bytes(width, m.shared_inner, work, dtype)
    return max(width * _as_float(s) + choice, choice + made + max(one, total), shared)


def gathered_bytes(c: DecoderSpec, work: Work, dtype: torch.dtype) -> int:
    """Keys and values that torch's attention copies out of the cache for one layer, and its masks; none in C++."""
    if backend("attention", work.device, dtype) == "native":
        return 0
    s = dtype.itemsize
    each = [2 * a.kv_heads * a.head_dim if isinstance(a, AttentionSpec) else a.latent + a.rope.dim for a in c.attentions]
    copies = 2 * work.keys * max(each) * s  # padded to at most twice as many
    return copies + work.rows * work.longest * (1 + s)  # a mask, and its form in the model's dtype


def tower_bytes(c: TowerSpec, patches: int, out: ProjectorSpec, dtype: torch.dtype, work: Work) -> int:
    """Of `models.vision.vit.Tower` and a projector behind it for so many patches in one call."""
    s, w = dtype.itemsize, c.width
    call = 2 * c.patch_dim * s  # pixels of the items, and all in one tensor
    call += w * s + 3 * c.head_dim * _WIDE + 6 * 8  # x, angles, places of each patch
    embed = _linear(c.patch_dim, w, dtype, work)
    norm = _rms_norm(w, s) if c.rms else w * s
    qkv = w * s + 3 * w * s  # the normed input is still there
    attention = max(
        w * s + _linear(w, 3 * w, dtype, work),
        qkv + _rotary(2 * w, s),
        qkv + 2 * w * s + 2 * w * s + _laid_out(w, dtype, work.device),  # rotated, results of a run and of all
        qkv + 3 * w * s + _linear(w, w, dtype, work),
    )
    gate = c.inner * s if c.gated else 0
    mlp = w * s + max(
        gate + 2 * c.inner * s + c.inner * s * c.gated,
        gate + 2 * c.inner * s + _linear(c.inner, w, dtype, work),
        _linear(w, (1 + c.gated) * c.inner, dtype, work),
    )
    merger = w * s + max(2 * w * s, w * s + _linear(w, w, dtype, work))  # normed groups, gelu
    rows = 3 * out.out * s // out.group  # in the order of the tower, of the items, and cut to items
    return patches * (call + w * s + max(embed, norm, attention, mlp, merger) + rows)


def whisper_bytes(c: EncoderConfig, frames: int, out_width: int, dtype: torch.dtype, work: Work) -> int:
    """Of `models.audio.whisper_encoder.Encoder` and a projection to `out_width` for so many frames in one call."""
    s, w = dtype.itemsize, c.width
    call = 2 * c.mels * s  # of each frame: the items, and all in one tensor
    first = 2 * 3 * c.mels * s + w * s + _linear(3 * c.mels, w, dtype, work)  # taps twice, gelu, result
    second = w * s + 2 * 3 * w * s // 2 + (w * s + _linear(3 * w, w, dtype, work)) // 2  # half as many rows
    normed, laid_out = w * s, _laid_out(w, dtype, work.device)
    attention = normed + 3 * w * s + 3 * w * s + max(laid_out, _linear(w, 2 * w, dtype, work))  # q, k and v; results and copies
    mlp = normed + max(3 * c.inner * s, 2 * c.inner * s + _linear(c.inner, w, dtype, work))
    layer = 2 * w * s + max(attention, mlp) + 2 * out_width * s
    return frames * (call + max(first, second, layer // 2))


def aut_bytes(c: AutSpec, frames: int, dtype: torch.dtype, work: Work) -> int:
    """Of `models.audio.aut.Encoder` for so many frames in one call."""
    s, layer, w = dtype.itemsize, c.layer, c.layer.width
    call = 3 * layer.mels * s  # of each frame: the items, all in one tensor, an item in chunks
    taps = c.channels * layer.mels // 4 * s  # numbers of a frame after the first convolution
    step = min(frames, AT_ONCE * c.chunk) * (2 * taps + max(9 * layer.mels * s, 9 * taps // 4) + 3 * taps)
    normed, laid_out = w * s, _laid_out(w, dtype, work.device)
    attention = normed + 3 * w * s + 3 * w * s + max(laid_out, _linear(w, 2 * w, dtype, work))
    mlp = normed + max(3 * layer.inner * s, 2 * layer.inner * s + _linear(layer.inner, w, dtype, work))
    rows = 3 * w * s + max(attention, mlp) + 2 * c.out * s
    return frames * call + step + -(-frames // 7) * rows


def cross_decoder_bytes(c: CrossDecoderSpec, work: Work, dtype: torch.dtype) -> int:
    """Of `models.text.encoder_decoder.CrossDecoder`: of its rows, and of encoder rows whose keys are written in the step."""
    s, w = dtype.itemsize, c.hidden_size
    call = 8 + 16 + 8 + 32 + 3 * w * s  # ids, positions, slots, bounds; x, what is added to it, their sum
    normed = w * s
    attention = normed + max(3 * w * s + 3 * w * s, 3 * w * s + 2 * w * s + _linear(w, w, dtype, work))  # q, k, v and copies
    mlp = normed + max(3 * c.inner * s, 2 * c.inner * s + _linear(c.inner, w, dtype, work))
    written = w * s + 2 * w * s + _linear(w, 2 * w, dtype, work)  # encoder rows end to end, keys and values twice
    gathered = 0
    if backend("attention", work.device, dtype) != "native":
        gathered = 2 * 2 * work.keys * w * s + work.rows * work.longest * (1 + s)
    return work.rows * (call + w * s + max(attention, mlp)) + work.keys * written + gathered


def _laid_out(width: int, dtype: torch.dtype, device: torch.device) -> int:
    """Of a row: keys and values as torch's kernel wants them in half precision; C++ lays out a tile at a time."""
    native = backend("varlen_attention", device, dtype) == "native"
    return 0 if native or dtype == torch.float32 else 2 * width * dtype.itemsize
