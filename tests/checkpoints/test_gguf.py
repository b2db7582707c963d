"""A GGUF file gives the same answers as a checkpoint in the Hub's layout with the dequantised values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from family import load_rows
from gguf_files import ARCHS, Kind, Q, everything, random_blocks, write
from oracle import save_checkpoint
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import CheckpointError, SensoriumError
from sensorium.checkpoints.gguf import architectures
from sensorium.checkpoints.gguf.reader import TYPES, Gguf, GgufTensor, read_gguf
from sensorium.checkpoints.gguf.tensors import on_meta, read_tensors
from sensorium.cli.main import main
from sensorium.engine.setup.doctor import describe_checkpoint
from sensorium.kernels import native
from sensorium.kernels.linear.blocks import BLOCKS, BlockWeight
from sensorium.kernels.linear.grouped import ShardedWeight
from sensorium.kernels.linear.groups import GroupPanelWeight
from sensorium.models.layers.linear import Linear
from sensorium.models.text.stacks import STACKS

PROMPTS = ["def f(x): return it", "os.path.join and shutil<eos>", "é ü 中文  \n\t"]
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
CHANGES = {
    "mistral": {"sliding_window": None},
    "qwen3_moe": {"norm_topk_prob": True},  # which llama.cpp assumes
    "gemma3_text": {
        "num_hidden_layers": 7, "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [4.0] * 8,
}  # fmt: skip
GROWN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_have_the_bits_of_the_reference(kind: str) -> None:
    number = Q[kind]
    numbers, size = BLOCKS[kind]
    assert TYPES[number] == (kind, numbers, size)
    assert gguf.GGML_QUANT_SIZES[number] == (numbers, size)
    rng = np.random.default_rng(0)
    if number in (Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0):
        blocks = gguf.quantize(rng.standard_normal((37, 3 * numbers), dtype=np.float32), number)
    else:
        blocks = random_blocks((37, 3 * numbers), number, 0)
    weight = BlockWeight(torch.from_numpy(blocks), kind)
    expected = torch.from_numpy(gguf.dequantize(blocks, number))
    assert weight.shape == (37, 3 * numbers)
    assert torch.equal(weight.dequantize(), expected)
    assert torch.equal(weight.dequantize(5, 9), expected[5:9])
    assert torch.equal(weight.select(slice(1, None, 3)).dequantize(), expected[1::3])


def open_llm(path: Path, **options: Any) -> LLM:
    return LLM(path, **{"dtype": "float32", "device": "cpu", "max_model_len": 256, "block_size": 4} | options)


def answers(path: Path, **options: Any) -> list[tuple[Any, ...]]:
    llm = open_llm(path, **options)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5)
    found = []
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        assert output.error is None, output.error
        scores = [[entry.logprob for entry in step.values()] for step in output.outputs[0].logprobs]
        found.append((output.prompt_token_ids, output.outputs[0].token_ids, scores))
    llm.close()
    return found


def check(
    kind: str, tmp_path: Path, types: Kind, more: dict[str, Any] | None = None, by_head: bool = False, **changes: Any
) -> Path:
    """Compare the answers of a GGUF file with those of a checkpoint with the dequantised values. Return the file."""
    source = save_checkpoint(tmp_path / "source", *load_rows()["text-llama"].build(0, kind=kind, **changes))
    file, wide = write(source, tmp_path / "gguf", types, by_head, **more or {})
    for ours, theirs in zip(answers(file), answers(wide), strict=True):
        assert ours[:2] == theirs[:2]
        np.testing.assert_allclose(np.array(ours[2]), np.array(theirs[2]), rtol=0, atol=2e-4)
    return file


@pytest.mark.full
def test_doctor_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_checkpoint(tmp_path / "source", *load_rows()["text-llama"].build(0))
    file, _ = write(source, tmp_path / "gguf", everything(Q.F16))
    assert main(["doctor", "--model", str(file.parent), "--device", "cpu"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out


def test_names_of_norms_are_those_of_the_stack():
    for arch in architectures.ARCHS.values():
        stack = STACKS[arch.kind]
        assert (arch.norms, arch.fused, arch.norm_offset) == (stack.norms, stack.fused, stack.norm_offset), arch.name


@pytest.mark.parametrize("kind", [kind for kind in ARCHS if not kind.endswith("_text") or kind == "gemma3_text"])
def test_architectures(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path, everything(Q.F32), tie=kind.startswith("gemma"), **CHANGES.get(kind, {}))


def test_scaled_positions(tmp_path: Path) -> None:
    check("llama", tmp_path, everything(Q.F16), rope_parameters=LLAMA3, head_dim=32)


@pytest.mark.parametrize("types", [Q.F32, Q.Q8_0])
def test_longrope_and_fused_products(types: Any, tmp_path: Path) -> None:
    limits = {"max_position_embeddings": 1024, "original_max_position_embeddings": 256, "sliding_window": 20}
    check("phi3", tmp_path, everything(types), rope_parameters=LONG, **limits)


@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention(kind: str, by_head: bool, tmp_path: Path) -> None:
    """`by_head`: the layout of files since April 2025."""
    latent = {"norm_topk_prob": False} if kind == "deepseek_v2" else {}
    types = everything(Q.F32 if kind == "deepseek_v2" else Q.Q8_0)
    shapes = {} if kind == "deepseek_v2" else {"moe_intermediate_size": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    check(kind, tmp_path, types, None, by_head, rope_parameters=GROWN, **latent, **shapes)


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_0, Q.Q5_1, Q.F16, Q.BF16], ids=lambda kind: kind.name)
def test_types(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    check("llama", tmp_path, everything(kind))


def mixture(name: str, value: np.ndarray) -> gguf.GGMLQuantizationType:
    """Mix types as Q4_K_M does."""
    if value.ndim < 2 or "ffn_gate_inp" in name:
        return Q.F32
    return {"output": Q.Q6_K, "token_embd": Q.Q5_K, "attn_v": Q.Q6_K, "ffn_down": Q.Q3_K, "attn_k": Q.Q2_K}.get(
        name.split(".")[-2].removesuffix("_exps"), Q.Q4_K
    )


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_k_types_in_one_file(kind: str, tmp_path: Path) -> None:
    experts = {"moe_intermediate_size": 256} if kind == "qwen3_moe" else {}
    file = check(kind, tmp_path, mixture, **WIDE, **experts, **CHANGES.get(kind, {}))
    llm = open_llm(file)
    layers = [
        layer for layer in llm.engine.loop.core.executor.runner.model.modules() if isinstance(layer, Linear) and layer.formats
    ]
    assert {stored.kind for layer in layers for stored in layer.formats.values()} == {"Q2_K", "Q3_K", "Q4_K", "Q6_K"}
    assert {type(layer.packed) for layer in layers} == {GroupPanelWeight if native.products() else ShardedWeight}
    llm.close()


def test_the_prompt_of_a_chat_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    model, words = load_rows()["text-llama"].build(0)
    words.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
    source = save_checkpoint(tmp_path / "source", model, words)
    file, wide = write(source, tmp_path / "gguf", everything(Q.Q8_0))
    messages = [{"role": "user", "content": "import os <eos> <|nothing|>"}]
    params = SamplingParams(temperature=0.0, max_tokens=4)
    ours, theirs = (open_llm(path).chat(messages, params, use_tqdm=False)[0] for path in (file, wide))
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    assert ours.outputs[0].text == theirs.outputs[0].text


def test_weights_stay_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model may be given as its folder or as a relative path. Without C++ kernels blocks are mapped, not copied."""
    monkeypatch.setenv("SENSORIUM_KERNELS", "int4_linear=torch")
    file = check("qwen2", tmp_path, everything(Q.Q8_0))
    monkeypatch.chdir(tmp_path)
    open_llm(Path("gguf/model.gguf")).close()  # has the form of a name on the Hub
    llm = open_llm(file.parent)
    model = llm.engine.loop.core.executor.runner.model
    layer = model.language_model.layers[0].mlp.gate_up
    assert isinstance(layer, Linear)
    assert [shard.kind for shard in layer.packed.shards] == ["Q8_0", "Q8_0"]
    gate, up = (shard.codes.data_ptr() for shard in layer.packed.shards)
    places = read_gguf(file).tensors
    assert up - gate == places["blk.0.ffn_up.weight"].offset - places["blk.0.ffn_gate.weight"].offset
    assert describe_checkpoint(file)["tokenizer"] == "GGUF"


def refused(tmp_path: Path, match: str, types: Kind | None = None, **more: Any) -> None:
    source = save_checkpoint(tmp_path / "source", *load_rows()["text-llama"].build(0, **WIDE))
    file, _ = write(source, tmp_path / "gguf", types or everything(Q.F16), **more)
    with pytest.raises(SensoriumError, match=match):
        open_llm(file)


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    for number, (match, more) in enumerate(
        {
            "has the architecture 'mamba'; supported are deepseek2": {"general.architecture": "mamba"},
            "lacks embedding_length": {"ARCH.embedding_length": None},
            "head_count in model.gguf is": {"ARCH.attention.head_count": [4, 2]},
            "block_count|num_hidden_layers": {"ARCH.block_count": 4_000_000_000},
            "make no config": {"ARCH.attention.head_count": 0},
            "rope.scaling.type 'longrope'": {"ARCH.rope.scaling.type": "longrope"},
            "tokenizer.ggml.model 'bert' is not supported": {"tokenizer.ggml.model": "bert"},
            "tokenizer.ggml.pre 'unheard-of' is not supported": {"tokenizer.ggml.pre": "unheard-of"},
            "holds no tokenizer.ggml.tokens": {"tokenizer.ggml.tokens": None},
            "has 2 entries for": {"tokenizer.ggml.token_type": [1, 1]},
        }.items()
    ):
        refused(tmp_path / str(number), match, **more)


def test_a_head_with_one_axis_is_left_to_the_check_of_shapes() -> None:
    file, shapes = Path("model.gguf"), {"token_embd.weight": (2, 2), "output.weight": (4,)}
    tensors = {name: GgufTensor(file, "F32", shape, 0, 16) for name, shape in shapes.items()}
    found = dict(read_tensors(Gguf(file, {"general.architecture": "llama"}, tensors), on_meta))
    assert found["lm_head.weight"].shape == (4,)


def test_an_unknown_quantisation_is_named(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "source", *load_rows()["text-llama"].build(0, **WIDE))
    file, _ = write(source, tmp_path / "gguf", everything(Q.Q8_0))
    data = file.read_bytes()
    name = b"blk.0.attn_output.weight"
    place = data.index(name) + len(name) + 4 + 16  # dimensions, then the type
    assert data[place : place + 4] == Q.Q8_0.to_bytes(4, "little")
    for kind, match in (
        (Q.IQ3_XXS, r"blk\.0\.attn_output\.weight in model\.gguf is quantised as IQ3_XXS; use a file with Q4_0"),
        (77, "has type 77"),
    ):
        file.write_bytes(data[:place] + int(kind).to_bytes(4, "little") + data[place + 4 :])
        with pytest.raises(CheckpointError, match=match):
            open_llm(file)
