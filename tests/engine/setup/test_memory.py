"""The memory plan against reality: tensors, measured peaks, a full load under a limit, and items that fit or just do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fallbacks
import family
import oracle
import pytest
import torch
from measured import held, peak_bytes
from sensorium import LLM, SamplingParams
from sensorium.engine import driver, loader, memory, runner
from sensorium.engine.config import EngineConfig, load_model_files, make_config
from sensorium.engine.doctor import explain
from sensorium.engine.encoder_store import EncoderStore
from sensorium.engine.kv import allocate_caches
from sensorium.engine.loader import load_engine, load_processing, resolve
from sensorium.engine.memory import Sizes, cache_blocks, longest_sequence, sampling_bytes, weight_bytes
from sensorium.engine.paths import choose
from sensorium.engine.sample_row import SampleRow
from sensorium.engine.sampler import gather_logprobs, sample
from sensorium.engine.source import kept_as
from sensorium.kernels.int8 import supported
from sensorium.kernels.metadata import AttentionMetadata
from sensorium.mm.errors import ConfigError
from sensorium.mm.registry import find
from sensorium.models.interface import CacheSpec, ForwardBatch, Work
from sensorium.models.weights import load
from sensorium.processors.text import Tokenizer

TINY_VL = Path(__file__).parents[2] / "assets" / "tiny-vl"
CPU = torch.device("cpu")
VNNI = pytest.mark.skipif(not supported(CPU), reason="no products of 8-bit numbers")
EIGHT_BITS = [pytest.param("linear=onednn", marks=VNNI), pytest.param("int8_linear=torch", marks=VNNI)]
"""Kernels under which the tests below multiply in 8 bits: C++ where it is there, and torch."""
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SMALL = {"max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20, "device": "cpu"}


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.build_checkpoint(tmp_path_factory.mktemp("audio"), "qwen2_audio")


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.build_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2_vl")


@pytest.fixture(params=["", "attention=torch,varlen_attention=torch", *EIGHT_BITS])
def int8(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the kernels, each choice of them in turn, multiply in 8 bits."""
    monkeypatch.setenv("SENSORIUM_KERNELS", request.param)
    return "linear=" in request.param


def build(folder: Path, dtype: torch.dtype, device: torch.device, quantization: str | None = None) -> Any:
    files = load_model_files(folder)
    model = resolve(find(files.architecture).model)(files.config, dtype, device)
    if device.type != "meta":
        load(folder, model, quantization)
    return model


@both_dtypes
def test_weights_are_those_held(audio: Path, dtype: torch.dtype) -> None:
    for folder in (TINY_VL, audio):
        planned = weight_bytes(build(folder, dtype, torch.device("meta")), CPU, dtype, None)
        assert planned == held(build(folder, dtype, CPU))


@VNNI
def test_weights_in_8_bits(audio: Path) -> None:
    for folder in (TINY_VL, audio):
        planned = weight_bytes(build(folder, torch.float32, torch.device("meta")), CPU, torch.float32, "int8")
        real = held(build(folder, torch.float32, CPU, "int8"))
        assert real <= planned <= 1.02 * real


def test_caches_are_those_allocated() -> None:
    config, files = make_config(TINY_VL, {"max_model_len": 512, **SMALL}), load_model_files(TINY_VL)
    info = load_processing(find(files.architecture), files, {})
    core = load_engine(config, files, info, Tokenizer(files.path)).core
    plan = explain(config)
    assert plan.kv_cache == sum(cache.nbytes for cache in core.runner.caches.tensors)
    assert plan.encoder_cache == core.scheduler.encoder.capacity
    assert plan.total > plan.kv_cache + plan.weights + plan.activations


def test_an_encoder_beside_steps_takes_memory_of_its_own() -> None:
    after, beside = (explain(make_config(TINY_VL, {**SMALL, "async_scheduling": flag})) for flag in (False, True))
    assert after.activations == max(after.decoder_step, after.logits_step, after.encoder_step)
    assert beside.activations == max(beside.decoder_step, beside.logits_step) + beside.encoder_step > after.activations


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A GPU of so many free bytes that can be planned for, and nothing else."""

    def free(size: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a card")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (size, size))

    return free


def test_on_a_gpu_caches_take_what_all_else_leaves(card: Callable[[int], None]) -> None:
    options = {"device": "cuda", "max_model_len": 2048, "max_num_seqs": 512, "dtype": "bfloat16"}
    card(1 << 30)
    plan = explain(make_config(TINY_VL, options))
    card(3 << 28)
    less = explain(make_config(TINY_VL, options))
    block = 16 * 512  # nearer than a block of each layer
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
    assert "beside the total" in str(beside).splitlines()[-3]


def test_a_gpu_that_is_too_small_is_said_before_anything_is_read(card: Callable[[int], None]) -> None:
    card(256 << 20)
    with pytest.raises(ConfigError, match=r"2048 tokens needs .* are left of .* on cuda:0: lower max_model_len, "):
        explain(make_config(TINY_VL, {"device": "cuda", "max_model_len": 2048}))


def test_a_plan_for_a_gpu_needs_no_form_of_a_model_of_transformers(
    card: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is loaded by the same way, tried out before it is planned for."""
    card(8 << 30)
    config = make_config(fallbacks.build(tmp_path / "borrowed", "ovis2"), {"device": "cuda", "max_model_len": 512})
    files = load_model_files(config.model)
    monkeypatch.setattr(loader, "computing_on", lambda device: nullcontext())
    with pytest.raises((AssertionError, RuntimeError), match="CUDA"):  # of torch, once memory is asked for
        load_engine(config, files, load_processing(choose(files), files, {}), Tokenizer(files.path))
    assert explain(config).kv_cache > 0


def test_an_engine_explains_itself() -> None:
    llm = LLM(TINY_VL, max_model_len=512, **SMALL)
    assert llm.explain() == explain(llm.config)
    assert str(llm.explain()).splitlines()[0].startswith("weights")


def test_cache_blocks() -> None:
    specs, sizes = [CacheSpec("full", 1, 8, torch.bfloat16)], Sizes(100, 100, 64)  # 512 bytes a block
    config = EngineConfig("m", max_num_seqs=3, block_size=16)
    assert cache_blocks(config, specs, sizes, CPU) == (3 * 7,)
    small = EngineConfig("m", max_num_seqs=3, block_size=16, kv_cache_memory_bytes=4700)
    assert cache_blocks(small, specs, sizes, CPU) == (9,)
    assert longest_sequence(small, specs, CPU) == 9 * 16
    message = r"needs 5,120 bytes .* 4,700 are allowed: lower max_model_len or raise kv_cache_memory_bytes"
    with pytest.raises(ConfigError, match=message):
        cache_blocks(small, specs, Sizes(160, 160, 64), CPU)
    across = "a sequence whose encoder side has 160 rows needs 5,120 bytes .* allowed: raise kv_cache_memory_bytes to 5120$"
    with pytest.raises(ConfigError, match=across):
        cache_blocks(small, specs, Sizes(40, 160, 64), CPU)


def test_blocks_that_are_too_large_are_what_to_lower() -> None:
    specs = [CacheSpec("full", 1, 8, torch.bfloat16)]
    config = EngineConfig("m", max_num_seqs=3, block_size=10**9, kv_cache_memory_bytes=1 << 20)
    with pytest.raises(ConfigError, match="lower block_size=1000000000, where 16 would fit, or raise kv_cache_memory_bytes"):
        longest_sequence(config, specs, CPU)
    with pytest.raises(ConfigError, match="lower block_size=1000000000, where 16 would fit, or lower max_model_len or raise"):
        cache_blocks(config, specs, Sizes(100, 100, 64), CPU)


def test_windows_take_what_they_see_and_no_more() -> None:
    full, window = CacheSpec("full", 1, 8, torch.bfloat16), CacheSpec("window", 1, 8, torch.bfloat16, 32)
    specs, sizes = [full, window, window], Sizes(16000, 16000, 64)
    config = EngineConfig("m", max_num_seqs=10, block_size=16, max_num_batched_tokens=64)
    assert cache_blocks(config, specs, sizes, CPU) == (10_000, 10 * 3 + 8)
    one = (1000 + 7 * 2) * 512
    tight = EngineConfig("m", max_num_seqs=10, block_size=16, max_num_batched_tokens=64, kv_cache_memory_bytes=one)
    assert cache_blocks(tight, specs, sizes, CPU) == (1000, 7)
    assert longest_sequence(tight, specs, CPU) == 16000
    half = EngineConfig("m", max_num_seqs=10, block_size=16, max_num_batched_tokens=64, kv_cache_memory_bytes=5 * one)
    blocks, near = cache_blocks(half, specs, sizes, CPU)
    assert (blocks // 1000, near) == (5, 20)
    assert (blocks + 2 * near) * 512 <= 5 * one


@pytest.mark.parametrize(("prefill", "rows"), [("causal", 64), ("item_atomic", 300 + 3), ("prompt_atomic", 500 + 3)])
def test_a_step_has_room_for_what_is_computed_together(prefill: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a row of every other sequence; an item that is read across needs keys, not rows."""
    monkeypatch.setattr(memory, "largest_items", lambda *_: {"image": 300, "audio": 1500})
    info: Any = SimpleNamespace(prefill=prefill, slot_ids={"image": 3})
    config = EngineConfig("m", max_num_seqs=4, max_num_batched_tokens=64)
    assert memory.plan_sizes(config, info, 500) == Sizes(500, 1500, rows)


def step(model: Any, requests: int, computed: int, new: int) -> Any:
    """A step of `requests` sequences with `computed` keys and `new` rows each, all of them encoder rows."""
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
            work = Work(requests * new, requests * (computed + new), computed + new, CPU, int8)
            measured = peak_bytes(step(model, requests, computed, new))
            assert measured <= model.forward_bytes(work) <= 3.2 * measured


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codes", ["int8", "fp8"])
def test_steps_that_copy_codes_take_no_more_than_planned(
    codes: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SENSORIUM_KERNELS", "attention=torch")
    model = build(TINY_VL, dtype, CPU, None)
    model.cache_specs = kept_as(codes, model.cache_specs)
    for requests, computed, new in ((1, 500, 500), (32, 64, 1), (4, 2000, 1)):
        work = Work(requests * new, requests * (computed + new), computed + new, CPU, codes=True)
        measured = peak_bytes(step(model, requests, computed, new))
        assert measured <= model.forward_bytes(work) <= 3.2 * measured


@both_dtypes
def test_encoder_calls_take_no_more_than_planned(qwen2: Path, audio: Path, dtype: torch.dtype, int8: bool) -> None:
    work, quantization = Work(1, 1, 1, CPU, int8), "int8" if int8 else None
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


def across(model: Any, requests: int, new: int, keys: int, written: bool) -> Any:
    """A step of `requests` sequences with `new` rows each that reads `keys` encoder rows across, and writes them first."""
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
def test_steps_that_read_across_take_no_more_than_planned(speech: dict[str, Path], dtype: torch.dtype, int8: bool) -> None:
    model = build(speech["whisper"], dtype, CPU, "int8" if int8 else None)
    for requests, new, keys in ((1, 200, 200), (8, 4, 400), (2, 64, 300)):
        work = Work(requests * new, requests * keys, keys, CPU, int8)
        measured = peak_bytes(across(model, requests, new, keys, written=True))
        assert measured <= model.forward_bytes(work) <= 3.2 * measured


@both_dtypes
def test_encoders_of_speech_take_no_more_than_planned(speech: dict[str, Path], dtype: torch.dtype, int8: bool) -> None:
    for name, counts in {"whisper": [100] * 6, "qwen3_asr": [1000, 150, 801]}.items():
        model = build(speech[name], dtype, CPU, "int8" if int8 else None)

        def listen(model: Any = model, counts: Any = counts) -> list[torch.Tensor]:
            made = torch.zeros(sum(counts), 24, dtype=dtype)
            return model.embed_multimodal("audio", {"input_features": made, "audio_frames": torch.tensor(counts)})

        planned = model.encoder_bytes("audio", sum(map(len, listen())), Work(1, 1, 1, CPU, int8))
        measured = peak_bytes(listen)
        assert measured <= planned <= 3.2 * measured, name


def test_sampling_takes_no_more_than_planned() -> None:
    """It is the worst parameters that count, so a plain draw may take far less."""
    vocab, count = 20000, 8
    kept = torch.randn(count, vocab)
    wild = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.1, "logprobs": 5}

    def draw() -> None:
        rows = [SampleRow(SamplingParams(**wild), list(range(100)), 50) for _ in range(count)]
        sample(kept.bfloat16().float(), rows)

    measured = peak_bytes(draw)
    assert measured <= sampling_bytes(vocab, count, 0, torch.bfloat16, CPU) <= 2 * measured
    measured = peak_bytes(lambda: gather_logprobs(kept.bfloat16().float(), [1] * count, [5] * count))
    assert measured <= sampling_bytes(vocab, 0, count, torch.bfloat16, CPU) <= 2 * measured


FULL_LOAD = """
import json, re, resource, sys
import numpy as np
from PIL import Image
from sensorium import LLM, SamplingParams
from sensorium.engine.doctor import explain
import cv2, tokenizers, safetensors

def data() -> int:
    return int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

options = json.loads(sys.argv[2])
from sensorium.engine.config import make_config
plan = explain(make_config(sys.argv[1], options))
most = next(item for item in plan.largest if item.modality == "image")
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
print(json.dumps({"errors": [output.error for output in outputs], "rows": most.rows, "tokens": tokens}))
"""


def full_load(options: dict[str, Any], slack_mib: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", FULL_LOAD, str(TINY_VL), json.dumps(options), str(slack_mib)]
    env = os.environ | {"OMP_NUM_THREADS": "2"}  # each has a stack
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200, check=False)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_DATA")
def test_the_largest_requests_at_full_load_stay_below_the_plan() -> None:
    """Stacks of threads are no part of the plan: 12 of 8 MiB."""
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


def test_the_plan_and_the_engine_mean_the_same_bounds() -> None:
    assert memory._MEDIA_BYTES == driver._MEDIA_BYTES
    assert memory._LOGITS_ROWS == runner._LOGITS_ROWS
    assert signature(EncoderStore).parameters["queue_bytes"].default == memory._QUEUE_BYTES
