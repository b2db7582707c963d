"""Several processes share a model: answers have the same bits as in one, and a rank that dies or stands still is noticed."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from family import ask, load_rows, save
from hostile import MODEL, asked, make_image
from parity import make_llm
from quantized import SCHEMES, write
from safetensors.torch import load_file, save_file
from sensorium import LLM, SamplingParams, register_logits_processor
from sensorium.callers.errors import CheckpointError, ConfigError, EngineDeadError, InputError
from sensorium.checkpoints.formats.fp8 import Fp8Format
from sensorium.engine.core import rank_executor, rank_server
from sensorium.engine.core.channel import Channel, pack
from sensorium.engine.core.rank_executor import Peers, RankExecutor
from sensorium.engine.setup import loader
from sensorium.engine.setup.doctor import plan_of
from sensorium.engine.structured_outputs import StructuredOutputsParams
from sensorium.engine.types import LoadedAdapter
from sensorium.kernels.linear.grouped import GroupedWeight
from sensorium.models.layers.linear import Linear, LmHead
from sensorium.models.layers.ranks import Ranks, RankTraffic, Rows, building_for, make_process_groups, rank_groups, rank_traffic
from several_ranks import GREEDY, SAMPLED, answers, children_of, peers, same_bodies  # noqa: F401
from torch import Tensor, nn
from waiting import wait_until

pytestmark = pytest.mark.usefixtures("same_bodies")
PROMPTS = [asked(make_image(1)), "The sky is", asked(make_image(2), make_image(1))]
PARAMS = [
    GREEDY,
    SAMPLED,
    SamplingParams(
        temperature=0.7, seed=3, max_tokens=10, logprobs=0, structured_outputs=StructuredOutputsParams(choice=["up", "down"])
    ),
]
OPTIONS = {"max_model_len": 512, "max_num_seqs": 4, "limit_mm_per_prompt": {"image": 2}}
FAMILIES = ("qwen3_vl", "qwen3_5", "gemma3", "phi3_vision", "qwen2_audio", "step3p7")
TOWERS = ("qwen3_vl", "phi3_vision", "qwen2_audio", "llava_onevision", "mllama")
"""With deepstack levels, tiles, audio, videos, and cross-attention."""
STAGED = ("qwen3_vl", "qwen3_vl_moe", "kimi_vl", "lfm2_vl", "mllama")
"""With deepstack levels, mixtures of experts, latent attention, layers with a state, and cross-attention."""


@pytest.mark.parametrize(
    ("tensor", "stages", "options"),
    [
        (2, 1, {"dtype": "float32"}),
        (4, 1, {"dtype": "bfloat16", "max_num_batched_tokens": 24, "speculative_config": {"method": "suffix"}}),
        (2, 1, {"dtype": "float32", "quantization": "int8", "kv_cache_dtype": "int8"}),
        (2, 1, {"dtype": "bfloat16", "quantization": "int4"}),
        (1, 3, {"dtype": "bfloat16", "mm_encoder_tp_mode": "data"}),
        (2, 2, {"dtype": "float32"}),
    ],
    ids=str,
)
def test_answers_have_the_bits_of_one_process(tensor: int, stages: int, options: Mapping[str, Any]) -> None:
    """With 4 ranks that divide heads, two of them hold the same head of keys; three stages have 2, 1 and 1 layers."""
    with LLM(MODEL, **OPTIONS, **options) as llm:
        alone = answers(llm, PROMPTS, PARAMS)
    with LLM(MODEL, **OPTIONS, **options, tensor_parallel_size=tensor, pipeline_parallel_size=stages) as llm:
        assert llm.config.engine_process
        assert len(peers(llm)) == tensor * stages - 1
        assert answers(llm, PROMPTS, PARAMS) == alone
        llm.sleep()
        llm.wake_up()
        assert answers(llm, PROMPTS, PARAMS) == alone


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("tensor_parallel_size", {"dtype": "float32"}),
        ("tensor_parallel_size", {"dtype": "bfloat16", "quantization": "int8"}),
        ("pipeline_parallel_size", {"dtype": "float32"}),
    ],
)
def test_updated_weights_reach_all_ranks(kind: str, options: Mapping[str, Any]) -> None:
    stored = load_file(Path(MODEL) / "model.safetensors")
    new = {name: tensor * (1 + 0.1 * torch.rand_like(tensor)) for name, tensor in stored.items() if "proj" in name}
    with LLM(MODEL, **OPTIONS, **options) as llm:
        before = answers(llm, PROMPTS, PARAMS)
        assert llm.update_weights(new) == 1
        alone = answers(llm, PROMPTS, PARAMS)
        assert alone != before
    with LLM(MODEL, **OPTIONS, **options, **{kind: 2}) as llm:
        assert answers(llm, PROMPTS, PARAMS) == before
        (peer,) = peers(llm)
        assert llm.update_weights(new) == 1
        assert answers(llm, PROMPTS, PARAMS) == alone
        with pytest.raises(CheckpointError):
            llm.update_weights({"unknown.weight": torch.zeros(2)})
        assert peers(llm) == [peer]
        core = llm.engine.loop.core.pid
        os.kill(peer, signal.SIGKILL)
        wait_until(lambda: llm.engine.loop.core.pid != core)
        assert answers(llm, PROMPTS, PARAMS) == alone, "a rank that replaces another one has the new weights, too"


def save_quantized(scheme: str, folder: Path) -> Path:
    """Write the shipped model with the decoder's layers in a published format."""
    return write(MODEL, folder, SCHEMES[scheme], lambda name: ".layers." in name and name.endswith("proj.weight"))[0]


@pytest.mark.parametrize(
    ("kind", "size", "scheme", "options"),
    [
        ("tensor_parallel_size", 2, "fp8 block", {"dtype": "float32"}),
        ("tensor_parallel_size", 4, "ct fp8 block", {"dtype": "bfloat16"}),
        ("tensor_parallel_size", 2, "ct w8a8", {"dtype": "float32", "quantization": "int8"}),
        ("tensor_parallel_size", 2, "gptq ordered", {"dtype": "bfloat16"}),
        ("pipeline_parallel_size", 2, "fp8 tensor", {"dtype": "float32"}),
    ],
)
def test_quantised_checkpoints_answer_with_the_bits_of_one_process(
    kind: str, size: int, scheme: str, options: Mapping[str, Any], tmp_path: Path
) -> None:
    """With 4 ranks, a rank's 16 outputs of the keys are half of a block of 32."""
    folder = save_quantized(scheme, tmp_path)
    with LLM(folder, **OPTIONS, **options) as llm:
        alone = answers(llm, PROMPTS, PARAMS)
    with LLM(folder, **OPTIONS, **options, **{kind: size}) as llm:
        assert answers(llm, PROMPTS, PARAMS) == alone


def save_adapter(folder: Path, seed: int, with_dora: bool) -> Path:
    """Write an adapter of all linear layers of the shipped model's decoder, in peft's layout."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, weight in load_file(MODEL / "model.safetensors").items():
        if ".layers." in name and name.endswith("proj.weight"):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(4, weight.shape[1], generator=generator) / 8
            tensors[f"{stem}.lora_B.weight"] = torch.randn(len(weight), 4, generator=generator) / 8
            if with_dora:
                tensors[f"{stem}.lora_magnitude_vector"] = weight.float().norm(dim=1)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": modules, "use_dora": with_dora}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


ADAPTERS = ["a", "b", None]


@pytest.mark.parametrize(
    ("split", "options"),
    [
        ({"tensor_parallel_size": 2}, {"dtype": "float32"}),
        ({"tensor_parallel_size": 4}, {"dtype": "bfloat16"}),
        ({"tensor_parallel_size": 2}, {"dtype": "float32", "quantization": "int8"}),
        ({"pipeline_parallel_size": 2}, {"dtype": "float32"}),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {"dtype": "bfloat16"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("with_dora", [False, True])
def test_adapters_of_requests_have_the_bits_of_one_process(
    split: Mapping[str, int], options: Mapping[str, Any], with_dora: bool, tmp_path: Path
) -> None:
    """Each request of a batch has another adapter or none; they are read again after sleep, and can be unloaded."""
    folders = {name: save_adapter(tmp_path / name, seed, with_dora) for seed, name in enumerate(("a", "b"))}
    options = {**OPTIONS, **options, "enable_lora": True, "max_loras": 2, "max_lora_rank": 4}

    found = []
    for sizes in ({}, split):
        with LLM(MODEL, **options, **sizes) as llm:
            plain = answers(llm, PROMPTS, PARAMS)
            infos = [llm.load_adapter(name, folder) for name, folder in folders.items()]
            found.append((plain, answers(llm, PROMPTS, PARAMS, ADAPTERS), [info.rank for info in infos]))
            if sizes:
                llm.sleep()
                llm.wake_up()
                assert answers(llm, PROMPTS, PARAMS, ADAPTERS) == found[0][1]
                llm.unload_adapter("a")
                assert answers(llm, PROMPTS, PARAMS) == plain
    assert found[0] == found[1]
    assert found[0][0][:2] != found[0][1][:2]


class OneRank:
    """An executor that reads the identity of an adapter from a file, and the channel to it."""

    def __init__(self) -> None:
        self.adapters, self.error = set[str](), False

    def load_adapter(self, folder: str) -> LoadedAdapter:
        if self.error:
            raise OSError
        self.adapters.add(identity := Path(folder).read_text())
        return LoadedAdapter(identity, 1, 1)

    def unload_adapter(self, identity: str) -> None:
        self.adapters.discard(identity)

    def sleep(self, keep_sequences: bool = False) -> None:
        self.adapters.clear()


class OtherRanks:
    """Ranks 1 and 2 of this process. `before`: is called before they get a message."""

    def __init__(self) -> None:
        self.executors, self.replies = [OneRank(), OneRank()], list[tuple[bool, Any]]()
        self.before: Callable[[], object] = lambda: None

    def send(self, verb: str, *arguments: Any) -> None:
        self.before()
        self.replies = [self._answer(executor, verb, arguments) for executor in self.executors]

    def _answer(self, executor: Any, verb: str, arguments: Any) -> tuple[bool, Any]:
        try:
            return False, rank_server._answer(executor, verb, arguments)
        except OSError:
            return True, "OSError"

    def receive(self) -> list[tuple[bool, Any]]:
        return self.replies


def test_an_adapter_that_one_rank_cannot_read_stays_on_none(tmp_path: Path) -> None:
    """One that all ranks have loaded before stays on all of them."""
    local, others = OneRank(), OtherRanks()
    executor: Any = RankExecutor(local, others)  # type: ignore[arg-type]
    ranks, files = [local, *others.executors], [tmp_path / name for name in "ab"]
    for file in files:
        file.write_text(file.name)
    executor.load_adapter(str(files[0]))
    others.executors[1].error = True
    for file in files:
        with pytest.raises(InputError):
            executor.load_adapter(str(file))
        assert [rank.adapters for rank in ranks] == [{"a"}] * 3
    others.executors[1].error, others.before = False, lambda: files[1].write_text("c")
    with pytest.raises(InputError):
        executor.load_adapter(str(files[1]))
    assert [rank.adapters for rank in ranks] == [{"a"}] * 3
    executor.sleep()
    others.executors[0].error = True
    with pytest.raises(InputError):
        executor.load_adapter(str(files[0]))
    assert [rank.adapters for rank in ranks] == [set()] * 3


def test_new_weights_are_copied_once_for_all_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    staged, pipes = list[Mapping[str, Tensor]](), [multiprocessing.Pipe() for _ in range(2)]
    ours, theirs = ([Channel(end) for end in ends] for ends in zip(*pipes, strict=True))
    peers: Any = Peers.__new__(Peers)
    peers.children = [SimpleNamespace(channel=channel) for channel in ours]
    local: Any = SimpleNamespace(stage_weights=staged.append)
    for channel in theirs:
        channel.send(*pack((False, None), share=False))
    executor, weights = RankExecutor(local, peers), {"w": torch.arange(4096.0)}
    executor.stage_weights(weights)
    (verb, (first,)), (_, (second,)) = (channel.receive() for channel in theirs)
    assert verb == "stage_weights"
    assert torch.equal(first["w"], weights["w"])
    first["w"][0] = 5.0
    assert second["w"][0] == 5.0
    monkeypatch.setattr(rank_executor, "pack", Mock(side_effect=MemoryError))
    with pytest.raises(InputError) as caught:
        executor.stage_weights(weights)
    assert caught.value.info.code == "out_of_memory"
    assert len(staged) == 1
    for channel in (*ours, *theirs):
        channel.close()


def test_a_rank_leaves_what_it_has_loaded_again_out_of_collections() -> None:
    executor: Any = SimpleNamespace(sleep=lambda: None, wake_up=lambda: None)
    try:
        gc.freeze()
        assert rank_server._answer(executor, "sleep", ()) is None
        assert gc.get_freeze_count() == 0
        assert rank_server._answer(executor, "wake_up", ()) is None
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_a_rank_holds_its_part_of_a_quantised_checkpoint(tmp_path: Path) -> None:
    folder = save_quantized("fp8 block", tmp_path)
    whole, part = (plan_of(folder, OPTIONS | {"tensor_parallel_size": size}).weights for size in (1, 2))
    layer = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 384 * 128  # bytes of q, o, k, v and the MLP
    assert whole - part >= 4 * layer // 2


def test_a_rank_holds_several_parts_of_a_joined_weight() -> None:
    """A rank keeps its heads of q, k and v out of one stored `qkv_proj`."""
    codes, scale = torch.randn(24, 64).to(torch.float8_e4m3fn), torch.rand(24, 1)
    weight, name = GroupedWeight(codes, scale, 64, 64), "layers.0.qkv_proj.weight"
    parts = (slice(0, 4), slice(12, 16), slice(20, 24))
    x, device = torch.randn(3, 64), torch.device("cpu")

    def outputs(rows: Mapping[str, Rows], count: int) -> Tensor:
        layer = Linear(64, {"qkv_proj": count}, False, torch.float32, device, rows=rows)
        layer.allocate({name: Fp8Format(None, torch.float32)})
        layer.hold(name, layer.held_parts(name, weight))
        layer.pack()
        return layer(x)

    whole = outputs({}, 24)
    assert torch.equal(outputs({"qkv_proj": Rows(24, parts)}, 12), torch.cat([whole[:, part] for part in parts], 1))


@pytest.mark.full
@pytest.mark.parametrize("scheme", sorted(SCHEMES.keys() - {"mlx 8 bits"}))  # its config names another model's layers
def test_all_formats_answer_with_the_bits_of_one_process(scheme: str, tmp_path: Path) -> None:
    folder = save_quantized(scheme, tmp_path)
    with LLM(folder, **OPTIONS, dtype="float32") as llm:
        alone = answers(llm, PROMPTS[1], PARAMS[0])
    with LLM(folder, **OPTIONS, dtype="float32", tensor_parallel_size=2) as llm:
        assert answers(llm, PROMPTS[1], PARAMS[0]) == alone


@pytest.mark.full
@pytest.mark.parametrize(
    ("split", "name"),
    [
        *(({"tensor_parallel_size": 2}, name) for name in FAMILIES),
        *(({"pipeline_parallel_size": 2}, name) for name in STAGED),
        *(({"pipeline_parallel_size": 2, "mm_encoder_tp_mode": "data"}, name) for name in TOWERS),
    ],
    ids=str,
)
def test_families_answer_with_the_bits_of_one_process(split: Mapping[str, Any], name: str, tmp_path: Path) -> None:
    row = load_rows()[name]
    folder = save(row, tmp_path / "model")
    prompts = [ask(row, case, seed).ours for seed, case in enumerate(row.default_cases())]
    with make_llm(row, folder) as llm:
        alone = answers(llm, prompts, PARAMS[0])
    with make_llm(row, folder, **split) as llm:
        assert answers(llm, prompts, PARAMS[0]) == alone


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_stands_still_is_replaced(number: signal.Signals) -> None:
    with LLM(MODEL, **OPTIONS, tensor_parallel_size=2) as llm:
        before, core, (peer,) = answers(llm, PROMPTS, PARAMS), llm.engine.loop.core.pid, peers(llm)
        os.kill(peer, number)
        wait_until(lambda: llm.engine.loop.core.pid != core)
        assert answers(llm, PROMPTS, PARAMS) == before
        assert not Path(f"/proc/{peer}").exists()


def test_a_rank_that_ends_while_it_loads_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks() -> list[int]:
        cores = children_of(os.getpid(), "core.server")
        return [rank for core in cores for rank in children_of(core, "rank_server")]

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(LLM, MODEL, **OPTIONS, tensor_parallel_size=2)
        wait_until(lambda: bool(ranks()))
        os.kill(ranks()[0], signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            loading.result()
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_rank_that_ends_within_a_request_gives_a_typed_error() -> None:
    with LLM(MODEL, **OPTIONS, tensor_parallel_size=2) as llm:
        stream = llm.stream("The sky is", SamplingParams(max_tokens=400, ignore_eos=True))
        next(stream)
        os.kill(peers(llm)[0], signal.SIGKILL)
        *_, last = stream
        assert last.error.code == "engine_dead"


class Only:
    """A logits processor that allows one token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, token_ids: Any, logits: Any) -> None:
        kept = float(logits[self.token])
        logits.fill_(-float("inf"))
        logits[self.token] = kept


def test_no_process_is_left_and_processors_run_on_all_ranks() -> None:
    register_logits_processor("only", Only)
    with LLM(MODEL, **OPTIONS, tensor_parallel_size=2) as llm:
        left = [llm.engine.loop.core.pid, *peers(llm)]
        params = SamplingParams(max_tokens=3, logits_processors={"only": {"token": 17}}, ignore_eos=True)
        assert answers(llm, ["a"], params)[0][1] == [17, 17, 17]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"tensor_parallel_size": 5}, "divides neither"),
        ({"tensor_parallel_size": 64}, "4 attention heads"),
        ({"pipeline_parallel_size": 5}, "4 layers"),
        ({"pipeline_parallel_size": 5, "tensor_parallel_size": 2}, "pipeline_parallel_size=5"),
        ({"tensor_parallel_size": 5, "pipeline_parallel_size": 2}, "divides neither"),
        ({"tensor_parallel_size": 2, "parts": "encoder"}, "parts"),
        ({"tensor_parallel_size": 2, "async_scheduling": True}, "async_scheduling"),
        ({"tensor_parallel_size": 2, "speculative_config": {"model": MODEL, "num_speculative_tokens": 2}}, "drafts"),
    ],
    ids=str,
)
def test_what_ranks_cannot_divide_is_refused(options: Mapping[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word) as raised:
        LLM(MODEL, **OPTIONS, **options)
    assert raised.value.info.param == next(name for name in options if name.endswith("parallel_size"))


@pytest.mark.parametrize(("size", "layers"), [(2, False), (4, False), (2, True)])
def test_what_ranks_send_is_what_the_plan_says(size: int, layers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of rank 0 computes alone, and what it would send is counted. The results are wrong, their shapes are right."""
    sent: list[int] = []

    def gather(self: Ranks, x: Tensor) -> Tensor:
        sent.append(x.nbytes)
        return torch.cat([x] * size, 1)

    def share(self: Ranks, x: Tensor, add: Tensor | None, source: int) -> tuple[Tensor, Tensor]:
        sent.extend([2 * x.nbytes] if source == self.rank else [])
        return x, torch.zeros_like(x) if add is None else add

    monkeypatch.setattr(Ranks, "gather", gather)
    monkeypatch.setattr(Ranks, "share", share)
    monkeypatch.setattr(loader, "load_engine", partial(loader.load_engine, ranks=[Ranks(0, size, layers)]))
    with LLM(MODEL, **OPTIONS, warm_up=False, engine_process=False, async_scheduling=False) as llm:
        sent.clear()
        (output,) = llm.generate(["The sky is"], SamplingParams(max_tokens=1), use_tqdm=False)
        rows = len(output.prompt_token_ids)
    kind = "pipeline_parallel_size" if layers else "tensor_parallel_size"
    traffic = plan_of(MODEL, OPTIONS | {kind: size}).traffic
    assert len(sent) == traffic.messages == (1 if layers else 4 * 4)
    assert sum(sent) == rows * traffic.row_bytes + traffic.logits_row_bytes
    assert plan_of(MODEL, OPTIONS).traffic is None


def test_logits_of_an_untied_head_are_sent() -> None:
    """Each of two ranks sends half of a row of logits: `vocab / 2` numbers of 4 bytes."""
    with building_for(Ranks(0, 2)):
        model = nn.ModuleDict({"head": LmHead(8, 10, None, torch.float32, torch.device("meta"))})
    assert rank_traffic(model) == RankTraffic(1, 0, 5 * 4)


def test_the_plan_says_what_a_rank_sends_of_encoder_rows() -> None:
    """`test_encoder_ranks` counts what is sent."""
    whole, divided = (
        plan_of(MODEL, OPTIONS | {"tensor_parallel_size": 4, "mm_encoder_tp_mode": mode}).traffic
        for mode in ("weights", "data")
    )
    assert divided == replace(whole, encoder_row_bytes=128 * 4 // 4)
    assert f"{128:,}" in str(divided)
    assert plan_of(MODEL, OPTIONS | {"mm_encoder_tp_mode": "data"}).traffic is None


def test_the_ranks_of_stages_that_are_divided() -> None:
    assert rank_groups(0, 1, 1) == ()
    assert rank_groups(1, 2, 1) == (Ranks(1, 2),)
    assert rank_groups(2, 1, 3) == (Ranks(2, 3, True),)
    assert rank_groups(3, 2, 3) == (Ranks(1, 2, members=(2, 3)), Ranks(1, 3, True, members=(1, 3, 5)))
    parts = [
        plan_of(MODEL, OPTIONS | {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "max_model_len": 512})
        for tensor, stages in ((1, 1), (2, 1), (1, 2), (2, 2))
    ]
    weights = [part.weights for part in parts]
    assert weights[3] < min(weights[1:3]) < weights[0]


def test_all_groups_of_ranks_wait_equally_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups of stages and of their parts, which torch would let wait for half an hour."""
    made = list[tuple[list[int], timedelta | None]]()
    monkeypatch.setattr("sensorium.models.layers.ranks._groups", {})
    monkeypatch.setattr(
        torch.distributed, "new_group", lambda members, timeout=None: made.append((members, timeout)) or len(made)
    )
    limit = timedelta(seconds=rank_executor.GATHER_SECONDS)
    make_process_groups(2, 2, limit)
    assert made == [([0, 1], limit), ([0, 2], limit), ([1, 3], limit), ([2, 3], limit)]
    made.clear()
    make_process_groups(1, 2, limit)
    assert made == []


def test_a_plan_is_that_of_a_rank() -> None:
    """A rank has half of the weights of the layers, and half of the bytes of a cached token."""
    whole, part = (plan_of(MODEL, OPTIONS | {"tensor_parallel_size": size, "max_model_len": 512}) for size in (1, 2))
    layer = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 384 * 128  # numbers of q, o, k, v and the MLP
    assert whole.weights - part.weights >= 4 * layer * 4 // 2
    assert whole.weights - part.weights <= 4 * (layer + 4096) * 4 // 2  # with biases, and padding of panels
    assert part.kv_cache <= whole.kv_cache // 2
