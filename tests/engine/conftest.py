"""A deterministic toy model behind `models.interface.Model`, and requests for it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from prompt_attention import ATTENTIONS
from sensorium.engine.connectors.disk import DiskConnector
from sensorium.engine.connectors.tensor_store import TensorStore
from sensorium.engine.core.engine_core import EngineCore
from sensorium.engine.executor import LocalExecutor
from sensorium.engine.kv_cache.block_pool import BlockPools
from sensorium.engine.kv_cache.groups import group_layers
from sensorium.engine.sampling_params import SamplingParams
from sensorium.engine.scheduler.encoder_cache import EncoderCache
from sensorium.engine.scheduler.limits import SchedulerLimits
from sensorium.engine.scheduler.policy import make_policy
from sensorium.engine.scheduler.quarantine import Quarantine
from sensorium.engine.scheduler.scheduler import Scheduler
from sensorium.engine.types import EngineRequest
from sensorium.engine.worker.encoder_runner import EncoderRunner
from sensorium.engine.worker.encoder_store import EncoderStore
from sensorium.engine.worker.model_runner import ModelRunner, RunnerOptions
from sensorium.mm.fields import BatchedField, FieldElem
from sensorium.mm.hashing import digest
from sensorium.mm.types import ItemGeometry, MultiModalFeature, PlaceholderRange
from sensorium.models.decoder_model import DecoderModel
from sensorium.models.interface import CacheSpec
from sensorium.models.text.spec import AttentionSpec, DecoderSpec, LatentSpec, LayerSpec, MlpSpec, RopeSpec
from sensorium.models.weights import named_layers

PAD = 3  # the toy's placeholder token
EOS = 2


class ToyModel:
    """A model whose next token depends on every earlier token, position and encoder row, read back from the paged cache."""

    rope_axes, vocab_size, hidden_size, max_positions = 3, 101, 8, 4096
    routes_by_modality = MappingProxyType({})
    adapters = ("a", "other")
    can_generate = recordable = True

    def __init__(
        self,
        reads_encoder_side: bool = False,
        levels: int = 1,
        window: int | None = None,
        states: bool = False,
        chunk: int | None = None,
        answer_window: int | None = None,
    ) -> None:
        """Make the weights.

        Args:
            levels: number of deepstack levels of an encoder row.
            window: sliding window of a further layer.
            chunk: chunk length of a further layer.
            answer_window: tokens of an answer that a further layer reads.
            states: the last layer has a state per sequence.
        """
        kinds = ("full", "cross") if reads_encoder_side else ("full",)
        self.row_size = 8 * levels
        self.cache_specs = [CacheSpec(kind, 1, 8, torch.float64) for kind in kinds * 2]
        if window is not None:
            self.cache_specs.append(CacheSpec("window", 1, 8, torch.float64, window))
        if chunk is not None:
            self.cache_specs.append(CacheSpec("chunk", 1, 8, torch.float64, chunk))
        if answer_window is not None:
            self.cache_specs.append(CacheSpec("full", 1, 8, torch.float64, answer_window=answer_window))
        if states:
            self.cache_specs.append(CacheSpec("state", 1, 8, torch.float64))
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(self.vocab_size, 8, generator=generator, dtype=torch.float64)
        self.head = torch.randn(8, self.vocab_size, generator=generator, dtype=torch.float64)
        self.encode_calls: list[int] = []
        self.forward_rows: list[int] = []

    def embed_multimodal(self, modality: str, tensors: dict) -> list[torch.Tensor]:
        self.encode_calls.append(len(tensors["seed"]))
        if any(int(seed) == 666 for seed in tensors["seed"]):
            raise RuntimeError("failing item")
        return [
            torch.sin(torch.arange(1, int(n) * self.row_size + 1, dtype=torch.float64).view(int(n), -1) * (int(seed) + 1))
            for seed, n in zip(tensors["seed"], tensors["rows"], strict=True)
        ]

    def forward(self, batch) -> torch.Tensor:
        self.forward_rows.append(len(batch.input_ids))
        x = self.table[batch.input_ids].clone()
        levels = () if batch.embed_index is None else batch.embed_rows.split(8, 1)
        if levels:
            x[batch.embed_index] = levels[0]
        x = x + torch.sin(batch.positions.double().T @ torch.tensor([[1.0], [10.0], [100.0]], dtype=torch.float64) * 0.37)
        if batch.adapters is not None:
            x = x + batch.adapters.double()[:, None] * 0.3
        for layer, (cache, meta) in enumerate(zip(batch.kv_caches, batch.attn, strict=True)):
            if cache.ndim == 2:
                x = self.recur(x, cache, meta)
                continue
            keys, values = cache[0].view(-1, 8), cache[1].view(-1, 8)
            source = x if meta.causal else batch.cross_rows
            if source is not None:
                keys[meta.slot_mapping], values[meta.slot_mapping] = source, torch.cos(source * (layer + 1))
            out = torch.empty_like(x)
            for i, length in enumerate(meta.seq_lens):
                first, last = meta.query_start_loc[i], meta.query_start_loc[i + 1]
                token = torch.arange(length)
                slot = meta.block_tables[i, token // meta.block_size].long() * meta.block_size + token % meta.block_size
                start, stop = meta.key_ranges(i)[:, :, None]
                hidden = (token < start) | (token >= stop)
                out[first:last] = (x[first:last] @ keys[slot].T).masked_fill(hidden, -torch.inf).softmax(-1) @ values[slot]
            x = torch.tanh(x + (2 if meta.causal else 0.5) * out)
            if layer + 1 < len(levels):
                x[batch.embed_index] += levels[layer + 1]
        return x

    def recur(self, x: torch.Tensor, cache: torch.Tensor, meta) -> torch.Tensor:
        for i, (length, (first, last)) in enumerate(zip(meta.seq_lens, pairwise(meta.query_start_loc), strict=True)):
            read, write = meta.block_tables[i].tolist()
            state = cache[read].clone() if length > last - first else torch.zeros(8)
            assert read != write, "a step could not be repeated"
            for row in range(first, last):
                state = torch.tanh(0.7 * state + x[row].float())
                x[row] += state
            cache[write] = state
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden @ self.head).float() * 2

    def load_weights(self, weights) -> None:
        list(weights)


class Stack(DecoderModel):
    """A decoder with random weights and layers of three kinds: window with soft cap, full, latent. Items as for ToyModel."""

    def __init__(self, dtype: torch.dtype) -> None:
        rope, latent = RopeSpec(10000.0, 16, (0,) * 8), RopeSpec(10000.0, 8, (0,) * 4)
        mlp, full = MlpSpec(48), AttentionSpec(4, 2, 16, 0.4, rope)
        near = replace(full, window=9, soft_cap=4.0)
        layers = [LayerSpec(part, mlp) for part in (near, full, LatentSpec(4, None, 24, 16, 16, 0.3, latent), near)]
        super().__init__(DecoderSpec(101, 32, tuple(layers), 1e-6, 4096, False), dtype, torch.device("cpu"))
        generator = torch.Generator().manual_seed(1)
        shapes = {name: view.shape for _, views in named_layers(self).values() for name, view in views.items()}
        self.load_weights((name, torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items())

    def embed_multimodal(self, modality: str, tensors: dict) -> list[torch.Tensor]:
        made = zip(tensors["seed"], tensors["rows"], strict=True)
        return [torch.sin(torch.arange(int(n) * 32.0).view(int(n), 32) * (int(seed) + 1)).to(self.dtype) for seed, n in made]


def make_core(
    blocks: int = 64,
    block_size: int = 4,
    seqs: int = 8,
    budget: int = 64,
    max_len: int = 200,
    encoder_rows: int = 40,
    encoder_budget: int = 1 << 20,
    prompt_attention: str = "causal",
    caching: bool = True,
    max_cached: int | None = None,
    folder: str | None = None,
    quarantine: float = 60.0,
    model: torch.nn.Module | None = None,
    invariant: bool = False,
    async_scheduling: bool = False,
    late: int = 0,
    policy: str = "fcfs",
    kv_store: TensorStore | None = None,
) -> EngineCore:
    """Return a core around the toy.

    Args:
        encoder_rows: capacity of the encoder cache.
        late: number of polls until an encoder call beside the steps is done.
        kv_store: where KV blocks are saved and looked up.
    """
    model, attention = model or ToyModel(), ATTENTIONS[prompt_attention]
    specs = [group.spec for group in group_layers(model.cache_specs)]
    num_blocks = [blocks] * len(specs)
    device = torch.device("cpu")
    connectors = [DiskConnector(folder, 1 << 20)] if folder else ()
    store = EncoderStore(connectors, "toy", model.row_size, model.cache_specs[0].dtype, device)
    limits = SchedulerLimits(seqs, budget, max_len, encoder_budget, attention, caching, encode_beside=async_scheduling)
    encoder = EncoderCache(encoder_rows * store.row_bytes, store.row_bytes)
    scheduler = Scheduler(
        BlockPools(specs, num_blocks, block_size, None if max_cached is None else [max_cached] * len(specs)),
        encoder,
        limits,
        Quarantine(quarantine),
        make_policy(policy),
    )
    options = RunnerOptions(
        invariant=invariant, prompt_attention=attention, async_scheduling=async_scheduling, kv_store=kv_store
    )
    if kv_store is not None:
        scheduler.use_connectors(saves=True, loads=True)
    runner = ModelRunner(model, num_blocks, block_size, device, store, options)
    runner.encoder_runner = EncoderRunner(store, device, lambda: Late(late), poll_seconds=600.0)
    executor = LocalExecutor(runner)
    return EngineCore(scheduler, executor, executor.describe(max_len, seqs))


class Late:
    """An event that is done after `polls` polls, or once `synchronize` is called."""

    def __init__(self, polls: int) -> None:
        self.left, self.recorded = polls, False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        self.left -= 1
        return self.recorded and self.left < 0

    def synchronize(self) -> None:
        self.left = 0


def item(offset: int, rows: int, seed: int = 1, edges: bool = False) -> MultiModalFeature:
    """Return an item of `rows` encoder rows at `offset`; with `edges`, it also has a token before and after them."""
    mask = torch.tensor([False, *[True] * rows, False]) if edges else None
    where = PlaceholderRange(offset, rows + 2 * edges, mask)
    kwargs = {"seed": FieldElem(torch.tensor(seed), BatchedField()), "rows": FieldElem(torch.tensor(rows), BatchedField())}
    return MultiModalFeature("image", kwargs, where, ItemGeometry(1, 1, rows), digest("toy", seed, rows, edges))


def pair(offset: int, rows: int, seed: int = 1) -> list[MultiModalFeature]:
    """Return two items of `rows` and `rows + 1` encoder rows that alternate in one range, with a token before and after."""
    mask = torch.tensor([False, *[True, False] * rows, False, False])
    other = torch.tensor([False, *[False, True] * rows, True, False])
    one, two = item(offset, rows, seed), item(offset, rows + 1, seed + 1)
    return [
        replace(one, range=PlaceholderRange(offset, len(mask), mask)),
        replace(two, range=PlaceholderRange(offset, len(mask), other), geometry=replace(two.geometry, linear=True)),
    ]


def make_request(name: str, rng: random.Random, media: bool = True, hold_open: bool = False, **params) -> EngineRequest:
    """Return a request for a random prompt of 1-30 text tokens with up to two items."""
    tokens, features = [], []
    for _ in range(rng.randint(0, 2) if media else 0):
        tokens += [rng.randrange(4, 101) for _ in range(rng.randint(0, 5))]
        features.append(item(len(tokens), rng.randint(1, 6), rng.randint(1, 3), edges=rng.random() < 0.5))
        tokens += [PAD] * features[-1].range.length
    tokens += [rng.randrange(4, 101) for _ in range(rng.randint(1, 12))]
    params.setdefault("temperature", 0.0)
    params.setdefault("max_tokens", rng.randint(1, 12))
    return EngineRequest(
        name, tuple(tokens), SamplingParams(**params), (EOS,), tuple(features), seed=len(tokens), hold_open=hold_open
    )


def drain(core: EngineCore, limit: int = 2000) -> dict[str, list]:
    """Step until nothing is left to compute. Return the outputs by request."""
    outputs: dict[str, list] = {}
    for _ in range(limit):
        transfers = core.scheduler.kv_transfers
        if not (core.scheduler.waiting or core.scheduler.running or (transfers and transfers.num_loading)):
            core.step()
            return outputs
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError("the engine did not become idle")


def tokens_of(outputs: list) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def alone(request: EngineRequest, model: ToyModel | None = None, prompt_attention: str = "causal") -> tuple[list[int], str]:
    """Return the answer and finish reason of a request in a core that serves nothing else."""
    core = make_core(blocks=64, budget=500, caching=False, model=model, prompt_attention=prompt_attention)
    core.add(request)
    outputs = drain(core)[request.request_id]
    return tokens_of(outputs), outputs[-1].finish_reason


def request(name: str, tokens, features=(), **changes) -> EngineRequest:
    """Return a request with this prompt for an answer of four tokens."""
    plain = make_request(name, random.Random(0), media=False, max_tokens=4, ignore_eos=True)
    return replace(plain, prompt_token_ids=tuple(tokens), features=tuple(features), **changes)


def random_prompt(name: str, length: int, seed: int = 0, max_tokens: int = 4, **changes) -> EngineRequest:
    """Return a request with `length` random text tokens."""
    rng = random.Random(seed)
    tokens = tuple(rng.randrange(4, 101) for _ in range(length))
    plain = make_request(name, rng, media=False, max_tokens=max_tokens, ignore_eos=True)
    return replace(plain, prompt_token_ids=tokens, **changes)


def scheduled(core: EngineCore) -> tuple[dict[str, int], list[str]]:
    """Run the next step. Return its number of tokens per request, and the hashes of the items that it encodes."""
    seen = []
    schedule = core.scheduler.schedule
    core.scheduler.schedule = lambda: seen.append(schedule()) or seen[0]
    try:
        core.step()
    finally:
        core.scheduler.schedule = schedule
    return {task.request_id: task.num_tokens for task in seen[0].scheduled}, [task.hash for task in seen[0].encode]


def assert_empty(core: EngineCore) -> None:
    core.step()
    assert not core.scheduler.requests
    assert all(pool.num_free == pool.num_blocks for pool in core.scheduler.block_pools.pools)
    encoder = core.scheduler.encoder_cache
    assert not any(encoder.users_of(key) for key in core.executor.runner.store.rows)
    assert encoder.bytes == sum(rows.nbytes for rows in core.executor.runner.store.rows.values())
    assert not core.executor.runner.sequences


@pytest.fixture(scope="session")
def toy():
    """Return the helpers of this file as one object."""
    names = ("PAD", "EOS", "ToyModel", "Stack", "make_core", "item", "pair", "make_request", "request", "random_prompt")
    names += ("drain", "scheduled", "tokens_of", "alone", "assert_empty", "Late")
    return SimpleNamespace(**{name: globals()[name] for name in names})
