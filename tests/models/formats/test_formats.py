"""Quantised checkpoints: every format against a plain formula, and two families against the same checkpoint stored wide."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu import running_with
from family import ask
from measured import peak_bytes
from parity import ROWS, LoadedModels, make_llm, record
from quantized import SCHEMES, Scheme, mxfp4, write
from safetensors.torch import load_file, save_file
from sensorium import LLM
from sensorium.callers.errors import CheckpointError, ConfigError
from sensorium.checkpoints.formats.read import read_quantization
from sensorium.engine.config import make_config
from sensorium.engine.setup.doctor import explain
from sensorium.kernels import native
from sensorium.kernels.dispatch import use_backends
from sensorium.kernels.linear.eight_bit import Fp8Weight, Int8Weight
from sensorium.kernels.linear.grouped import GroupedWeight, ShardedWeight
from sensorium.kernels.linear.grouped_linear import grouped_linear
from sensorium.kernels.linear.groups import GroupPanelWeight
from sensorium.kernels.linear.int8 import int8_linear_reference
from sensorium.kernels.linear.panels import Panels
from sensorium.models.interface import StepLimits
from sensorium.models.layers.linear import Linear, deferred_weights
from sensorium.models.memory_formulas import SMALL, OpBytes
from sensorium.models.stored_formats import assign
from sensorium.models.weights import fill
from torch import nn

CPU = torch.device("cpu")
ROWS_OUT = {"q_proj": 80, "k_proj": 32}
INPUTS = 96
PREFIX = "model.language_model.layers.0."
E2E = ("fp8 block", "ct w4a16", "ct w8a8", "ct nvfp4", "awq", "gptq ordered", "bnb nf4 nested", "bnb int8", "torchao int8")
each = pytest.mark.parametrize("name", SCHEMES)


class Root(nn.Module):
    prefixes = (("model.", ""),)

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        with deferred_weights():
            layers = nn.ModuleList([nn.ModuleDict({"qkv": Linear(INPUTS, ROWS_OUT, True, dtype, CPU)})])
        self.language_model = nn.ModuleDict({"layers": layers})

    @property
    def qkv(self) -> Linear:
        return self.language_model["layers"][0]["qkv"]

    def convert_weights(self, weights: Any) -> Any:
        return weights


def made(scheme: Scheme) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return stored tensors of a Linear, its dequantised weight and its bias."""
    gen, stored, wide = torch.Generator().manual_seed(0), {}, []
    for name, rows in ROWS_OUT.items():
        parts, value = scheme.pack(torch.randn(rows, INPUTS, generator=gen))
        bias = torch.randn(rows, generator=gen)
        stored |= {f"{PREFIX}{name}.{part}": tensor for part, tensor in parts.items()} | {f"{PREFIX}{name}.bias": bias}
        wide.append((value, bias))
    return stored, torch.cat([value for value, _ in wide]), torch.cat([bias for _, bias in wide])


def loaded(scheme: Scheme, stored: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> Root:
    root = Root(dtype)
    quantization = read_quantization(scheme.config)
    assert quantization is not None
    assign(root, quantization, {name: tensor.to("meta") for name, tensor in stored.items()})
    fill(root, stored.items(), root.prefixes)
    return root


@each
def test_a_linear_computes_with_the_dequantised_weight(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENSORIUM_KERNELS", "int4_linear=torch")
    stored, weight, bias = made(SCHEMES[name])
    layer = loaded(SCHEMES[name], stored).qkv
    x = torch.randn(21, INPUTS, generator=torch.Generator().manual_seed(2))
    shards = layer.packed
    assert isinstance(shards, ShardedWeight)
    held = torch.cat([shard.dequantize() for shard in shards.shards])
    torch.testing.assert_close(held, weight, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    assert torch.equal(layer(x[3:4]), layer(x)[3:4])


@pytest.mark.parametrize("instructions", ["best", "avx2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each
def test_stored_formats_have_products_in_cpp(name: str, dtype: torch.dtype, instructions: str) -> None:
    stored, weight, bias = made(SCHEMES[name])
    with running_with(instructions) if instructions == "avx2" else nullcontext():
        layer = loaded(SCHEMES[name], stored, dtype).qkv
        assert isinstance(layer.packed, GroupPanelWeight) == (native.products() is not None)
        x = torch.randn(21, INPUTS, generator=torch.Generator().manual_seed(2)).to(dtype)
        limit = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(layer(x).float(), x.float() @ weight.T + bias.to(dtype).float(), rtol=limit, atol=limit)
        assert torch.equal(layer(x[3:4]), layer(x)[3:4])


@pytest.mark.parametrize("kernels", ["", "int4_linear=torch"])
@each
def test_the_plan_has_the_held_bytes(name: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENSORIUM_KERNELS", kernels)
    stored, _, bias = made(SCHEMES[name])
    layer = loaded(SCHEMES[name], stored).qkv
    assert isinstance(layer.packed, ShardedWeight | GroupPanelWeight)
    held = layer.packed.nbytes + bias.nbytes * isinstance(layer.packed, GroupPanelWeight)
    layer.weight = torch.empty(sum(ROWS_OUT.values()), INPUTS, device="meta")
    assert layer.packed_bytes(CPU) == held
    root, quantization = Root(torch.float32), read_quantization(SCHEMES[name].config)
    assert quantization is not None
    assign(root, quantization, None)  # without weight files: a scale may have 4 bytes instead of 2
    assert 0.5 * held < root.qkv.packed_bytes(CPU) < 1.5 * held


@pytest.mark.parametrize("name", ["ct w8a8", "bnb int8", "torchao int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_products_take_the_stored_integers(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, weight, bias = made(SCHEMES[name])
    with use_backends("int4_linear=torch"):
        plain = loaded(SCHEMES[name], stored, dtype).qkv.packed
    assert isinstance(plain, ShardedWeight)
    held = [shard for shard in plain.shards if isinstance(shard, GroupedWeight)]
    monkeypatch.setattr(Linear, "quantization", "int8")
    layer = loaded(SCHEMES[name], stored, dtype).qkv
    assert isinstance(layer.packed, Panels | Int8Weight)
    codes, scales = (torch.cat(several) for several in zip(*map(stored_integers, held), strict=True))
    torch.testing.assert_close(codes.float() * scales[:, None], weight, rtol=1e-6, atol=1e-6)
    x = torch.randn(21, INPUTS, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = int8_linear_reference(x, Int8Weight(codes, scales, bias.to(dtype)))
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("name", ["fp8 tensor", "ct fp8", "ct fp8 dynamic"])
def test_fp8_products_take_the_stored_codes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, weight, bias = made(SCHEMES[name])
    monkeypatch.setattr(Linear, "quantization", "fp8")
    layer = loaded(SCHEMES[name], stored).qkv
    assert isinstance(layer.packed, Fp8Weight)
    torch.testing.assert_close(layer.packed.weight.float() * layer.packed.scale[:, None], weight, rtol=1e-6, atol=1e-6)
    x = torch.randn(21, INPUTS, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(layer(x), x @ weight.T + bias, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_of_fp8_runs_with_fp8_products(world: LoadedModels, tmp_path: Path) -> None:
    packed, _ = write(world.folder("qwen3_vl"), tmp_path, SCHEMES["ct fp8 dynamic"], in_decoder)
    question = ask(ROWS["qwen3_vl"], "i", 0)
    with make_llm(ROWS["qwen3_vl"], packed, dtype="float32", quantization="fp8") as llm:
        layers = [
            one for one in llm.engine.loop.core.executor.runner.model.modules() if isinstance(one, Linear) and one.formats
        ]
        assert {type(layer.packed) for layer in layers} == {Fp8Weight}
        ours, logits = record(llm, question, 4)
    with make_llm(ROWS["qwen3_vl"], packed, dtype="float32") as llm:
        theirs, wide = record(llm, question, 4)
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    torch.testing.assert_close(logits, wide, rtol=1e-3, atol=1e-3)
    blocks, _ = write(world.folder("qwen3_vl"), tmp_path / "blocks", SCHEMES["ct fp8 block"], in_decoder)
    with pytest.raises(ConfigError, match="or that store fp8 with one scale per output"):
        LLM(blocks, device="cpu", quantization="fp8")


def stored_integers(shard: GroupedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    scales = shard.output_scales()
    assert scales is not None
    return shard.codes, scales


@pytest.mark.parametrize("quantised", [False, True])
def test_mlx_checkpoint_as_mlx_vlm_writes_it(quantised: bool, world: LoadedModels, tmp_path: Path) -> None:
    """The checkpoint has other names, quantised embeddings and head, and a convolution with its channels last."""
    packed, wide = tmp_path / "packed", tmp_path / "wide"
    source, scheme = world.folder("qwen3_vl"), SCHEMES["mlx 4 bits"]
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        own = name.replace("model.language_model.", "language_model.model.").replace("model.visual.", "vision_tower.")
        own = f"language_model.{own}" if own.startswith("lm_head") else own
        stored[own] = values[name] = tensor
        if tensor.ndim == 5:
            stored[own] = tensor.movedim(1, -1).contiguous()
        elif quantised and tensor.ndim == 2 and ("language_model" in name or "lm_head" in name):
            parts, values[name] = scheme.pack(tensor.float())
            del stored[own]
            stored |= {f"{own.removesuffix('.weight')}.{part}": one for part, one in parts.items()}
    for folder, content in ((packed, stored), (wide, values)):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(content, folder / "model.safetensors", {"format": "mlx" if folder is packed else "pt"})
    config = json.loads((source / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | ({"quantization": dict(scheme.config)} if quantised else {})))
    question = ask(ROWS["qwen3_vl"], "iv", 0)
    engines = [make_llm(ROWS["qwen3_vl"], folder) for folder in (packed, wide)]
    (ours, logits), (theirs, expected) = (record(llm, question, 8) for llm in engines)
    assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    for llm in engines:
        llm.close()


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"bits": 3}, "bits=3"), ({"mode": "mxfp4"}, "mode='mxfp4'"), ({"group_size": 0}, "group_size=0")],
    ids=str,
)
def test_mlx_settings_that_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_quantization({"group_size": 64, "bits": 4} | changed)


def test_bfloat16_is_rounded_once() -> None:
    stored, weight, bias = made(SCHEMES["ct w4a16"])
    layer = loaded(SCHEMES["ct w4a16"], stored, torch.bfloat16).qkv
    x = torch.randn(5, INPUTS).bfloat16()
    expected = nn.functional.linear(x.float(), weight, bias.bfloat16().float()).bfloat16()
    torch.testing.assert_close(layer(x), expected, rtol=1e-2, atol=1e-2)


def test_panels_join_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels of one, of some and of all outputs give the same weights, also where blocks of outputs are cut."""
    gen = torch.Generator().manual_seed(0)
    weight = GroupedWeight(torch.randint(-128, 127, (37, 30), generator=gen).to(torch.int8), torch.rand(10, 3), 14, 30, 4)
    x = torch.randn(3, 30, generator=gen)
    expected = nn.functional.linear(x, weight.dequantize())
    for numbers in (1, 100, 1 << 20):
        monkeypatch.setattr("sensorium.kernels.linear.grouped.PANEL_NUMBERS", numbers)
        torch.testing.assert_close(grouped_linear(x, ShardedWeight([weight], None)), expected, rtol=1e-4, atol=1e-4)


def chosen(name: str) -> bool:
    """Choose the products of the decoder and the MLPs of the tower."""
    decoder = "language_model.layers" in name and ("_proj.weight" in name or ".experts." in name)
    return decoder or (".blocks." in name and "mlp" in name and name.endswith(".weight"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> LoadedModels:
    return LoadedModels(tmp_path_factory.mktemp("formats"))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
@pytest.mark.parametrize("name", E2E)
def test_answers_are_those_of_the_dequantised_checkpoint(name: str, family: str, world: LoadedModels, tmp_path: Path) -> None:
    row = ROWS[family]
    packed, wide = write(world.folder(family), tmp_path, SCHEMES[name], chosen)
    question = ask(row, "iv", 0)
    engines = [make_llm(row, folder) for folder in (packed, wide)]
    (ours, logits), (theirs, expected) = (record(llm, question, 24) for llm in engines)
    assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-3 * float(expected.std()))
    model = engines[0].engine.loop.core.executor.runner.model
    quantized = [layer for layer in model.modules() if isinstance(layer, Linear) and layer.formats]
    assert len(quantized) > 8
    assert plan(packed) < plan(wide)


@pytest.mark.parametrize("family", ["text-qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("name", ["fp8 block", "gptq ordered", "bnb nf4 nested"])
def test_tensors_that_are_split_are_dequantised(name: str, family: str, world: LoadedModels, tmp_path: Path) -> None:
    """Queries and gates are one stored tensor, and in Qwen3-Next also the inputs of a gated delta net."""
    products = re.compile(r"(self_attn|mlp|linear_attn)\.\S*(_proj|in_proj_qkvz?|in_proj_z)\.weight")
    packed, wide = write(world.folder(family), tmp_path, SCHEMES[name], lambda one: bool(products.search(one)))
    row = ROWS[family]
    question = ask(row, "", 0)
    engines = [make_llm(row, folder) for folder in (packed, wide)]
    (ours, logits), (theirs, expected) = (record(llm, question, 24) for llm in engines)
    assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-3 * float(expected.std()))
    model = engines[0].engine.loop.core.executor.runner.model
    formats = {path: bool(layer.formats) for path, layer in model.named_modules() if isinstance(layer, Linear)}
    assert formats["language_model.layers.1.self_attn.out"]
    assert not formats["language_model.layers.1.self_attn.qkv"]
    assert plan(packed) < plan(wide)


def test_gpt_oss_as_it_is_published(world: LoadedModels, tmp_path: Path) -> None:
    """Experts in MXFP4 with wide biases, outputs of gate and up alternating; everything else is wide."""
    row, packed = ROWS["text-gpt_oss"], tmp_path / "packed"
    source = world.folder(row.name)

    def quantise(config: Any, tensors: dict[str, torch.Tensor], keep: bool) -> None:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            several = [mxfp4(matrix.T.contiguous()) for matrix in tensors.pop(name)]
            if keep:
                tensors[name] = torch.stack([value.T for _, value in several]).contiguous()
                continue
            tensors[f"{name}_blocks"] = torch.stack([parts["weight_packed"] for parts, _ in several]).unflatten(2, (-1, 16))
            tensors[f"{name}_scales"] = torch.stack([parts["weight_scale"] for parts, _ in several])
            wide = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
            config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": wide}

    changed(source, packed, partial(quantise, keep=False))
    wide = changed(source, tmp_path / "wide", partial(quantise, keep=True))
    question = ask(row, "", 0)
    engines = [make_llm(row, folder) for folder in (packed, wide)]
    (ours, logits), (theirs, expected) = (record(llm, question, 24) for llm in engines)
    assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-3 * float(expected.std()))
    assert plan(packed) < plan(wide)
    for llm in engines:
        llm.close()


def changed(folder: Path, target: Path, change: Any) -> Path:
    """Copy a checkpoint with `change(config, tensors)` applied."""
    shutil.copytree(folder, target)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors")
    return target


def one_wide_shard(config: Any, tensors: dict[str, torch.Tensor]) -> None:
    stem = next(name for name in tensors if name.endswith("layers.1.self_attn.k_proj.weight_scale")).removesuffix(
        "weight_scale"
    )
    for name in [name for name in tensors if name.startswith(stem)]:
        del tensors[name]
    tensors[stem] = torch.zeros(32, 64)


def three_bits(config: Any, tensors: Any) -> None:
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 3


def cut_scales(config: Any, tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if name.endswith("layers.1.mlp.down_proj.weight_scale"))
    tensors[name] = tensors[name][:, :1].contiguous()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda config, tensors: config["quantization_config"].update(quant_method="aqlm"), "quant_method 'aqlm'"),
        (three_bits, r"\S+proj is quantised as int with 3 bits, strategy group"),
        (one_wide_shard, r"layers.1.self_attn.k_proj.weight is not; both are parts of one product"),
        (cut_scales, r"layers.1.mlp.down_proj.weight_scale has shape \[64, 1\], the config needs \[64, 8\]"),
        (lambda config, tensors: config.pop("quantization_config"), r"lacks language_model\S+weight"),
    ],
)
def test_what_cannot_be_read_is_named(change: Any, text: str, world: LoadedModels, tmp_path: Path) -> None:
    packed, _ = write(world.folder("qwen3_vl"), tmp_path, SCHEMES["ct w4a16"], chosen)
    with pytest.raises(CheckpointError, match=text):
        make_llm(ROWS["qwen3_vl"], changed(packed, tmp_path / "changed", change))


def test_weights_of_8_bits_need_a_config(world: LoadedModels, tmp_path: Path) -> None:
    packed, _ = write(world.folder("qwen3_vl"), tmp_path, SCHEMES["ct fp8"], chosen)

    def no_scales(config: Any, tensors: dict[str, torch.Tensor]) -> None:
        del config["quantization_config"]
        for name in [name for name in tensors if name.endswith("_scale")]:
            del tensors[name]

    with pytest.raises(CheckpointError, match="holds float8_e4m3fn: it is quantised"):
        make_llm(ROWS["qwen3_vl"], changed(packed, tmp_path / "changed", no_scales))


def test_int8_products_run_a_checkpoint_of_integers(world: LoadedModels, tmp_path: Path) -> None:
    """The tower is not quantised and stays wide. The plan counts what is held."""
    packed, _ = write(world.folder("qwen3_vl"), tmp_path, SCHEMES["ct w8a8"], in_decoder)
    question = ask(ROWS["qwen3_vl"], "i", 0)
    with make_llm(ROWS["qwen3_vl"], packed, dtype="float32", quantization="int8") as llm:
        model = llm.engine.loop.core.executor.runner.model
        layers = [layer for layer in model.modules() if isinstance(layer, Linear) and not layer.exact]
        assert {_holds_int8(layer) for layer in layers if layer.formats} == {True}
        assert not any(_holds_int8(layer) for layer in layers if not layer.formats)
        ours, logits = record(llm, question, 4)
    theirs, wide = record(make_llm(ROWS["qwen3_vl"], packed, dtype="float32"), question, 4)
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    assert 0 < float((logits - wide).std()) < 0.1 * float(wide.std())
    make_llm(ROWS["qwen3_vl"], packed, dtype="float32", quantization={"method": "int8"}).close()
    other, _ = write(world.folder("qwen3_vl"), tmp_path / "other", SCHEMES["ct w4a16"], chosen)
    with pytest.raises(ConfigError, match="or that store int8 with one scale per output"):
        LLM(other, device="cpu", quantization="int8")


def _holds_int8(layer: Linear) -> bool:
    return isinstance(layer.packed, Int8Weight) or (
        isinstance(layer.packed, Panels) and layer.packed.weight.dtype == torch.int8
    )


def in_decoder(name: str) -> bool:
    return chosen(name) and "language_model" in name


def test_a_quantised_checkpoint_is_not_quantised_again(world: LoadedModels, tmp_path: Path) -> None:
    packed, _ = write(world.folder("qwen3_vl"), tmp_path, SCHEMES["ct fp8"], chosen)
    with pytest.raises(ConfigError, match="for checkpoints that are not quantised yet"):
        LLM(packed, device="cpu", quantization="int4")


def test_a_named_format_needs_a_quantised_checkpoint(world: LoadedModels, tmp_path: Path) -> None:
    wide = world.folder("qwen3_vl")
    with pytest.raises(ConfigError, match="quantization='awq', but the checkpoint is not quantised; leave it out"):
        LLM(wide, device="cpu", quantization="awq")
    packed, _ = write(wide, tmp_path, SCHEMES["ct fp8"], chosen)
    with LLM(packed, device="cpu", quantization="compressed-tensors") as llm:
        assert llm.config.quantization is None


def test_a_folder_without_weights_is_planned_by_its_config(world: LoadedModels, tmp_path: Path) -> None:
    """Ignored modules stay wide, and the decoder alone is planned quantised."""
    scheme = SCHEMES["ct w4a16"]
    named = Scheme(scheme.pack, {**scheme.config, "ignore": ["lm_head", "re:.*visual.*"]})
    packed, _ = write(world.folder("qwen3_vl"), tmp_path, named, lambda name: chosen(name) and "language_model" in name)
    planned, names = plan(packed), list(load_file(packed / "model.safetensors"))
    (packed / "model.safetensors").unlink()
    assert plan(packed) == planned
    write_index(packed, names)
    assert plan(packed) == planned


def test_a_config_in_a_section_is_read_before_weights(world: LoadedModels, tmp_path: Path, monkeypatch: Any) -> None:
    """Kimi-K2.5 states its 4-bit experts in text_config; names that do not fit are found in the index."""
    packed, _ = write(world.folder("kimi_k25"), tmp_path, SCHEMES["ct w4a16"], lambda one: ".experts." in one)
    file, wide = packed / "config.json", plan(world.folder("kimi_k25"))
    config = json.loads(file.read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    file.write_text(json.dumps(config))
    assert plan(packed) < wide
    names = list(load_file(packed / "model.safetensors"))
    with LLM(packed, device="cpu", max_model_len=128) as llm:
        assert llm.generate("def f(x):", use_tqdm=False)[0].error is None
        assert llm.explain().weights == plan(packed)
    (packed / "model.safetensors").unlink()
    write_index(packed, [*names, "odd.weight"])
    monkeypatch.setattr("sensorium.models.weights.read_checkpoint", lambda folder: pytest.fail("weights were read"))
    for call in (LLM, plan):
        with pytest.raises(CheckpointError, match=r"unknown odd\.weight"):
            call(packed)


def write_index(folder: Path, names: list[str]) -> None:
    index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["ct w4a16", "fp8 block", "gptq", "bnb nf4 nested", "awq"])
def test_names_of_an_index_are_compared_without_weight_files(name: str, world: LoadedModels, tmp_path: Path) -> None:
    """The tensor names decide which modules are quantised, not the lists in the config."""
    packed, _ = write(world.folder("qwen3_vl_moe"), tmp_path, SCHEMES[name], lambda one: chosen(one) and "down_proj" in one)
    planned, names = plan(packed), list(load_file(packed / "model.safetensors"))
    (packed / "model.safetensors").unlink()
    write_index(packed, names)
    assert planned * 0.95 < plan(packed) < planned * 1.05
    lost = next(one for one in names if "layers.1.self_attn.o_proj" in one)
    for changed, message in ((set(names) - {lost}, "lacks .*o_proj"), ({*names, "odd.weight"}, r"unknown odd\.weight")):
        write_index(packed, list(changed))
        with pytest.raises(CheckpointError, match=message):
            plan(packed)


def plan(folder: Path) -> int:
    return explain(make_config(folder, {"max_model_len": 128, "device": "cpu"})).weights


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quant_method": "awq", "version": "gemv"}, "version='gemv'; supported are 'gemm'"),
        ({"quant_method": "awq", "bits": 8}, "bits=8; supported are 4"),
        ({"quant_method": "gptq", "bits": 3}, "bits=3; supported are 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size=0"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}, "invalid pattern"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:(a+)+$": {}}}, "in dynamic: it has nested"),
        ({"quant_method": "awq", "modules_to_not_convert": ["re:(a|aa)+$"]}, "in modules_to_not_convert: it has nested"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*a" * 9]},
            "in ignore or exclude_modules: it has nested",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\]"),
        ({"quant_method": "compressed-tensors", "config_groups": []}, "no readable config_groups"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int2"}, "bnb_4bit_quant_type='int2'"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "must be a list of module names"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["re:("]}}}, "invalid pattern '\\('"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": [1]}, "quantization_config of gptq in config.json cannot be read"),
        ({"bits": 4, "mode": "affine"}, "quant_method ''"),
    ],
)
def test_settings_that_are_not_supported_are_named(config: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        read_quantization(config)


def test_a_layout_of_torchao_that_is_not_supported_is_named() -> None:
    stored, _, _ = made(SCHEMES["torchao int8"])
    extra = {f"{PREFIX}q_proj._weight_act_pre_scale": torch.ones(INPUTS)}
    with pytest.raises(CheckpointError, match=r"layers.0.q_proj is quantised as torchao with _weight_act_pre_scale"):
        loaded(SCHEMES["torchao int8"], stored | extra)


@pytest.mark.parametrize("name", ["fp8 block", "ct w4a16", "bnb nf4"])
@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_takes_no_more_than_planned(
    name: str, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Panels are smaller here, so that the weight has several."""
    for module in ("sensorium.kernels.linear.grouped_linear", "sensorium.models.memory_formulas"):
        monkeypatch.setattr(import_module(module), "panel_rows", lambda inputs: 16)
    stored, _ = SCHEMES[name].pack(torch.randn(256, 512))
    quantization = read_quantization(SCHEMES[name].config)
    assert quantization is not None
    form = quantization.format_of(["x"], stored)
    assert form is not None
    shards = ShardedWeight([form.decode(stored)], None)
    x = torch.randn(rows, 512).to(dtype)
    limits = StepLimits(rows, rows, rows, CPU, dequantized=True)
    assert peak_bytes(lambda: grouped_linear(x, shards)) <= rows * OpBytes(dtype, limits).linear(512, 256, rows) + SMALL
