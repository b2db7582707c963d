"""Sizes the caches of an engine and plans its memory, in closed form, from its options and its model. Allocates nothing."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from ...callers.errors import ConfigError
from ...mm.embeddings import PROMPT_EMBEDS, PROMPT_EMBEDS_ROWS
from ...mm.media.policy import DecodeSpec, MediaPolicy
from ...models.interface import CacheSpec, Model, StepLimits, SupportsPooling, SupportsStreams
from ...models.layers.ranks import RankTraffic, rank_traffic
from ...models.memory_formulas import amx_bytes
from ...models.quantization import parse_quantization
from ...models.weights import weight_bytes
from ...processors.device import MAX_TRANSFER_BYTES
from ...processors.interface import ProcessingInfo, SupportsTranscription
from ..config import MAX_STREAM_ROWS, MEDIA_BYTES, EngineConfig, cache_budget, check_max_model_len, host_memory
from ..connectors.tensor_store import QUEUE_BYTES
from ..kv_cache.groups import CacheGroup, group_layers
from ..worker import decode_graphs, encoder_graphs
from ..worker.model_runner import LOGITS_ROWS
from .draft_cache_size import draft_cache_bytes
from .max_items import ItemLimits, find_max_item, max_rows
from .memory_plan import MemoryPlan

if TYPE_CHECKING:
    from ...models.request_adapters import AdaptedLayers

_log = logging.getLogger(__name__)
_MIN_ENCODER_CACHE = 128 << 20
_ITEMS_IN_ENCODER_CACHE = 4  # items of the largest size that the default capacity holds
_UNLIMITED_ROWS = 1 << 40
_UNLIMITED_BYTES = 1 << 60
_MAX_BLOCKS = 1 << 30
_DECODED_BY = {"image": "max_pixels", "audio": "max_audio_seconds"}  # field of MediaPolicy that bounds the decoded size
# bytes per token of the vocabulary, see sampling_bytes
_SAMPLED_ROW, _SAMPLED_ROW_GPU = 24, 40
_SORTED_ROW = 40
_PROMPT_LOGPROBS = 16
_TOKEN_BYTES = 160  # of a token of a sequence, in lists, tuples and positions


def max_item_rows(config: EngineConfig, info: ProcessingInfo, max_model_len: int) -> dict[str, int]:
    """Return modality -> encoder rows of its largest item under the options; items with prompt tokens fit `max_model_len`.

    Modalities that prompts may not contain are left out. Options of a single request can make larger items; those are
    admitted as far as the caches hold them.
    """
    allowed = [name for name in info.modalities if config.limit_mm_per_prompt.get(name) != 0]
    caps = {name: max_model_len - 1 if name in info.placeholder_ids else _UNLIMITED_ROWS for name in allowed}
    return {name: max_rows(info, name, config.media, cap) for name, cap in caps.items()}


@dataclass(frozen=True)
class MaxSizes:
    """The sizes that memory is planned for.

    Args:
        max_model_len: tokens of a sequence.
        step_rows: rows of a step. The largest bidirectional span fits beside a row of every other sequence.
        encoder_cache_bytes: capacity of the encoder cache.
        item_rows: modality -> encoder rows of its largest item.
        cross_rows: encoder rows that a sequence reads by cross-attention.
        step_cross_rows: encoder rows that a step writes to the caches of cross-attention.
    """

    max_model_len: int
    step_rows: int
    encoder_cache_bytes: int = 0
    item_rows: Mapping[str, int] = field(default_factory=dict)
    cross_rows: int = 0
    step_cross_rows: int = 0

    @property
    def keys(self) -> int:
        """Cached keys of a sequence in one layer: its tokens, or the encoder rows that it reads by cross-attention."""
        return max(self.max_model_len, self.cross_rows)

    def keys_of_group(self, group: CacheGroup) -> int:
        """Return the keys that the longest sequence has in the layers of a cache group."""
        return self.cross_rows if group.spec.kind == "cross" else self.max_model_len


def max_sizes(config: EngineConfig, info: ProcessingInfo, row_bytes: int, max_model_len: int) -> MaxSizes:
    """Return the sizes of an engine. `row_bytes`: bytes of one encoder row.

    Raises:
        ConfigError: `max_model_len` leaves no room for a prompt and an answer, or `encoder_cache_budget` fails.
    """
    if max_model_len < 2:
        raise ConfigError(f"<<param=>>{max_model_len} leaves no room for a prompt and an answer", param="max_model_len")
    items = max_item_rows(config, info, max_model_len)
    crossing = {name: rows for name, rows in items.items() if name not in info.placeholder_ids}
    cross_rows = max((_cross_rows(config, info, name, rows, max_model_len) for name, rows in crossing.items()), default=0)
    step_cross_rows = max([cross_rows, *(config.max_num_seqs * rows for rows in crossing.values())])
    inside = [rows for name, rows in items.items() if name in info.placeholder_ids]
    largest = max(inside, default=1)
    attention = info.prompt_attention
    span = max_model_len if attention.is_at_once else 1 if attention.spans is None else largest + attention.brackets
    step_rows = max(config.max_num_batched_tokens, span + config.max_num_seqs - 1)
    embeds = {PROMPT_EMBEDS: min(PROMPT_EMBEDS_ROWS, max_model_len)} if config.enable_prompt_embeds else {}
    cached = items | embeds if info.modalities or embeds else None
    # a prompt needs its cross-attention items at once, and beside them any one item that has a place in the prompt
    together = cross_rows + max((rows for name, rows in (cached or {}).items() if name not in crossing), default=0)
    encoder_cache_bytes = 0 if cached is None else encoder_cache_budget(config, cached, row_bytes, together)
    if config.parts == "encoder":  # rows of one step (its budget, or one larger request) and their copies on the host
        encoder_cache_bytes = 2 * max(*items.values(), config.max_encoder_tokens, max_model_len, cross_rows) * row_bytes
    return MaxSizes(max_model_len, step_rows, encoder_cache_bytes, items, cross_rows, step_cross_rows)


def max_cross_rows(config: EngineConfig, info: ProcessingInfo, max_model_len: int) -> int:
    """Return how many encoder rows a prompt may have in all in the modality that is read by cross-attention."""
    items = {
        name: rows for name, rows in max_item_rows(config, info, max_model_len).items() if name not in info.placeholder_ids
    }
    return max((_cross_rows(config, info, name, rows, max_model_len) for name, rows in items.items()), default=0)


def _cross_rows(config: EngineConfig, info: ProcessingInfo, modality: str, rows: int, max_model_len: int) -> int:
    """Return how many encoder rows a prompt may have in all in a modality that is read by cross-attention.

    Only a model with a token for each item takes several: as many as `limit_mm_per_prompt` allows or, without this limit, as
    many as have `max_model_len` rows.

    Args:
        rows: of its largest item.
    """
    if info.cross_token is None:
        return rows
    limit = config.limit_mm_per_prompt.get(modality)
    return max(rows, max_model_len) if limit is None else limit * rows


def _offloaded_bytes(config: EngineConfig, kv_cache: int) -> int:
    """Return the bytes of KV blocks outside the cache: in memory, waiting to be written, and read for waiting prompts."""
    transfer = config.kv_transfer.of_rank(0, config.num_ranks)
    return transfer.memory_bytes + transfer.shared_bytes + QUEUE_BYTES + kv_cache if transfer else 0


def num_cache_blocks(
    config: EngineConfig, specs: Sequence[CacheSpec], sizes: MaxSizes, device: torch.device
) -> tuple[int, ...]:
    """Return the KV-cache blocks of each cache group.

    It is enough for `max_num_seqs` sequences or, if the budget is smaller, for as many as fit, but at least one.

    Raises:
        ConfigError: the budget does not hold one sequence.
    """
    budget, groups, size = cache_budget(config, device), group_layers(specs), config.block_size
    _check_chunks(groups, size)
    is_state = [group.spec.kind == "state" for group in groups]
    keys = [sizes.keys_of_group(group) for group in groups]
    fewest = [group.max_blocks(count, sizes.step_rows, size) for count, group in zip(keys, groups, strict=True)]
    most = [
        group.max_blocks_of_batch(config.max_num_seqs, count, sizes.step_rows, size)
        for count, group in zip(keys, groups, strict=True)
    ]
    per_sequence = sequence_cache_bytes(specs, sizes, size)
    all_seqs = sum(count * group.block_bytes(size) for count, group in zip(most, groups, strict=True))
    if per_sequence > budget:
        sequence, settings = _name_sequence(specs, sizes, size, budget)
        lower = f"lower {' or '.join(settings)}, or " if len(settings) > 1 else f"lower {settings[0]} or " if settings else ""
        raise ConfigError(
            f"{sequence} needs {per_sequence:,} bytes of key/value cache, but {budget:,} are allowed: "
            f"{_advise_block_size(specs, sizes, size, budget)}{lower}raise <<param>> to {per_sequence}",
            param="kv_cache_memory_bytes",
        )
    if all_seqs <= budget:
        return tuple(most)
    # beyond one sequence; states serve sequences of any length, so they get half of what is left, or what others cannot use
    extra_bytes = {True: 0, False: 0}
    for few, many, group, state in zip(fewest, most, groups, is_state, strict=True):
        extra_bytes[state] += (many - few) * group.block_bytes(size)
    left = budget - per_sequence
    states = min(extra_bytes[True], max(left // 2, left - extra_bytes[False]))
    shares = {True: states, False: min(left - states, extra_bytes[False])}
    return tuple(
        few + (many - few) * shares[state] // max(1, extra_bytes[state])
        for few, many, state in zip(fewest, most, is_state, strict=True)
    )


def _check_chunks(groups: Sequence[CacheGroup], block_size: int) -> None:
    for chunk in (group.spec.window for group in groups if group.spec.kind == "chunk"):
        if chunk is not None and chunk % block_size:
            raise ConfigError(
                f"<<param=>>{block_size} does not divide {chunk}, the tokens of a chunk of this model's attention; "
                f"give a divisor of {chunk}, such as {math.gcd(chunk, EngineConfig.block_size)}",
                param="block_size",
            )


def max_cached_blocks(config: EngineConfig, specs: Sequence[CacheSpec], blocks: Sequence[int]) -> list[int] | None:
    """Return the maximum number of cached blocks of each cache group; None for no limit.

    States and the other groups share `prefix_cache_bytes` in proportion to their pools; within each part, all groups cache as
    many blocks.
    """
    if config.prefix_cache_bytes is None:
        return None
    groups, size = group_layers(specs), config.block_size
    pools, sizes = {True: 0, False: 0}, {True: 0, False: 0}
    for count, group in zip(blocks, groups, strict=True):
        pools[group.spec.kind == "state"] += count * group.block_bytes(size)
        sizes[group.spec.kind == "state"] += group.block_bytes(size)
    states = config.prefix_cache_bytes * pools[True] // max(1, sum(pools.values()))
    shares = {True: states, False: config.prefix_cache_bytes - states}
    counts = {state: shares[state] // max(1, sizes[state]) for state in shares}
    return [counts[group.spec.kind == "state"] for group in groups]


def sequence_cache_bytes(specs: Sequence[CacheSpec], sizes: MaxSizes, block_size: int) -> int:
    """Return the KV-cache bytes of the longest sequence."""
    groups = group_layers(specs)
    return sum(
        group.max_blocks(sizes.keys_of_group(group), sizes.step_rows, block_size) * group.block_bytes(block_size)
        for group in groups
    )


def _name_sequence(specs: Sequence[CacheSpec], sizes: MaxSizes, block_size: int, budget: int) -> tuple[str, list[str]]:
    """Describe the longest sequence, which does not fit into the budget, and return it with the settings to lower."""
    several = sizes.cross_rows > max(sizes.item_rows.values(), default=0)
    settings = ["<<limit_mm_per_prompt>>"] if several else []
    shortest = replace(sizes, max_model_len=1)
    if sizes.cross_rows > sizes.max_model_len and sequence_cache_bytes(specs, shortest, block_size) > budget:
        return f"a sequence whose encoder input has {sizes.cross_rows} rows", settings
    return f"a sequence of <<max_model_len=>>{sizes.max_model_len} tokens", ["<<max_model_len>>", *settings]


def _advise_block_size(specs: Sequence[CacheSpec], sizes: MaxSizes, block_size: int, budget: int) -> str:
    """Return advice to lower `block_size` if a sequence would fit with the default size, else ""."""
    default = EngineConfig.block_size
    fits = block_size > default and sequence_cache_bytes(specs, sizes, default) <= budget
    return f"lower <<block_size=>>{block_size}, where {default} would fit, or " if fits else ""


def max_len_in_cache(
    config: EngineConfig, specs: Sequence[CacheSpec], device: torch.device, cross_rows: int = _UNLIMITED_ROWS
) -> int:
    """Return the tokens, in whole blocks, of the longest single sequence that the budget of the KV cache holds.

    Args:
        cross_rows: encoder rows that it may read by cross-attention; it has room for no more of them than for tokens.

    Raises:
        ConfigError: the budget does not hold one block.
    """
    budget, size = cache_budget(config, device), config.block_size

    def taken(blocks: int) -> int:
        sizes = MaxSizes(blocks * size, config.max_num_batched_tokens, cross_rows=min(blocks * size, cross_rows))
        return sequence_cache_bytes(specs, sizes, size)

    if budget < taken(1):
        block = EngineConfig.block_size
        sizes = MaxSizes(block, config.max_num_batched_tokens, cross_rows=min(block, cross_rows))
        advice = _advise_block_size(specs, sizes, size, budget)
        raise ConfigError(
            f"{budget:,} bytes of key/value cache hold no block of {size} tokens, which takes {taken(1):,}: "
            f"{advice}raise <<param>> to {taken(1)} for each {size} tokens of a sequence",
            param="kv_cache_memory_bytes",
        )
    return (bisect_right(range(1, _MAX_BLOCKS), budget, key=taken)) * size


def encoder_cache_budget(config: EngineConfig, item_rows: Mapping[str, int], row_bytes: int, together: int = 0) -> int:
    """Return the capacity of the encoder cache in bytes.

    The default holds all rows that one prompt needs at once. If `encoder_cache_bytes` holds fewer, the scheduler refuses
    prompts that need more.

    Args:
        item_rows: from `max_item_rows`.
        row_bytes: bytes of one row.
        together: rows of several items that a prompt needs at once.

    Raises:
        ConfigError: `encoder_cache_bytes` does not hold the largest item.
    """
    rows, modality = max(((rows, name) for name, rows in item_rows.items()), default=(0, ""))
    if config.encoder_cache_bytes is None:
        return max(_MIN_ENCODER_CACHE, max(_ITEMS_IN_ENCODER_CACHE * rows, together) * row_bytes)
    if config.encoder_cache_bytes < rows * row_bytes:
        item = f"the largest {modality} has {rows} encoder rows, {rows * row_bytes} bytes"
        raise ConfigError(
            f"<<param=>>{config.encoder_cache_bytes} is too small: {item}; raise it, or lower <<max_model_len>> or "
            "the sizes in <<mm_processor_kwargs>>",
            param="encoder_cache_bytes",
        )
    return config.encoder_cache_bytes


def plan_memory(config: EngineConfig, model: Model, info: ProcessingInfo, sizes: MaxSizes) -> MemoryPlan:
    """Plan the memory of an engine. The model may be on the meta device. Raise ConfigError as `num_cache_blocks` does."""
    device, dtype = config.torch_device, model.cache_specs[0].dtype
    decodes = config.parts != "encoder"
    groups = group_layers(model.cache_specs)
    block_bytes = [group.block_bytes(config.block_size) for group in groups]
    blocks = num_cache_blocks(config, model.cache_specs, sizes, device) if decodes else (0,) * len(block_bytes)
    items = sizes.item_rows
    per_token = [count for count, group in zip(blocks, groups, strict=True) if group.spec.kind != "state"]
    step = _step_limits(config, model, sizes, max(per_token, default=0))
    rows, keys = step.rows, step.keys
    hidden, sampled = rows * model.hidden_size * dtype.itemsize, min(rows, config.max_num_seqs)
    encoded = {name: most for name, most in items.items() if config.encodes(name)}
    call_rows = {name: max(most, config.max_encoder_tokens) for name, most in encoded.items()}  # maximum rows of a call
    processed = max((model.input_bytes(name, most) for name, most in encoded.items()), default=0)
    limits = _item_limits(config, model, sizes)
    streams = model.max_streams if isinstance(model, SupportsStreams) and decodes else 0
    chunked = isinstance(info, SupportsTranscription) and info.stream_rule() is not None  # lost states need all chunks again
    decoding = {name: decoding_bytes(name, config.media, info.decode_spec) for name in encoded}
    worst = max(decoding, key=lambda name: decoding[name], default="")
    blocks_per_sequence = -(-sizes.keys // config.block_size)
    return MemoryPlan(
        weights=weight_bytes(model, device),
        kv_cache=sum(map(mul, blocks, block_bytes)),
        encoder_cache=sizes.encoder_cache_bytes + (QUEUE_BYTES if config.ec_transfer and config.ec_transfer.rows else 0),
        decoder_step=max(_forward_bytes(config, model, replace(step, rows=n)) for n in _worst_counts(rows)) if decodes else 0,
        logits_step=hidden
        + max(
            sampling_bytes(model.vocab_size, sampled, min(rows, LOGITS_ROWS), dtype, device),
            _pooling_bytes(model, rows, dtype),
        )
        + _head_adapter_bytes(config, model, step, sampled)
        + config.max_num_seqs * 2 * _pooled_rows(model) * model.hidden_size * 4,  # states of poolings before and after a step
        encoder_step=max(
            (model.encoder_bytes(name, n, step) for name, most in call_rows.items() for n in _worst_counts(most)), default=0
        )
        + (_encoder_adapter_bytes(config, model, step) if call_rows else 0),
        media_held=((MEDIA_BYTES + (1 + config.media_workers) * processed) if items or config.enable_prompt_embeds else 0)
        + chunked * streams * sum(model.input_bytes(name, min(MAX_STREAM_ROWS, sizes.max_model_len)) for name in encoded),
        processor_cache=config.mm_processor_cache_bytes + (QUEUE_BYTES if config.ec_transfer.items else 0) if items else 0,
        offloaded=_offloaded_bytes(config, sum(map(mul, blocks, block_bytes))) if decodes else 0,
        kept_rows=config.kept_row_bytes + config.ec_transfer.shared_bytes,
        graphs=(decode_graphs.graph_bytes(model, config.max_num_seqs, len(blocks), blocks_per_sequence, step) if decodes else 0)
        + encoder_graphs.graph_bytes(model, call_rows, step),
        # on a GPU, each worker holds a chunk of its input, of an intermediate result and of its output
        media_step=4 * config.media_workers * MAX_TRANSFER_BYTES if items and config.media_device != "cpu" else 0,
        sequences=2 * config.max_num_seqs * sizes.max_model_len * _TOKEN_BYTES + _token_vector_bytes(model, keys),
        decoding=config.media_workers * decoding.get(worst, 0),
        max_items=tuple(find_max_item(name, info, limits) for name in items),
        decoding_limits=f"max_bytes and {_DECODED_BY.get(worst, 'max_video_bytes')}",
        encode_beside=config.uses_async_scheduling and decodes,
        streams=streams * model.stream_bytes(max(encoded.values(), default=0)) if isinstance(model, SupportsStreams) else 0,
        adapters=adapter_bytes(config, model),
        traffic=_traffic(config, model),
        draft_cache=draft_cache_bytes(config, model, sizes.max_model_len) if decodes else 0,
        kernels=amx_bytes(1 + config.uses_async_scheduling, step.dequantized) if device.type == "cpu" else 0,
        device=str(device),
        media_device="cpu" if config.media_device == "cpu" else str(config.torch_media_device),
    )


def _traffic(config: EngineConfig, model: Model) -> RankTraffic | None:
    """Return what a rank sends; None without several ranks."""
    traffic = rank_traffic(cast(nn.Module, model))
    if traffic is None or config.mm_encoder_tp_mode != "data":
        return traffic
    return replace(traffic, encoder_row_bytes=-(-row_bytes(model) // config.num_ranks))


def _step_limits(config: EngineConfig, model: Model, sizes: MaxSizes, blocks: int) -> StepLimits:
    """Return the limits of the largest step. `blocks`: of the largest cache group with keys; 0 if there is none."""
    keys = config.max_num_seqs * sizes.keys
    if blocks:
        keys = min(keys, blocks * config.block_size)
    rows = min(sizes.step_rows, keys)
    quantized_kv, formats = config.kv_cache_dtype != "auto", config.quantization and parse_quantization(config.quantization)
    dequantized = getattr(model, "formats", None) is not None or bool(formats and formats.uses_int4)
    eight_bits = bool(formats and formats.uses_8_bits)
    step = StepLimits(rows, keys, sizes.keys, config.torch_device, eight_bits, quantized_kv, dequantized)
    return replace(step, cross_keys=sizes.step_cross_rows)


def _adapted_layers(model: Model) -> AdaptedLayers | None:
    """Return the layers that adapters of requests change. Nothing of adapters is imported if the model takes none."""
    if getattr(model, "request_adapters", None) is None:
        return None
    from ...models.request_adapters import adapted_layers

    return adapted_layers(model)


def adapter_bytes(config: EngineConfig, model: Model) -> int:
    """Return the bytes of all adapters that requests choose."""
    layers = _adapted_layers(model)
    return 0 if layers is None else layers.capacity(config.max_loras, config.max_lora_rank)


def _encoder_adapter_bytes(config: EngineConfig, model: Model, step: StepLimits) -> int:
    layers = _adapted_layers(model)
    return 0 if layers is None else layers.step_bytes("encoder", step, config.max_lora_rank)


def _head_adapter_bytes(config: EngineConfig, model: Model, step: StepLimits, sampled: int) -> int:
    layers, rows = _adapted_layers(model), min(step.rows, max(sampled, LOGITS_ROWS))
    return 0 if layers is None else layers.step_bytes("head", replace(step, rows=rows), config.max_lora_rank)


def _forward_bytes(config: EngineConfig, model: Model, step: StepLimits) -> int:
    layers = _adapted_layers(model)
    if layers is None:
        return model.forward_bytes(step)
    rank, crossing = config.max_lora_rank, replace(step, rows=step.cross_keys or step.keys)
    largest = max(layers.step_bytes("decoder", step, rank), layers.step_bytes("cross", crossing, rank))
    experts = layers.step_bytes("experts", step, rank)  # beside it, copies of the rows of one adapter, and of their results
    copies = 4 * step.rows * model.hidden_size * model.cache_specs[0].dtype.itemsize if experts else 0
    return model.forward_bytes(step) + max(largest, experts + copies)


def resolve_cache_memory(
    config: EngineConfig, build: Callable[[], Model], info: ProcessingInfo, reserved: Callable[[int], int] = lambda length: 0
) -> EngineConfig:
    """Return the options with `kv_cache_memory_bytes` set from the free memory of a GPU, unless it is set already.

    The KV cache gets what everything else leaves. If `max_model_len` is None, the model's maximum length is halved until one
    sequence of that length fits.

    Args:
        build: builds the model on the meta device.
        reserved: returns bytes for something else on the device, from the maximum length of a sequence.

    Raises:
        ConfigError: no sequence fits.
    """
    device = config.torch_device
    if device.type == "cpu" or config.kv_cache_memory_bytes is not None:
        return config
    allowed, model = int(torch.cuda.mem_get_info(device)[0] * config.gpu_memory_fraction), build()
    length = check_max_model_len(config.max_model_len, model.max_positions)
    shortest = length
    while config.max_model_len is None and shortest >= 2 * max(2, config.block_size):
        shortest //= 2

    def plan(length: int) -> tuple[MaxSizes, int, int]:
        """Return the sizes, the KV-cache bytes of one sequence, and the bytes that everything else leaves."""
        unlimited = replace(config, kv_cache_memory_bytes=_UNLIMITED_BYTES, max_model_len=length)
        sizes = max_sizes(unlimited, info, row_bytes(model), length)
        memory = plan_memory(unlimited, model, info, sizes)
        left = allowed - reserved(length) - memory.total + memory.kv_cache
        return sizes, sequence_cache_bytes(model.cache_specs, sizes, config.block_size), left

    sizes, per_sequence, left = plan(length)
    if left < per_sequence:
        sizes, per_sequence, left = plan(shortest)
    if left < per_sequence:
        sequence, settings = _name_sequence(model.cache_specs, sizes, config.block_size, left)
        lower = ", ".join((*settings, "<<max_num_seqs>>", "<<max_num_batched_tokens>>"))
        raise ConfigError(
            f"{sequence} needs {per_sequence:,} bytes of key/value cache, and everything else leaves {max(0, left):,} of "
            f"{allowed:,} on {device}: {_advise_block_size(model.cache_specs, sizes, config.block_size, left)}lower {lower} or "
            "<<max_encoder_tokens>>, or raise <<gpu_memory_fraction>>",
            param="max_model_len",
        )
    sizes, per_sequence, left = plan(length)
    while left < per_sequence:
        length //= 2
        sizes, per_sequence, left = plan(length)
    if length < model.max_positions and config.max_model_len is None:
        _log.warning("max_model_len is lowered to %d to fit; the model has %d positions", length, model.max_positions)
        return replace(config, kv_cache_memory_bytes=left, max_model_len=length)
    return replace(config, kv_cache_memory_bytes=left)


def check_cache_memory(config: EngineConfig) -> None:
    """Raise ConfigError if `kv_cache_memory_bytes` is more than the memory of the device."""
    size, device = config.kv_cache_memory_bytes, config.torch_device
    if size is None:
        return
    has, where = _memory_of(device)
    if size > has:
        raise ConfigError(
            f"<<param=>>{size} is above the {has:,} bytes of memory of {where}; lower it, or leave it out",
            param="kv_cache_memory_bytes",
        )


def check_adapter_memory(config: EngineConfig, model: Model) -> None:
    """Raise ConfigError if `max_loras` adapters of rank `max_lora_rank` are more than the memory of the device."""
    layers, (has, where) = _adapted_layers(model), _memory_of(config.torch_device)
    if layers is None or adapter_bytes(config, model) <= has:
        return
    fit = has // layers.capacity(1, config.max_lora_rank)
    reason = f"<<param>> is above {fit}: the {has:,} bytes of memory of {where} hold no more adapters of rank <<max_lora_rank>>"
    advice = "lower one of the two"
    raise ConfigError(f"{reason}; {advice}", code="over_limit", param="max_loras", limit=fit, value=config.max_loras)


def _memory_of(device: torch.device) -> tuple[int, str]:
    """Return the bytes of memory of a device, and what an error calls it."""
    if device.type == "cpu":
        return host_memory(), "this machine"
    return torch.cuda.mem_get_info(device)[1], str(device)


def row_bytes(model: Model) -> int:
    """Return the bytes of one encoder row."""
    return model.row_size * model.cache_specs[0].dtype.itemsize


def _item_limits(config: EngineConfig, model: Model, sizes: MaxSizes) -> ItemLimits:
    setting = "max_model_len" if config.max_model_len is not None else "max_position_embeddings of the model"
    if config.max_model_len is None and sizes.max_model_len < model.max_positions:
        setting = "kv_cache_memory_bytes"
    tokens = sizes.max_model_len - 1  # one token is left for the answer
    return ItemLimits(tokens, setting, sizes.encoder_cache_bytes, row_bytes(model), config.media)


def _worst_counts(rows: int) -> range:
    """Return the row counts that may need the most memory. Padding is not monotonic: n - 1 rows can take more than n."""
    return range(max(1, rows - 1), rows + 1)


def sampling_bytes(vocab: int, sampled: int, prompt: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes of logits and sampling for `sampled` rows, or for log probabilities of `prompt` rows.

    The head makes logits in the model's dtype and in float32. Sampling holds the original logits, the changed ones, scaled
    ones and probabilities; a CPU sorts one row at a time, a GPU all rows, with sums in float64. Log probabilities hold their
    table, ranks and a mask.
    """
    head = dtype.itemsize + 4
    row, once = (_SAMPLED_ROW, _SORTED_ROW) if device.type == "cpu" else (_SAMPLED_ROW_GPU, 0)
    return vocab * max(sampled * (head + row) + once, prompt * (head + _PROMPT_LOGPROBS))


def _pooling_bytes(model: Model, rows: int, dtype: torch.dtype) -> int:
    """Return the bytes of the vectors of a step's tokens: in the model's dtype, in float32, and scaled to length 1."""
    size = model.token_size if isinstance(model, SupportsPooling) else model.hidden_size
    return rows * size * (dtype.itemsize + 8)


def _pooled_rows(model: Model) -> int:
    """Return how many rows the checkpoint's pooling keeps of a prompt."""
    return model.pooling.count("+") + 1 if isinstance(model, SupportsPooling) else 1


def _token_vector_bytes(model: Model, tokens: int) -> int:
    """Return the bytes on the host of the float32 vectors of tokens, in running sequences and in results.

    They are planned for models that are made for these, and not for single requests to others.
    """
    return 2 * tokens * model.token_size * 4 if isinstance(model, SupportsPooling) and model.pooling == "tokens" else 0


def decoding_bytes(modality: str, media: MediaPolicy, spec: DecodeSpec) -> int:
    """Return the maximum bytes of decoding an item: its file, its pixels or samples, and a resized or joined copy of them."""
    samples = int(media.max_audio_seconds * spec.rate)
    if spec.max_audio_samples is not None:
        samples = min(samples, spec.max_audio_samples)
    decoded = {"image": 3 * media.max_pixels, "audio": 4 * samples}
    return media.max_bytes + 2 * decoded.get(modality, media.max_video_bytes)
