"""How much memory an engine takes, in closed form from its options and the model's. Runs nothing, allocates nothing."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import mul

import torch
from torch import nn

from ..kernels.dispatch import backend
from ..mm.errors import ConfigError
from ..mm.media.policy import DecodeSpec, MediaPolicy
from ..models.activations import linear_weight_bytes
from ..models.interface import CacheSpec, Model, Work
from ..models.layers.adapter import LowRank
from ..models.layers.basic import Weighted
from ..models.layers.linear import Head, Linear
from ..models.layers.mla import Unsqueeze
from ..processors.device import MOST_AT_ONCE
from ..processors.interface import ProcessingInfo
from . import decode_graphs, encoder_graphs
from .config import EngineConfig, cache_budget, check_max_model_len
from .kv import group_layers
from .largest import Largest, Room, largest_item, most_rows

_log = logging.getLogger(__name__)
_LEAST_ENCODER_CACHE = 128 << 20
_LARGEST_ITEMS = 4  # held at once by default
_ANY_ROWS = 1 << 40
_MOST_BLOCKS = 1 << 30
_ANY_BYTES = 1 << 60
_MIB = 1 << 20
_DECODED_BY = {"image": "max_pixels", "audio": "max_audio_seconds"}  # fields of MediaPolicy; a clip by its bytes
_MEDIA_BYTES = 512 << 20  # of processed media of running requests (engine/driver.py)
_QUEUE_BYTES = 256 << 20  # of rows that wait to be written (engine/encoder_store.py)
_LOGITS_ROWS = 256  # prompt rows whose logits the runner holds at once
_SAMPLED, _SAMPLED_TOGETHER = 24, 40  # bytes per token of the vocabulary that sampling a row takes, see sampling_bytes
_SORTED_ROW = 40  # likewise of the one row that a CPU sorts
_PROMPT_LOGITS = 16  # likewise for log probabilities of a prompt
_TOKEN_BYTES = 160  # of a sequence's token in lists, tuples and positions


def largest_items(config: EngineConfig, info: ProcessingInfo, max_model_len: int) -> dict[str, int]:
    """Modality -> encoder rows of its largest item under the engine's own options; below `max_model_len` if it has tokens.

    Modalities of which a prompt may hold none are left out. What the options of a single request allow beyond that is
    admitted as far as the caches hold it.
    """
    allowed = [name for name in info.modalities if config.limit_mm_per_prompt.get(name) != 0]
    caps = {name: max_model_len - 1 if name in info.slot_ids else _ANY_ROWS for name in allowed}
    return {name: most_rows(info, name, config.media, cap) for name, cap in caps.items()}


@dataclass(frozen=True)
class Sizes:
    """What one sequence and one step hold at most.

    Args:
        length: tokens of a sequence.
        keys: of a sequence in a cache: of its tokens, or of an item that is no part of them and is read across.
        rows: of a step; whatever has to be computed together fits beside a row of every other sequence.
    """

    length: int
    keys: int
    rows: int


def plan_sizes(config: EngineConfig, info: ProcessingInfo, max_model_len: int) -> Sizes:
    items = largest_items(config, info, max_model_len)
    across = [rows for name, rows in items.items() if name not in info.slot_ids]
    inside = [rows for name, rows in items.items() if name in info.slot_ids]
    keys = max([max_model_len, *across])
    atom = {"causal": 1, "item_atomic": max(inside, default=1), "prompt_atomic": max_model_len}[info.prefill]
    return Sizes(max_model_len, keys, max(config.max_num_batched_tokens, atom + config.max_num_seqs - 1))


def cache_blocks(config: EngineConfig, specs: Sequence[CacheSpec], sizes: Sizes, device: torch.device) -> tuple[int, ...]:
    """Blocks of the key/value cache, per group of layers, in closed form.

    As many as all sequences take, or what the budget holds between that and one sequence. ConfigError when that does not fit.
    """
    budget, groups, size = cache_budget(config, device), group_layers(specs), config.block_size
    least = [group.blocks(sizes.keys, sizes.rows, size) for group in groups]
    most = [group.most_blocks(config.max_num_seqs, sizes.keys, sizes.rows, size) for group in groups]
    one, all_ = sequence_bytes(specs, sizes, size), sum(n * g.block_bytes(size) for n, g in zip(most, groups, strict=True))
    if one > budget:
        sequence, shorter = f"a sequence of max_model_len={sizes.length} tokens", "lower max_model_len or "
        if sizes.keys > sizes.length:  # which is the media's, however short the text may be
            sequence, shorter = f"a sequence whose encoder side has {sizes.keys} rows", ""
        raise ConfigError(
            f"{sequence} needs {one:,} bytes of key/value cache, {budget:,} are allowed: "
            f"{_smaller_blocks(specs, sizes, size, budget)}{shorter}raise kv_cache_memory_bytes to {one}"
        )
    if all_ <= budget:
        return tuple(most)
    return tuple(few + (many - few) * (budget - one) // (all_ - one) for few, many in zip(least, most, strict=True))


def sequence_bytes(specs: Sequence[CacheSpec], sizes: Sizes, block_size: int) -> int:
    """Of the longest sequence in the key/value cache."""
    return sum(g.blocks(sizes.keys, sizes.rows, block_size) * g.block_bytes(block_size) for g in group_layers(specs))


def _smaller_blocks(specs: Sequence[CacheSpec], sizes: Sizes, block_size: int, budget: int) -> str:
    """What a message advises first where blocks of the usual size would fit."""
    usual = EngineConfig.block_size
    fits = block_size > usual and sequence_bytes(specs, sizes, usual) <= budget
    return f"lower block_size={block_size}, where {usual} would fit, or " if fits else ""


def longest_sequence(config: EngineConfig, specs: Sequence[CacheSpec], device: torch.device) -> int:
    """Tokens, in whole blocks, that a cache of one sequence would have room for; ConfigError where it holds no block."""
    budget, groups, size = cache_budget(config, device), group_layers(specs), config.block_size

    def taken(blocks: int) -> int:
        return sum(g.blocks(blocks * size, config.max_num_batched_tokens, size) * g.block_bytes(size) for g in groups)

    if budget < taken(1):
        block = EngineConfig.block_size
        smaller = _smaller_blocks(specs, Sizes(block, block, config.max_num_batched_tokens), size, budget)
        raise ConfigError(
            f"{budget:,} bytes of key/value cache hold no block of {size} tokens, which takes {taken(1):,}: "
            f"{smaller}raise kv_cache_memory_bytes to {taken(1)} for each {size} tokens of a sequence"
        )
    return (bisect_right(range(1, _MOST_BLOCKS), budget, key=taken)) * size


def encoder_cache_budget(config: EngineConfig, info: ProcessingInfo, row_bytes: int, max_model_len: int) -> int:
    """Bytes that encoder rows may take.

    Args:
        row_bytes: of one encoder row.

    Raises:
        ConfigError: `encoder_cache_bytes` does not hold the largest item that may come.
    """
    rows, modality = max(((rows, name) for name, rows in largest_items(config, info, max_model_len).items()), default=(0, ""))
    if config.encoder_cache_bytes is None:
        return max(_LEAST_ENCODER_CACHE, _LARGEST_ITEMS * rows * row_bytes)
    if config.encoder_cache_bytes < rows * row_bytes:
        item = f"the largest {modality} has {rows} encoder rows, {rows * row_bytes} bytes"
        raise ConfigError(
            f"encoder_cache_bytes={config.encoder_cache_bytes} is too small: {item}; raise it, or lower max_model_len or "
            "the sizes in mm_processor_kwargs"
        )
    return config.encoder_cache_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes an engine holds at most, and what it takes. Interpreter and libraries come on top (about 300 MiB on a CPU).

    Args:
        weights: as they are laid out for the device.
        kv_cache: all blocks. On a CPU, pages cost memory once written.
        encoder_cache: encoder rows, and those that wait to be written to the folder.
        decoder_step, logits_step, encoder_step: the largest forward pass, logits with sampling, and encoder call; they run one
            after the other, so the largest counts, or, with `encode_beside`, the encoder call beside the others.
        media_held: processed media of requests under way.
        graphs: recorded steps and encoder calls of a GPU, with all that they write.
        media_step: media that workers process on `media_device`; part of the total if that is where the model is.
        processor_cache: processed media kept for later ones.
        sequences: tokens and positions of requests under way.
        decoding: media that workers decode at the worst, as far as the limits of `media` let in. It comes on top: the limits
            are far above what is usual.
        largest: what fits, by modality.
        decoding_limits: the fields of `media` that bound `decoding`.
        device: of the model; on a GPU, media held, processor cache and sequences are the host's.
    """

    weights: int
    kv_cache: int
    encoder_cache: int
    decoder_step: int
    logits_step: int
    encoder_step: int
    media_held: int
    processor_cache: int
    sequences: int
    decoding: int
    largest: tuple[Largest, ...]
    decoding_limits: str = ""
    encode_beside: bool = False
    graphs: int = 0
    media_step: int = 0
    device: str = "cpu"
    media_device: str = "cpu"

    @property
    def activations(self) -> int:
        steps = max(self.decoder_step, self.logits_step)
        return steps + self.encoder_step if self.encode_beside else max(steps, self.encoder_step)

    @property
    def total(self) -> int:
        """Of all that is where the model is: on a CPU, everything."""
        media = self.media_step if self.media_device == self.device else 0
        parts = (self.weights, self.kv_cache, self.encoder_cache, self.activations, self.graphs, media)
        return sum(parts) + (self.on_host if self.device == "cpu" else 0)

    @property
    def on_host(self) -> int:
        return self.media_held + self.processor_cache + self.sequences

    def rows(self) -> list[tuple[str, str]]:
        """(name, value) as text."""
        sizes = [
            ("weights", self.weights),
            ("key/value cache", self.kv_cache),
            ("encoder cache", self.encoder_cache),
            ("activations", self.activations),
            ("  decoder step", self.decoder_step),
            ("  logits and sampling", self.logits_step),
            ("  encoder call", self.encoder_step),
            ("media held", self.media_held),
            ("processor cache", self.processor_cache),
            ("sequences", self.sequences),
        ]
        if self.device != "cpu":
            sizes.insert(6, ("recorded steps", self.graphs))
            sizes.append(("total on the host", self.on_host))
        sizes.append(("total" if self.device == "cpu" else f"total on {self.device}", self.total))
        codecs = f"{_mib(self.decoding)} at most, beside the total; lower media_workers, or of media {self.decoding_limits}"
        where = "part of that total" if self.media_device == self.device else "beside the total"
        there = f"{_mib(self.media_step)} at most, {where}; lower media_workers"
        return [
            *((name, _mib(size)) for name, size in sizes),
            ("media codecs", codecs if self.decoding else _mib(0)),
            *([(f"media on {self.media_device}", there)] if self.media_step else []),
            *((f"largest {item.modality}", str(item)) for item in self.largest),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{name:<24} {value}" for name, value in self.rows())


def plan_memory(config: EngineConfig, model: Model, info: ProcessingInfo, max_model_len: int) -> MemoryPlan:
    """The plan of an engine with these options.

    Args:
        model: built, not loaded; on the meta device it takes no memory.

    Raises:
        ConfigError: options that cannot be met, as when the engine is made.
    """
    device, dtype = config.torch_device, model.cache_specs[0].dtype
    row_bytes = model.row_size * dtype.itemsize
    sizes = plan_sizes(config, info, max_model_len)
    blocks = cache_blocks(config, model.cache_specs, sizes, device)
    block_bytes = [group.block_bytes(config.block_size) for group in group_layers(model.cache_specs)]
    encoder_cache = encoder_cache_budget(config, info, row_bytes, max_model_len)
    items = largest_items(config, info, max_model_len)
    keys = min(max(blocks) * config.block_size, config.max_num_seqs * sizes.keys)
    rows = min(sizes.rows, keys)
    in_8_bits = config.quantization is not None, config.kv_cache_dtype != "auto"
    work = Work(rows, keys, sizes.keys, device, *in_8_bits)
    hidden, sampled = rows * model.hidden_size * dtype.itemsize, min(rows, config.max_num_seqs)
    called = {name: max(most, config.max_encoder_tokens) for name, most in items.items()}  # rows of one call at most
    waiting = _QUEUE_BYTES if config.encoder_cache_dir is not None else 0
    processed = max((model.input_bytes(name, most) for name, most in items.items()), default=0)
    setting = "max_model_len" if config.max_model_len is not None else "max_position_embeddings of the model"
    if config.max_model_len is None and max_model_len < model.max_positions:
        setting = "kv_cache_memory_bytes"
    room = Room(max_model_len - 1, setting, encoder_cache, row_bytes, config.media)  # a token is left for the answer
    decoding = {name: decoding_bytes(name, config.media, info.decode_spec) for name in items}
    worst = max(decoding, key=lambda name: decoding[name], default="")
    return MemoryPlan(
        weights=weight_bytes(model, device, dtype, config.quantization),
        kv_cache=sum(map(mul, blocks, block_bytes)),
        encoder_cache=encoder_cache + waiting,
        decoder_step=max(model.forward_bytes(replace(work, rows=most)) for most in _or_less(rows)),
        logits_step=hidden + sampling_bytes(model.vocab_size, sampled, min(rows, _LOGITS_ROWS), dtype, device),
        encoder_step=max(
            (model.encoder_bytes(name, n, work) for name, most in called.items() for n in _or_less(most)), default=0
        ),
        media_held=(_MEDIA_BYTES + (1 + config.media_workers) * processed) if items else 0,
        processor_cache=config.mm_processor_cache_bytes if items else 0,
        graphs=decode_graphs.graph_bytes(model, config.max_num_seqs, len(blocks), -(-sizes.keys // config.block_size), work)
        + encoder_graphs.graph_bytes(model, called, work),
        media_step=_media_step(config) if items else 0,
        sequences=2 * config.max_num_seqs * max_model_len * _TOKEN_BYTES,
        decoding=config.media_workers * decoding.get(worst, 0),
        largest=tuple(largest_item(name, info, room) for name in items),
        decoding_limits=f"max_bytes and {_DECODED_BY.get(worst, 'max_video_bytes')}",
        encode_beside=config.overlaps,
        device=str(device),
        media_device="cpu" if config.media_device == "cpu" else str(config.torch_media_device),
    )


def settle(config: EngineConfig, make: Callable[[], Model], info: ProcessingInfo) -> EngineConfig:
    """The options with the bytes of the key/value cache, where a GPU's free memory decides them: what all else leaves.

    A model with more positions than it then has room for has half as many, or half of those, unless `max_model_len` is given.

    Args:
        make: the model on the meta device.

    Raises:
        ConfigError: a sequence has no room.
    """
    device = config.torch_device
    if device.type == "cpu" or config.kv_cache_memory_bytes is not None:
        return config
    allowed, model = int(torch.cuda.mem_get_info(device)[0] * config.gpu_memory_fraction), make()
    length = check_max_model_len(config.max_model_len, model.max_positions)
    while True:
        whole = replace(config, kv_cache_memory_bytes=_ANY_BYTES, max_model_len=length)
        plan, sizes = plan_memory(whole, model, info, length), plan_sizes(whole, info, length)
        left, one = allowed - plan.total + plan.kv_cache, sequence_bytes(model.cache_specs, sizes, config.block_size)
        if left >= one:
            if length < model.max_positions and config.max_model_len is None:
                _log.warning("max_model_len is %d, which fits; the model has %d positions", length, model.max_positions)
                return replace(whole, kv_cache_memory_bytes=left)
            return replace(config, kv_cache_memory_bytes=left)
        if config.max_model_len is not None or length < 2 * config.block_size:
            raise ConfigError(
                f"a sequence of max_model_len={length} tokens needs {one:,} bytes of key/value cache, and beside all else "
                f"{max(0, left):,} are left of {allowed:,} on {device}: "
                f"{_smaller_blocks(model.cache_specs, sizes, config.block_size, left)}lower max_model_len, max_num_seqs, "
                "max_num_batched_tokens or max_encoder_tokens, or raise gpu_memory_fraction"
            )
        length //= 2


def _media_step(config: EngineConfig) -> int:
    """Of workers that process on a GPU: each a part of what it was given, in a step between, and of what it makes of it."""
    return 0 if config.media_device == "cpu" else 4 * config.media_workers * MOST_AT_ONCE


def _mib(size: int) -> str:
    return f"{size / _MIB:10,.1f} MiB"


def _or_less(rows: int) -> range:
    """One row less takes more where products of so many are made as they are: those of fewer are copied, to fill them up."""
    return range(max(1, rows - 1), rows + 1)


def weight_bytes(model: Model, device: torch.device, dtype: torch.dtype, quantization: str | None) -> int:
    """Of all layers as `pack` lays them out: in 8 bits with a scale per output, a tied head beside its table."""
    assert isinstance(model, nn.Module)
    total = sum(parameter.nbytes for parameter in model.parameters())  # of layers that are torch's own
    for module in model.modules():
        if isinstance(module, Linear) and module.weight is not None:
            outer, inner = module.weight.shape
            int8 = quantization is not None and not module.exact
            total += linear_weight_bytes(inner, outer, module.bias is not None, module.weight.dtype, device, int8)
        elif isinstance(module, Unsqueeze | LowRank):
            total += sum(linear_weight_bytes(inner, outer, False, dtype, device, False) for inner, outer in module.shapes())
        elif isinstance(module, Weighted):
            total += sum(tensor.nbytes for _, tensor in module.tensors(""))
        elif isinstance(module, Head) and module.table is not None and backend("linear", device, dtype) != "torch":
            outer, inner = module.table.shape
            total += linear_weight_bytes(inner, outer, False, dtype, device, False)
    return total


def sampling_bytes(vocab: int, sampled: int, prompt: int, dtype: torch.dtype, device: torch.device) -> int:
    """Logits of the rows that are sampled, or of rows of a prompt whose log probabilities are asked for.

    The head gives them in the model's dtype and in float32. To sample: the untouched logits, those changed and put back, scaled
    ones and probabilities; on a CPU one row is sorted at a time, elsewhere all are, with sums in float64. For log
    probabilities: their table, what is ranked, and a mask.
    """
    head = dtype.itemsize + 4
    row, once = (_SAMPLED, _SORTED_ROW) if device.type == "cpu" else (_SAMPLED_TOGETHER, 0)
    return vocab * max(sampled * (head + row) + once, prompt * (head + _PROMPT_LOGITS))


def decoding_bytes(modality: str, media: MediaPolicy, spec: DecodeSpec) -> int:
    """Of one item at the worst: encoded, decoded to RGB or resampled samples, and once more while it is resized or joined."""
    samples = int(media.max_audio_seconds * spec.rate)
    if spec.longest_sound is not None:
        samples = min(samples, spec.longest_sound)
    decoded = {"image": 3 * media.max_pixels, "audio": 4 * samples}
    return media.max_bytes + 2 * decoded.get(modality, media.max_video_bytes)
