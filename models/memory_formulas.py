"""Bytes of weights, and of what a forward pass holds beside them, in closed form: upper bounds, each factor with its tensor.

`s` is the size of a number of the model's dtype. What torch frees before the peak is not counted, what a frame still names is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..kernels.dispatch import backend, fused
from ..kernels.linear import padded_rows
from ..kernels.panels import WIDTH
from .audio.aut import AT_ONCE, AutSpec
from .audio.conformer import ConformerSpec
from .audio.mel_encoder import EncoderConfig
from .interface import Work
from .layers.adapter import LowRank
from .layers.connectors import ProjectorSpec
from .text.encoder_decoder import CrossDecoderSpec
from .text.spec import AttentionSpec, DecoderSpec, LatentSpec, MlpSpec, MoeSpec
from .vision.sam import TAPS, SamSpec
from .vision.spec import TowerSpec

_WIDE = 4  # of a float32
_PARTS = 64 << 20  # of some 300 multiprocessors, two tiles of 128 KiB each, less where heads are small
_SMALL = 2048  # of all lengths and bounds of a call, and what threads keep in torch's norms


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


def decoder_bytes(c: DecoderSpec, work: Work, dtype: torch.dtype, beside: tuple[int, int] = (0, 0)) -> int:
    """Of `models.text.decoder.Decoder`, the keys that are gathered not included. `beside`: a row of attention, of the MLP."""
    row, added = c.hidden_size * dtype.itemsize, _made(c.hidden_size, work.rows, dtype, work)
    step = 8 + 8 * c.rope_axes + 8 + 8 + 40  # ids, positions, slots, places of encoder rows, bounds and blocks of sequences
    step += (2 + len(c.deepstack)) * row  # x, encoder rows that are put in
    step += sum(rope.dim * _WIDE for rope in c.ropes)  # cosines and sines
    attention = added + row + max(_part_bytes(c.hidden_size, layer.attention, work, dtype) for layer in c.layers)
    mlp = 2 * added + row + max(_part_bytes(c.hidden_size, layer.mlp, work, dtype) for layer in c.layers)
    # beside attention what the layer before adds and normed rows, beside the MLP what attention adds too
    parts = max(attention + beside[0], mlp + beside[1])
    return work.rows * (step + max(2 * row + _rms_norm_bytes(c.hidden_size, work, dtype), parts))


def _rms_norm_bytes(width: int, work: Work, dtype: torch.dtype) -> int:
    native = fused("rms_norm", work.device, dtype)
    return width * dtype.itemsize if native else _rms_norm(width, dtype.itemsize)


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
    qkv = _made(q + 2 * kv, work.rows, dtype, work)
    done = qkv + q * s + _product(q, width, work.rows, dtype, work)
    if not fused("rms_norm", work.device, dtype) and a.qk_norm:
        done = max(done, qkv + _rms_norm(q, s))
    if not fused("rotary", work.device, dtype):
        done = max(done, qkv + _rotary(q + kv, s))
    if not fused("attention", work.device, dtype):
        done = max(done, qkv + 3 * q * s)  # q and the result in the layout of torch's kernels
    return max(done, _product(width, q + 2 * kv, work.rows, dtype, work))


def _latent_bytes(width: int, a: LatentSpec, work: Work, dtype: torch.dtype) -> int:
    s, cached = dtype.itemsize, a.latent + a.rope.dim
    q, absorbed = a.heads * (a.nope_dim + a.rope.dim), a.heads * cached
    made = (2 * cached + (a.query_latent or 0) + q) * s  # squeezed, what is cached of it, queries
    return max(
        made + (a.query_latent or 0) * s,
        made + _rotary(a.heads * a.rope.dim, s),
        made + 2 * a.heads * a.latent * s,  # queries in the cache's space, of each head, then together
        made + 2 * absorbed * s + a.heads * a.latent * s,  # those with positions, what they attend to
        made + absorbed * s + a.heads * (a.latent + 2 * a.value_dim) * s,
    )


def _mlp_bytes(width: int, inner: int, work: Work, dtype: torch.dtype) -> int:
    s = dtype.itemsize
    gate = 0 if fused("gated", work.device, dtype) else inner * s  # what the activation makes of it
    return max(
        _product(width, 2 * inner, work.rows, dtype, work),
        gate + _made(2 * inner, work.rows, dtype, work) + inner * s,  # gate and up, product
        inner * s + _product(inner, width, work.rows, dtype, work),
    )


def _mixture_bytes(width: int, m: MoeSpec, work: Work, dtype: torch.dtype) -> int:
    """At the worst, all rows have one expert in common, and are of one kind."""
    s = dtype.itemsize
    apart = (2 * width * s + 2 * 8 + 1) * (len(m.kinds) > 1)  # the result, rows of a kind, which they are and what is asked of
    scores = width * _as_float(s) + 4 * m.experts * _WIDE  # logits, scores, what is offered of them and by groups
    chosen = m.top_k * (_WIDE + 3 * 8)  # weights, experts, their order, and back
    made = m.top_k * width * s
    one = 8 + width * s + _mlp_bytes(width, max(m.inner), work, dtype)
    total = width * (2 * _WIDE + s + _as_float(s))  # the sum, and what is added to it
    shared = width * s + _mlp_bytes(width, m.shared_inner, work, dtype)
    if fused("moe", work.device, dtype):  # side by side all experts make all their rows at once
        inner = max(m.inner)
        pairs = m.top_k * (4 * _WIDE + (inner + width) * s)  # weights, experts, their order, and what the products make
        eight = (width + _WIDE + m.top_k * (inner + _WIDE)) * work.int8
        return width * s + 1 + max(scores, pairs + eight, shared)
    return max(apart + max(scores, chosen + made + max(one, total)), chosen + shared)


def gathered_bytes(c: DecoderSpec, work: Work, dtype: torch.dtype) -> int:
    """Keys and values that torch's attention copies out of the cache for one layer, and its masks; in C++ none.

    In Triton there are results of keys in parts: for every multiprocessor a few tiles of rows and a head in float32.
    """
    if fused("attention", work.device, dtype):
        return 0 if work.device.type == "cpu" else _PARTS
    s = dtype.itemsize
    each = [2 * a.kv_heads * a.head_dim if isinstance(a, AttentionSpec) else a.latent + a.rope.dim for a in c.attentions]
    copies = work.keys * max(each) * (2 * s + work.codes * (1 + _as_float(s)))  # padded to twice as many; of a code its float32
    copies += _torch_tiles(work.rows, max(each) // 2, dtype)
    return copies + work.rows * work.longest * max(_scored_bytes(a, s) for a in c.attentions)


def _scored_bytes(a: AttentionSpec | LatentSpec, s: int) -> int:
    """Of a row and a key: a mask and its form in the model's dtype, of each head beside windows; scores that are capped."""
    if isinstance(a, LatentSpec) or (a.window is None and a.soft_cap is None):
        return 1 + s
    return a.heads // a.kv_heads * (1 + s) + (0 if a.soft_cap is None else a.heads * (s + 3 * _WIDE))


def adapter_bytes(added: Sequence[LowRank], work: Work, dtype: torch.dtype) -> int:
    """Of a row, beside a part of a layer: the thin product, which may be copied for the next, and what is added.

    What is added to a slice is no more than what the part makes next, and so it is where a product halves its rows.
    """
    most = 0
    for one in added:
        thin = _made(one.spec.rank, work.rows, dtype, work)
        made = _product(one.spec.rank, one.outer, work.rows, dtype, work)
        spread = one.whole and 2 * one.outer > one.inner
        most = max(most, thin + made - (0 if spread else _made(one.outer, work.rows, dtype, work)))
    return most


def tower_bytes(c: TowerSpec, patches: int, out: ProjectorSpec, dtype: torch.dtype, work: Work) -> int:
    """Of `models.vision.vit.Tower` and a projector behind it for so many patches in one call, their pixels included."""
    row, states = c.width * dtype.itemsize, len(c.states)
    rows = patches + (patches // c.table.side**2 if c.class_token and c.table is not None else 0)
    kept = (states - 1) * row + (c.head_dim * _WIDE if c.rotary is not None else 0)  # copies of states, angles
    attention, mlp = _tower_attention(c, rows, dtype, work), _tower_mlp(c, rows, dtype, work)
    added = _made(c.width, rows, dtype, work)
    layers = row + added + kept + max(attention, added + mlp)  # x and what is added next
    ordered = 2 * states * row + 8 if c.class_token or c.window else 0  # as they went in, with an index
    end = max(row + kept + (row + _norm_bytes(c.width, c.rms, dtype, work) if c.post_norm else row), ordered)
    behind = projector_bytes(out, states, patches, dtype, work)
    held = patches * (c.patch_dim * dtype.itemsize + 3 * 8 + 8 * c.class_token)  # pixels, places, rows behind the class's
    if not fused("varlen_attention", work.device, dtype):
        held += _torch_tiles(patches, c.head_dim, dtype)
    return held + max(patches * _tower_start(c, patches, dtype, work), rows * layers, rows * end, patches * behind)


def sam_bytes(c: SamSpec, patches: int, dtype: torch.dtype, work: Work) -> int:
    """Of `models.vision.sam.Tower` for one picture of so many patches."""
    t, s, side = c.tower, dtype.itemsize, math.isqrt(patches)
    row, heads = t.width * s, t.heads * s
    whole = not t.window or any(layer in t.full_layers for layer in range(t.depth))
    squares = {(patches, side, 0)} if whole else set()
    if t.window:
        squares.add(((-(-side // t.window) * t.window) ** 2, t.window, row))
    attention = 0
    for rows, edge, cut in squares:
        beside = edge * c.relative
        width = t.heads * (t.head_dim + 2 * beside)
        wide, places = width * s, 2 * edge * beside * (t.head_dim * s + 8)  # how far apart lines are, and columns
        native = backend("varlen_attention", work.device, dtype) == "native"
        end = wide + c.relative * row + _product(t.width, t.width, rows, dtype, work)  # what comes out, cut, and its product
        end = max(end, 0 if native else 2 * wide + _laid_out(width, dtype, work.device))
        made = cut + 3 * wide + max(3 * row + c.relative * row + heads * beside, end)  # beside what they are of, and a copy
        tiles = 0 if native else _torch_tiles(edge**2, width // t.heads, dtype)
        attention = max(attention, rows * made + places + tiles)
    mlp = patches * (row + _tower_mlp(t, patches, dtype, work))  # beside what attention adds
    layers = 3 * row * patches + max(attention, mlp)  # x, what the layer before adds, normed rows
    return _SMALL + max(layers, patches * (row + c.neck * s * (2 * TAPS + 2)))


def _tower_start(c: TowerSpec, patches: int, dtype: torch.dtype, work: Work) -> int:
    """Of a patch, before the first layer."""
    row, norm = c.width * dtype.itemsize, _norm_bytes(c.width, c.rms, dtype, work)
    steps = [_product(c.patch_dim, c.width, patches, dtype, work), row + norm]
    if c.table is not None:
        resampled = c.table.fit in ("bilinear", "bicubic")
        steps.append(3 * row + (c.width * _WIDE if resampled else 0))  # x, the table fitted, and that in squares
    if c.class_token or c.window:
        steps.append(2 * row + 8)
    return max(steps)


def projector_bytes(c: ProjectorSpec, states: int, patches: int, dtype: torch.dtype, work: Work) -> int:
    """Of `models.layers.connectors.Projector` for each of so many rows in one call, made of so many states of a tower."""
    s, row = dtype.itemsize, c.width * dtype.itemsize
    inner, given = c.wide, row + (row if states > 1 else 0)  # side by side, where there are several
    copies = row * (c.norm is not None) + row * (c.channels_first and c.group > 1)
    peak = given + copies + _norm_bytes(c.width, c.rms, dtype, work) * (c.norm is not None)
    made = 0
    for number, outer in enumerate(c.widths):
        peak = max(peak, given + copies + made + _product(inner, outer, patches, dtype, work) // c.group)
        made = outer * s // c.group * (1 if number + 1 == len(c.widths) else 2)  # and what the activation makes of it
        peak, inner = max(peak, given + copies + made), outer
    return max(peak, given + 3 * c.out * s // c.group)  # in the order of items, and cut to items


def _product(inner: int, outer: int, rows: int, dtype: torch.dtype, work: Work) -> int:
    """As `_linear`, and the copy of its input where it is made for more rows than there are."""
    made = _made(outer, rows, dtype, work)
    return made + _made(inner, rows, dtype, work) if made > outer * dtype.itemsize else _linear(inner, outer, dtype, work)


def _made(outer: int, rows: int, dtype: torch.dtype, work: Work) -> int:
    """The result of a product alone: oneDNN makes some rows more than there are, which live as long."""
    plain = work.int8 or work.device.type != "cpu" or backend("linear", work.device, dtype) == "native"
    return outer * dtype.itemsize if plain else -(-padded_rows(rows) * outer * dtype.itemsize // rows)


def _norm_bytes(width: int, rms: bool, dtype: torch.dtype, work: Work) -> int:
    """Of an RMSNorm, in C++ the result alone; of torch's LayerNorm mean and deviation, too."""
    if not rms:
        return width * dtype.itemsize + 2 * _WIDE
    native = fused("rms_norm", work.device, dtype)
    return width * dtype.itemsize if native else _rms_norm(width, dtype.itemsize)


def _tower_attention(c: TowerSpec, rows: int, dtype: torch.dtype, work: Work) -> int:
    s, w = dtype.itemsize, c.width
    row, qkv = w * s, _made(3 * w, rows, dtype, work)
    steps = [_product(w, 3 * w, rows, dtype, work)]
    if c.qk_norm is not None:
        native = fused("rms_norm", work.device, dtype)
        normed = _norm_bytes(w, True, dtype, work)
        steps.append(qkv + (row + normed if c.qk_norm == "all" else 0 if native else normed))
    if c.rotary is not None:
        turned = 0 if fused("rotary", work.device, dtype) else _rotary(2 * w, s)
        steps.append(qkv + max(turned, 2 * row * c.rotary.neighbours))
    native = fused("varlen_attention", work.device, dtype)
    steps.append(qkv + (row if native else 4 * row + _laid_out(w, dtype, work.device)))  # results of a run and of all, copies
    steps.append(qkv + row + _product(w, w, rows, dtype, work))
    return row + 2 * _WIDE + max(steps)  # beside the normed input


def _tower_mlp(c: TowerSpec, rows: int, dtype: torch.dtype, work: Work) -> int:
    s, first = dtype.itemsize, (1 + c.gated) * c.inner
    steps = (
        _product(c.width, first, rows, dtype, work),
        _made(first, rows, dtype, work) + c.inner * s,  # what the activation makes of it
        c.inner * s + _product(c.inner, c.width, rows, dtype, work),
    )
    return c.width * s + 2 * _WIDE + max(steps)  # beside the normed input


def mel_encoder_bytes(c: EncoderConfig, frames: int, out_width: int, dtype: torch.dtype, work: Work) -> int:
    """Of `models.audio.mel_encoder.Encoder` and a projection to `out_width` for at most so many frames, which are included.

    A few less take more where products of so many are made as they are, for those of fewer are copied to fill them up.
    """
    return max(_mel_encoder_bytes(c, n, out_width, dtype, work) for n in range(max(1, frames - 3), frames + 1))


def _mel_encoder_bytes(c: EncoderConfig, frames: int, out_width: int, dtype: torch.dtype, work: Work) -> int:
    s, w, rows = dtype.itemsize, c.width, (frames + 1) // 2
    bands, row = c.mels * s, c.width * s
    taps = 3 * bands + _product(3 * c.mels, w, frames, dtype, work)
    first = max(taps, _made(w, frames, dtype, work) + row)  # or what gelu makes of it
    second = max(3 * row + _product(3 * w, w, rows, dtype, work), _made(w, rows, dtype, work) + row)
    angles = c.turned * _WIDE  # cosines and sines, where no table has the positions
    layers = max(3 * row, angles + speech_layer_bytes(c, rows, dtype, work))  # x, positions, their sum
    end = angles + 2 * row + _norm_bytes(w, False, dtype, work) + 2 * out_width * s
    held = _SMALL + frames * bands + _speech_tiles(c, rows, dtype, work)
    return held + max(frames * first, frames * row + rows * second, rows * max(layers, end))


def conformer_bytes(c: ConformerSpec, rows: int, dtype: torch.dtype, work: Work) -> int:
    """Of `models.audio.conformer.Conformer` for so many rows in one call, which are included."""
    s, w, inner = dtype.itemsize, c.width, c.heads * c.head_dim
    mlp = 2 * w + 2 * c.inner  # x, normed, what the activation makes of the first product
    attention = 2 * w + 4 * inner  # queries, keys, values and results
    convolution = 2 * w + 4 * c.wide  # the product, its gated half, and that over time
    block = c.block * c.block * (c.head_dim + 3 * c.heads)  # distances, their scores, and what torch makes of both
    return (rows * (c.inputs + max(mlp, attention, convolution)) + block) * s + _torch_tiles(c.block, c.head_dim, dtype)


def speech_layer_bytes(c: EncoderConfig, rows: int, dtype: torch.dtype, work: Work) -> int:
    """Of a row: the residual stream, and attention or MLP with the sum they end in."""
    s, w = dtype.itemsize, c.width
    row, norm = w * s, _norm_bytes(w, False, dtype, work)
    qkv, laid_out = 3 * row, _laid_out(w, dtype, work.device)
    attention = row + max(norm + qkv, row + qkv + row + laid_out, row + qkv + row + _product(w, w, rows, dtype, work), 2 * row)
    if c.turned and backend("rotary", work.device, dtype) != "native":
        attention = max(attention, row + qkv + _rotary(c.heads * c.turned, s))
    inner = c.inner * s
    first, last = _product(w, c.inner, rows, dtype, work), _product(c.inner, w, rows, dtype, work)
    # beside x what the layer was given, which its caller holds
    mlp = 2 * row + max(norm + first, _made(c.inner, rows, dtype, work) + inner, inner + last)
    return max(attention, mlp)


def _speech_tiles(c: EncoderConfig, rows: int, dtype: torch.dtype, work: Work) -> int:
    native = fused("varlen_attention", work.device, dtype)
    return 0 if native else _torch_tiles(rows, c.width // c.heads, dtype)


def aut_bytes(c: AutSpec, frames: int, dtype: torch.dtype, work: Work) -> int:
    """Of `models.audio.aut.Encoder` for so many frames in one call, which are included."""
    s, layer, wide = dtype.itemsize, c.layer, c.channels
    bands, row, rows = layer.mels * s, layer.width * s, c.rows(frames)
    whole = -(-frames // c.chunk) * c.chunk
    high, at_once = -(-layer.mels // 2), min(whole, AT_ONCE * c.chunk)
    made = high * at_once // 2  # numbers of one channel after the first convolution
    taps = (high + 2) * (at_once // 2 + 2 * at_once // c.chunk) + 9 * -(-made // 4)  # with zeros around, and as they are seen
    first = at_once * bands * 9 // 8 + made * (9 * s + _product(9, wide, made, dtype, work) + wide * s)
    second = wide * s * (made + taps) + made // 4 * (_product(9 * wide, wide, made // 4, dtype, work) + wide * s)
    layers, end = speech_layer_bytes(layer, rows, dtype, work), 3 * row + 2 * c.out * s
    held = _SMALL + frames * bands + _speech_tiles(c.layer, rows, dtype, work)
    return held + max(whole * bands + rows * row + max(first, second), rows * max(layers, end))


def cross_decoder_bytes(c: CrossDecoderSpec, work: Work, dtype: torch.dtype) -> int:
    """Of `models.text.encoder_decoder.CrossDecoder`: of its rows, and of encoder rows whose keys are written in the step."""
    s, w, rows = dtype.itemsize, c.hidden_size, work.rows
    row, added, inner = w * s, _made(w, rows, dtype, work), _made(c.inner, rows, dtype, work)
    held = row + added  # x, and what is added to it next; what was before that lives as long as its layer
    given = rows * (8 + 8 + 8 + 40) + work.keys * row  # ids, positions, slots, bounds and blocks of sequences; encoder rows
    done = row + _product(w, w, rows, dtype, work)
    alone = held + row + max(_product(w, 3 * w, rows, dtype, work), _made(3 * w, rows, dtype, work) + done)
    written = work.keys * _product(w, 2 * w, work.keys, dtype, work)
    read = rows * done + work.keys * _made(2 * w, work.keys, dtype, work)
    across = rows * (held + added + row + added) + max(written, read)
    widened = max(row + _product(w, c.inner, rows, dtype, work), 2 * inner, inner + _product(c.inner, w, rows, dtype, work))
    gathered = 0
    if not fused("attention", work.device, dtype):
        laid_out = 3 * row  # in the layout of torch's kernels
        copies = 2 * work.keys * w * (2 * s + work.codes * (1 + _as_float(s)))
        gathered = copies + rows * (work.longest * (1 + s) + laid_out)
    return _SMALL + given + max(rows * max(alone, held + added + widened), across) + gathered


def _torch_tiles(rows: int, dim: int, dtype: torch.dtype) -> int:
    """What torch's attention on a CPU keeps for every thread: scores of a tile of so many queries and 512 keys, and results."""
    queries = 32 if rows < 192 else 64 if rows < 768 else 256
    score = _WIDE + (0 if dtype == torch.float32 else dtype.itemsize)
    return torch.get_num_threads() * queries * (512 * score + (dim + 3) * _WIDE)


def _laid_out(width: int, dtype: torch.dtype, device: torch.device) -> int:
    """Of a row: keys and values as torch's kernel wants them in half precision; C++ lays out a tile at a time."""
    native = fused("varlen_attention", device, dtype)
    return 0 if native or dtype == torch.float32 else 2 * width * dtype.itemsize
