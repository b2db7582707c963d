"""The memory plan compared with allocated tensors, measured peaks, and a full load under a memory limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fallbacks
import family
import oracle
import pytest
import torch
from cpu import needs_int8
from measured import held, peak_bytes
from parity import ROWS
from prompt_attention import ATTENTIONS
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import ConfigError
from sensorium.engine.config import EngineConfig, make_config
from sensorium.engine.kv_cache.block_pool import BlockPools
from sensorium.engine.model_files import load_model_files, resolve
from sensorium.engine.setup import loader, memory
from sensorium.engine.setup.doctor import explain
from sensorium.engine.setup.loader import load_engine
from sensorium.engine.setup.memory import MaxSizes, max_len_in_cache, num_cache_blocks, sampling_bytes, sequence_cache_bytes
from sensorium.engine.setup.model_source import with_cache_dtype
from sensorium.engine.setup.resolve import load_processing
from sensorium.engine.worker.cache_tensors import allocate_caches
from sensorium.engine.worker.sampler import gather_logprobs, sample
from sensorium.engine.worker.sampling_state import SamplingState
from sensorium.kernels import native
from sensorium.kernels.linear import shares_table
from sensorium.kernels.metadata import AttentionMetadata
from sensorium.mm.embeddings import PROMPT_EMBEDS_ROWS
from sensorium.mm.rules import CAUSAL
from sensorium.models.interface import CacheSpec, ForwardBatch, StepLimits
from sensorium.models.memory_formulas import AMX_ROWS, AMX_SUMS
from sensorium.models.registry import find_architecture
from sensorium.models.weights import load, quantize, weight_bytes
from sensorium.processors.text.tokenizer import Tokenizer

TINY_VL = Path(__file__).parents[3] / "assets" / "tiny-vl"
CPU = torch.device("cpu")
EIGHT_BITS = [pytest.param("linear=onednn", marks=needs_int8), pytest.param("int8_linear=torch", marks=needs_int8)]
"""Backends with 8-bit products: C++ if it is built, and torch."""
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
CROSS = [CacheSpec("cross", 1, 8, torch.bfloat16)]
SMALL = {"max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20, "device": "cpu"}


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.build_checkpoint(tmp_path_factory.mktemp("audio"), "qwen2_audio")


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.build_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2_vl")


@pytest.fixture(params=["", "attention=torch,varlen_attention=torch", *EIGHT_BITS])
def int8(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Select each set of backends in turn. Return True if its products are in 8 bits."""
    monkeypatch.setenv("SENSORIUM_KERNELS", request.param)
    return "linear=" in request.param


def build(folder: Path, dtype: torch.dtype, device: torch.device, quantization: str | None = None) -> Any:
    files = load_model_files(folder)
    model = resolve(find_architecture(files.architecture).model)(files.config, dtype, device)
    if device.type != "meta":
        if quantization is not None:
            quantize(model, quantization)
        load(folder, model)
    return model


@both_dtypes
def test_planned_weights_equal_the_held_bytes(audio: Path, dtype: torch.dtype) -> None:
    for folder in (TINY_VL, audio):
        planned = weight_bytes(build(folder, dtype, torch.device("meta")), CPU)
        assert planned == held(build(folder, dtype, CPU))


@both_dtypes
def test_a_tied_head_is_planned_once(dtype: torch.dtype, tmp_path: Path) -> None:
    """PaliGemma's head is its table of token embeddings, in one copy where the products can read rows of it."""
    planned = {}
    for tied in (True, False):
        folder = family.save(ROWS["paligemma"], tmp_path / str(tied), tie=tied)
        model = build(folder, dtype, torch.device("meta"))
        planned[tied] = weight_bytes(model, CPU)
        assert planned[tied] == held(build(folder, dtype, CPU))
    table = model.language_model.embed_tokens.weight
    if shares_table(table.shape[1], CPU, dtype):
        assert planned[False] - planned[True] >= 0.9 * table.nbytes


@needs_int8
def test_planned_weights_in_8_bits(audio: Path) -> None:
    for folder in (TINY_VL, audio):
        model = build(folder, torch.float32, torch.device("meta"))
        quantize(model, "int8")
        planned, real = weight_bytes(model, CPU), held(build(folder, torch.float32, CPU, "int8"))
        assert real <= planned <= 1.02 * real


def test_planned_caches_equal_the_allocated_ones() -> None:
    config, files = make_config(TINY_VL, {"max_model_len": 512, **SMALL}), load_model_files(TINY_VL)
    info = load_processing(files, {})
    core, _ = load_engine(config, files, info, Tokenizer(files.path))
    plan = explain(config)
    assert plan.kv_cache == sum(cache.nbytes for cache in core.executor.runner.caches.tensors)
    assert plan.encoder_cache == core.scheduler.encoder_cache.capacity
    assert plan.total > plan.kv_cache + plan.weights + plan.activations


def test_an_encoder_call_beside_steps_adds_to_their_memory() -> None:
    after, beside = (explain(make_config(TINY_VL, {**SMALL, "async_scheduling": flag})) for flag in (False, True))
    assert after.activations == max(after.decoder_step, after.logits_step, after.encoder_step)
    assert beside.activations == max(beside.decoder_step, beside.logits_step) + beside.encoder_step > after.activations


@pytest.mark.parametrize(("options", "buffers"), [({}, 1), ({"async_scheduling": True}, 2), ({"quantization": "int4"}, 2)])
def test_buffers_of_amx_tiles_are_planned(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], buffers: int) -> None:
    """A thread keeps 16 MB of packed rows, which are torch's in no step; 4-bit weights have buffers of their own."""
    config = make_config(TINY_VL, {"max_model_len": 512, **SMALL, **options})
    monkeypatch.setattr(native, "products", lambda: "avx2")
    assert explain(config).kernels == 0
    monkeypatch.setattr(native, "products", lambda: "amx")
    plan = explain(config)
    assert 0 <= plan.kernels - buffers * AMX_ROWS <= 2 * torch.get_num_threads() * AMX_SUMS
    assert replace(plan, kernels=0).total == plan.total - plan.kernels
    assert "buffers of kernels" in str(plan)
    header = Path(native.__file__).parent / "cpu" / "amx.h"
    assert f"PACKED_BYTES = {AMX_ROWS >> 20} << 20;" in header.read_text()


def test_vectors_of_tokens_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of late interaction keep the vectors of tokens on the host until the prompt is computed."""
    config = make_config(TINY_VL, {"max_model_len": 512, **SMALL})
    model, plain = build(TINY_VL, torch.float32, torch.device("meta")), explain(config)
    monkeypatch.setattr(type(model), "pooling", "tokens")
    assert explain(config).sequences - plain.sequences == 2 * config.max_num_seqs * 512 * model.hidden_size * 4


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Fake a GPU with the given free bytes, for plans only."""

    def free(size: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a card")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (size, size))

    return free


def test_on_a_gpu_the_kv_cache_takes_what_everything_else_leaves(card: Callable[[int], None]) -> None:
    options = {"device": "cuda", "max_model_len": 2048, "max_num_seqs": 512, "dtype": "bfloat16"}
    card(1 << 30)
    plan = explain(make_config(TINY_VL, options))
    card(3 << 28)
    less = explain(make_config(TINY_VL, options))
    block = 16 * 512  # the plan is closer than one block of each layer
    for one, free in ((plan, 1 << 30), (less, 3 << 28)):
        assert free * 0.85 - block * 64 < one.total <= free * 0.85
        parts = (one.weights, one.kv_cache, one.encoder_cache, one.activations, one.graphs, one.media_step)
        assert one.total == sum(parts)
        assert one.graphs > 0
        assert "total on the host" in str(one)
        assert "total on cuda:0" in str(one)
    assert plan.kv_cache - less.kv_cache == pytest.approx((1 << 28) * 0.85, rel=1e-3)
    card(8 << 30)
    here, there = (
        explain(make_config(TINY_VL, {**options, "max_num_seqs": 4096, "media_device": at})) for at in ("cpu", "cuda")
    )
    assert here.kv_cache - there.kv_cache == pytest.approx(there.media_step, rel=1e-3)
    assert here.media_step == 0 < there.media_step
    assert "part of that total" in str(there)
    beside = explain(make_config(TINY_VL, {"max_model_len": 2048, "device": "cpu", "media_device": "cuda"}))
    plain = explain(make_config(TINY_VL, {"max_model_len": 2048, "device": "cpu"}))
    assert beside.total == plain.total
    assert "not in the total" in str(beside).splitlines()[-3]


def test_a_gpu_that_is_too_small_is_reported_before_weights_are_read(card: Callable[[int], None]) -> None:
    card(256 << 20)
    with pytest.raises(ConfigError, match=r"2048 tokens needs .* leaves .* on cuda:0: lower max_model_len, "):
        explain(make_config(TINY_VL, {"device": "cuda", "max_model_len": 2048}))


def test_a_gpu_plan_of_a_fallback_model_measures_its_encoder(
    card: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fallback models have no closed form, so the plan runs their encoder on the meta device first."""
    card(8 << 30)
    fallbacks.hide_native(monkeypatch)
    config = make_config(fallbacks.build(tmp_path / "borrowed", "ovis2"), {"device": "cuda", "max_model_len": 512})
    files = load_model_files(config.model)
    monkeypatch.setattr(loader, "computing_on", lambda device: nullcontext())
    with pytest.raises((AssertionError, RuntimeError), match="CUDA"):  # raised by torch when it allocates
        load_engine(config, files, load_processing(files, {}), Tokenizer(files.path))
    assert explain(config).kv_cache > 0


@pytest.mark.parametrize("options", [{"max_model_len": 1}, {"limit_mm_per_prompt": {"audio": 1}}, {"batch_invariant": True}])
def test_explain_refuses_what_the_engine_refuses(options: dict[str, Any]) -> None:
    options = {"dtype": "float16", **SMALL, **options}
    with pytest.raises(ConfigError) as refused:
        LLM(TINY_VL, **options)
    with pytest.raises(ConfigError) as explained:
        explain(make_config(TINY_VL, options))
    assert str(explained.value) == str(refused.value)


def test_an_engine_explains_itself() -> None:
    llm = LLM(TINY_VL, max_model_len=512, **SMALL)
    assert llm.explain() == explain(llm.config)
    assert str(llm.explain()).splitlines()[0].startswith("weights")


def test_num_cache_blocks() -> None:
    specs, sizes = [CacheSpec("full", 1, 8, torch.bfloat16)], MaxSizes(100, 64)  # 512 bytes a block
    config = EngineConfig("m", max_num_seqs=3, block_size=16)
    assert num_cache_blocks(config, specs, sizes, CPU) == (3 * 7,)
    small = EngineConfig("m", max_num_seqs=3, block_size=16, kv_cache_memory_bytes=4700)
    assert num_cache_blocks(small, specs, sizes, CPU) == (9,)
    assert max_len_in_cache(small, specs, CPU) == 9 * 16
    message = r"needs 5,120 bytes .* but 4,700 are allowed: lower max_model_len or raise kv_cache_memory_bytes"
    with pytest.raises(ConfigError, match=message):
        num_cache_blocks(small, specs, MaxSizes(160, 64), CPU)
    across = "a sequence whose encoder input has 160 rows needs 5,120 bytes .* allowed: raise kv_cache_memory_bytes to 5120$"
    with pytest.raises(ConfigError, match=across):
        num_cache_blocks(small, CROSS, MaxSizes(40, 64, item_rows={"audio": 160}, cross_rows=160), CPU)


def test_each_cache_group_has_room_for_its_own_keys() -> None:
    """Only layers with cross-attention hold encoder rows, and only they have no room for tokens."""
    specs, config = [CacheSpec("full", 1, 8, torch.bfloat16), *CROSS], EngineConfig("m", max_num_seqs=3, block_size=16)
    for length, rows in ((40, 160), (160, 40)):
        sizes = MaxSizes(length, 64, item_rows={"image": rows}, cross_rows=rows)
        assert num_cache_blocks(config, specs, sizes, CPU) == (3 * -(-length // 16), 3 * -(-rows // 16))
        assert sequence_cache_bytes(specs, sizes, 16) == 13 * 512
    tight = replace(config, kv_cache_memory_bytes=13 * 512)
    assert num_cache_blocks(tight, specs, sizes, CPU) == (10, 3)
    assert max_len_in_cache(tight, specs, CPU, cross_rows=40) == 160
    assert max_len_in_cache(tight, specs, CPU) == 6 * 16
    pools = BlockPools(specs, (10, 3), 16)
    assert (pools.capacity, pools.cross_capacity) == (160, 48)


@pytest.mark.parametrize(("limits", "rows"), [({"image": 7}, 2100), ({}, 5000), ({"image": 1}, 1200)])
def test_the_default_encoder_cache_holds_all_cross_items_of_a_prompt(
    limits: dict[str, int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "max_item_rows", lambda *_: {"image": 300})
    info: Any = SimpleNamespace(prompt_attention=CAUSAL, placeholder_ids={}, cross_token=3, modalities=("image",))
    config = EngineConfig("m", limit_mm_per_prompt=limits)
    assert memory.max_sizes(config, info, 1 << 20, 5000).encoder_cache_bytes == rows << 20
    beside = memory.max_sizes(replace(config, enable_prompt_embeds=True), info, 1 << 20, 5000)
    assert beside.encoder_cache_bytes >= beside.cross_rows + min(PROMPT_EMBEDS_ROWS, 5000) << 20


def test_a_limit_on_items_that_no_gpu_holds_is_named_at_once(
    card: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All items of a prompt that are read by cross-attention have room; a shorter max_model_len does not help."""
    card(1 << 30)
    folder, lengths, plan = family.save(ROWS["mllama"], tmp_path / "mllama"), [], memory.plan_memory

    def spy(config: Any, model: Any, info: Any, sizes: MaxSizes) -> Any:
        lengths.append(sizes.max_model_len)
        return plan(config, model, info, sizes)

    monkeypatch.setattr(memory, "plan_memory", spy)
    options = {"device": "cuda", "limit_mm_per_prompt": {"image": 10**6}}
    message = r"whose encoder input has 68000000 rows needs .* on cuda:0: lower limit_mm_per_prompt, max_num_seqs"
    with pytest.raises(ConfigError, match=message):
        explain(make_config(folder, options))
    assert len(lengths) == 2


def test_errors_advise_smaller_blocks_where_these_would_fit() -> None:
    specs = [CacheSpec("full", 1, 8, torch.bfloat16)]
    config = EngineConfig("m", max_num_seqs=3, block_size=10**9, kv_cache_memory_bytes=1 << 20)
    with pytest.raises(ConfigError, match="lower block_size=1000000000, where 16 would fit, or raise kv_cache_memory_bytes"):
        max_len_in_cache(config, specs, CPU)
    with pytest.raises(ConfigError, match="lower block_size=1000000000, where 16 would fit, or lower max_model_len or raise"):
        num_cache_blocks(config, specs, MaxSizes(100, 64), CPU)


def test_groups_with_windows_get_blocks_for_their_windows_only() -> None:
    full, window = CacheSpec("full", 1, 8, torch.bfloat16), CacheSpec("window", 1, 8, torch.bfloat16, 32)
    specs, sizes = [full, window, window], MaxSizes(16000, 64)
    config = EngineConfig("m", max_num_seqs=10, block_size=16, max_num_batched_tokens=64)
    assert num_cache_blocks(config, specs, sizes, CPU) == (10_000, 10 * 3 + 8)
    one = (1000 + 7 * 2) * 512
    tight = EngineConfig("m", max_num_seqs=10, block_size=16, max_num_batched_tokens=64, kv_cache_memory_bytes=one)
    assert num_cache_blocks(tight, specs, sizes, CPU) == (1000, 7)
    assert max_len_in_cache(tight, specs, CPU) == 16000
    half = EngineConfig("m", max_num_seqs=10, block_size=16, max_num_batched_tokens=64, kv_cache_memory_bytes=5 * one)
    blocks, near = num_cache_blocks(half, specs, sizes, CPU)
    assert (blocks // 1000, near) == (5, 20)
    assert (blocks + 2 * near) * 512 <= 5 * one


@pytest.mark.parametrize(
    ("prompt_attention", "rows"),
    [
        ("causal", 64),
        ("bidirectional_items", 303),
        ("bidirectional_ranges", 305),
        ("bidirectional_windows", 303),
        ("bidirectional_prompt", 503),
        ("bidirectional_media", 503),
    ],
)
def test_a_step_has_room_for_the_largest_bidirectional_span(
    prompt_attention: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The span fits beside a row of every other sequence. Items read through cross-attention need keys, not rows."""
    monkeypatch.setattr(memory, "max_item_rows", lambda *_: {"image": 300, "audio": 1500})
    info: Any = SimpleNamespace(
        prompt_attention=ATTENTIONS[prompt_attention], placeholder_ids={"image": 3}, cross_token=None, modalities=("image",)
    )
    config = EngineConfig("m", max_num_seqs=4, max_num_batched_tokens=64)
    sizes = memory.max_sizes(config, info, 1, 500)
    assert (sizes.max_model_len, sizes.keys, sizes.step_rows) == (500, 1500, rows)


def step(model: Any, requests: int, computed: int, new: int) -> Any:
    """Return a step of `requests` sequences with `computed` keys and `new` rows each, all of them encoder rows."""
    rows, blocks = requests * new, -(-(computed + new) // 16)
    caches = allocate_caches(model.cache_specs, [requests * blocks], 16, CPU)
    tables = torch.arange(requests * blocks, dtype=torch.int32).view(requests, blocks)
    token = torch.arange(computed, computed + new)
    slots = torch.cat([table.long()[token // 16] * 16 + token % 16 for table in tables])
    starts, lengths = tuple(range(0, rows + 1, new)), (computed + new,) * requests

    def run() -> torch.Tensor:
        batch = ForwardBatch(
            torch.zeros(rows, dtype=torch.long),
            torch.zeros(model.rope_axes, rows, dtype=torch.long),
            [AttentionMetadata(starts, lengths, tables, slots, 16)] * len(caches),
            caches,
            torch.arange(rows),
            torch.zeros(rows, model.hidden_size, dtype=model.cache_specs[0].dtype),
        )
        return model.forward(batch)

    return run


@both_dtypes
def test_decoder_steps_take_no_more_than_planned(qwen2: Path, audio: Path, dtype: torch.dtype, int8: bool) -> None:
    for folder in (TINY_VL, qwen2, audio):
        model = build(folder, dtype, CPU, "int8" if int8 else None)
        for requests, computed, new in ((1, 0, 512), (1, 500, 500), (32, 64, 1)):
            work = StepLimits(requests * new, requests * (computed + new), computed + new, CPU, int8)
            measured = peak_bytes(step(model, requests, computed, new))
            assert measured <= model.forward_bytes(work) <= 3.2 * measured


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
def test_steps_with_an_8_bit_kv_cache_take_no_more_than_planned(
    cache_dtype: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SENSORIUM_KERNELS", "attention=torch")
    model = build(TINY_VL, dtype, CPU, None)
    model.cache_specs = with_cache_dtype(cache_dtype, model.cache_specs)
    for requests, computed, new in ((1, 500, 500), (32, 64, 1), (4, 2000, 1)):
        work = StepLimits(requests * new, requests * (computed + new), computed + new, CPU, quantized_kv=True)
        measured = peak_bytes(step(model, requests, computed, new))
        assert measured <= model.forward_bytes(work) <= 3.2 * measured


@both_dtypes
def test_encoder_calls_take_no_more_than_planned(qwen2: Path, audio: Path, dtype: torch.dtype, int8: bool) -> None:
    work, quantization = StepLimits(1, 1, 1, CPU, int8), "int8" if int8 else None
    for folder in (TINY_VL, qwen2):
        model = build(folder, dtype, CPU, quantization)
        for grids in ([(1, 48, 48)], [(1, 16, 16)] * 9):
            patches = sum(t * h * w for t, h, w in grids)
            pixels = (patches, model.visual.spec.patch_dim)
            grid = torch.tensor(grids)

            def encode(model: Any = model, pixels: Any = pixels, grid: Any = grid) -> None:
                made = torch.zeros(pixels, dtype=dtype)
                model.embed_multimodal("image", {"pixel_values": made, "image_grid_thw": grid})

            planned = model.encoder_bytes("image", patches // 4, work)
            measured = peak_bytes(encode)
            loose = 3.2 if len(grids) > 1 else 4.0  # torch scores short segments only, which is planned for
            assert measured <= planned <= loose * measured, folder
    model, frames = build(audio, dtype, CPU, quantization), [400] * 4

    def listen() -> list[torch.Tensor]:
        made = torch.zeros(sum(frames), 24, dtype=dtype)
        return model.embed_multimodal("audio", {"input_features": made, "audio_frames": torch.tensor(frames)})

    planned = model.encoder_bytes("audio", sum(map(len, listen())), work)
    measured = peak_bytes(listen)
    assert measured <= planned <= 3.2 * measured


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    rows = family.load_rows()
    return {name: family.save(rows[name], tmp_path_factory.mktemp("speech") / name) for name in ("whisper", "qwen3_asr")}


def cross_attention_step(model: Any, requests: int, new: int, keys: int, written: bool) -> Any:
    """Return a step in which `requests` sequences of `new` rows write `keys` encoder rows and read them by cross-attention."""
    blocks = -(-keys // 16)
    caches = [torch.zeros(2, requests * blocks, 16, s.kv_heads, s.head_dim, dtype=s.dtype) for s in model.cache_specs]
    tables = torch.arange(requests * blocks, dtype=torch.int32).view(requests, blocks)
    starts = tuple(range(0, requests * new + 1, new))
    tokens = (torch.arange(new), torch.arange(keys))
    slots = [torch.cat([table.long()[token // 16] * 16 + token % 16 for table in tables]) for token in tokens]
    own = AttentionMetadata(starts, (new,) * requests, tables, slots[0], 16)
    other = AttentionMetadata(starts, (keys,) * requests, tables, slots[1] if written else slots[1][:0], 16, causal=False)

    def run() -> torch.Tensor:
        ids = torch.zeros(requests * new, dtype=torch.long)
        rows = torch.zeros(requests * keys, model.hidden_size, dtype=caches[0].dtype) if written else None
        attn = [own, other] * (len(caches) // 2)
        return model.forward(ForwardBatch(ids, ids[None], attn, caches, cross_rows=rows))

    return run


@both_dtypes
def test_steps_with_cross_attention_take_no_more_than_planned(speech: dict[str, Path], dtype: torch.dtype, int8: bool) -> None:
    model = build(speech["whisper"], dtype, CPU, "int8" if int8 else None)
    for requests, new, keys in ((1, 200, 200), (8, 4, 400), (2, 64, 300)):
        work = StepLimits(requests * new, requests * keys, keys, CPU, int8)
        measured = peak_bytes(cross_attention_step(model, requests, new, keys, written=True))
        assert measured <= model.forward_bytes(work) <= 3.2 * measured


@both_dtypes
def test_audio_encoders_take_no_more_than_planned(speech: dict[str, Path], dtype: torch.dtype, int8: bool) -> None:
    for name, counts in {"whisper": [100] * 6, "qwen3_asr": [1000, 150, 801]}.items():
        model = build(speech[name], dtype, CPU, "int8" if int8 else None)

        def listen(model: Any = model, counts: Any = counts) -> list[torch.Tensor]:
            made = torch.zeros(sum(counts), 24, dtype=dtype)
            return model.embed_multimodal("audio", {"input_features": made, "audio_frames": torch.tensor(counts)})

        planned = model.encoder_bytes("audio", sum(map(len, listen())), StepLimits(1, 1, 1, CPU, int8))
        measured = peak_bytes(listen)
        assert measured <= planned <= 3.2 * measured, name


def test_sampling_takes_no_more_than_planned() -> None:
    """The sampling parameters are the most expensive ones."""
    vocab, count = 20000, 8
    kept = torch.randn(count, vocab)
    wild = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.1, "logprobs": 5}

    def draw() -> None:
        rows = [SamplingState(SamplingParams(**wild), list(range(100)), 50) for _ in range(count)]
        sample(kept.bfloat16().float(), rows)

    measured = peak_bytes(draw)
    assert measured <= sampling_bytes(vocab, count, 0, torch.bfloat16, CPU) <= 2 * measured
    measured = peak_bytes(lambda: gather_logprobs(kept.bfloat16().float(), [1] * count, 5))
    assert measured <= sampling_bytes(vocab, 0, count, torch.bfloat16, CPU) <= 2 * measured


FULL_LOAD = """
import json, re, resource, sys
import numpy as np
from PIL import Image
from sensorium import LLM, SamplingParams
from sensorium.engine.setup.doctor import explain
import cv2, tokenizers, safetensors

def data() -> int:
    return int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

options = json.loads(sys.argv[2])
from sensorium.engine.config import make_config
plan = explain(make_config(sys.argv[1], options))
most = next(item for item in plan.max_items if item.modality == "image")
seqs, longest = options["max_num_seqs"], options["max_model_len"]
held = seqs * most.rows * 4 * 3 * 2 * 8 * 8 * 4  # what of media_held these requests can fill: patches of 3x2x8x8 float32
limit = data() + plan.total - plan.media_held + held + (int(sys.argv[3]) << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
llm = LLM(sys.argv[1], **options)
rng = np.random.default_rng(0)
prompts = []
for _ in range(seqs):
    pixels = rng.integers(0, 256, (*most.size, 3), dtype=np.uint8)
    ids = [353] + rng.integers(0, 300, longest - most.rows - 4).tolist()
    prompts.append({"prompt_token_ids": ids, "multi_modal_data": {"image": Image.fromarray(pixels)}})
params = SamplingParams(
    temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=3, prompt_logprobs=1, max_tokens=4, ignore_eos=True
)
outputs = llm.generate(prompts, params, use_tqdm=False)
tokens = [len(output.outputs[0].token_ids) for output in outputs]
errors = [output.error and output.error.message for output in outputs]
print(json.dumps({"errors": errors, "rows": most.rows, "tokens": tokens}))
"""


def full_load(options: dict[str, Any], slack_mib: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", FULL_LOAD, str(TINY_VL), json.dumps(options), str(slack_mib)]
    env = os.environ | {"OMP_NUM_THREADS": "2"}  # each has a stack
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200, check=False)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_DATA")
def test_the_largest_requests_at_full_load_stay_within_the_plan() -> None:
    """The stacks of 12 threads, 8 MiB each, are not part of the plan."""
    options = {
        "device": "cpu",
        "max_num_seqs": 8,
        "max_model_len": 2000,
        "max_num_batched_tokens": 8192,
        "max_encoder_tokens": 8192,
        "mm_processor_kwargs": {"images_kwargs": {"max_pixels": 1024 * 1024 // 4}},
        "mm_processor_cache_bytes": 1 << 20,
    }
    done = full_load(options, 96)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == {"errors": [None] * 8, "rows": 1024, "tokens": [4] * 8}
    starved = full_load(options, 96 - int(explain(make_config(TINY_VL, options)).total / 2**20 * 0.75))
    assert starved.returncode != 0 or any(json.loads(starved.stdout.splitlines()[-1])["errors"]), "the limit limits nothing"
