"""Rules of models/: named shards, config checks, the tower's layout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cpu import needs_int8
from sensorium.callers.errors import ConfigError
from sensorium.kernels import native
from sensorium.kernels.dispatch import backend
from sensorium.kernels.linear import keeps_float16
from sensorium.kernels.linear.eight_bit import Int8Weight
from sensorium.kernels.linear.int4 import Int4Options
from sensorium.kernels.linear.int8 import int8_linear_reference, quantize_rows
from sensorium.kernels.linear.panels import Panels
from sensorium.models.families.qwen2_vl.model import Qwen2VL, Qwen25VL
from sensorium.models.layers.basic import EmbeddingTable
from sensorium.models.layers.linear import Linear, LmHead
from sensorium.models.text.decoder_config import decoder_spec
from sensorium.models.text.stacks import STACKS
from sensorium.models.vision.positions import plan_layout
from sensorium.models.weights import quantize

MODELS = Path(__file__).parents[2] / "models"
TEXT = {
    "vocab_size": 10,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
}


def test_models_multiply_only_through_linear() -> None:
    """Products with weights outside layers/ would escape packing, quantisation and sharding."""
    products = re.compile(r"F\.(linear|conv)|nn\.(Linear|Conv)|matmul|einsum|addmm|kernels\.linear import (linear|pack)|@ ")
    # multiply weights with each other while they are read, queries with keys, or a signal with a fixed filter
    others = ("merged_adapter.py", "adapter_packing.py", "voxtral_realtime/model.py", "usm.py", "bigvgan.py")
    others += ("ge2e.py", "pyannet.py")  # small networks beside a model, which tell speakers apart
    files = [file for file in MODELS.rglob("*.py") if "layers" not in file.parts and not file.as_posix().endswith(others)]
    assert len(files) > 5
    assert [file for file in files if products.search(file.read_text())] == []


def test_linear_fills_slices_and_drops_the_original() -> None:
    layer = Linear(4, {"q": 3, "k": 2}, True, torch.float32, torch.device("cpu"))
    views = dict(layer.tensors("attn."))
    assert list(views) == ["attn.q.weight", "attn.q.bias", "attn.k.weight", "attn.k.bias"]
    for i, view in enumerate(views.values()):
        view.fill_(i + 1.0)
    layer.pack()
    assert not hasattr(layer, "weight"), "the original is freed"
    assert layer(torch.ones(1, 4)).tolist() == [[6.0, 6.0, 6.0, 16.0, 16.0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"type": "cubic"}}, "'cubic' is not supported; known are default, factors, linear, dynamic"),
        ({"layer_types": ["sliding_attention"]}, "lacks 'sliding_window'"),
        ({"layer_types": ["random_attention"]}, "layer type 'random_attention' is not supported"),
        ({"hidden_act": "prelu"}, "parameters of its own"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads in config.json is '2'; it must be a positive integer"),
        ({"head_dim": 1 << 40}, "wider than the limit"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps in config.json is 'small'; it must be a number above 0"),
        ({"rope_theta": 0.0, "rope_scaling": {"rope_theta": -1.0}}, "rope_theta in config.json is -1.0"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}, "adds up to 3"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [4, 4]}}, "fits no head"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [-4, 8, 4]}}, "fits no head"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [8 - 2**60, 2**59, 2**59]}}, "fits no head"),
        ({"rope_scaling": None, "partial_rotary_factor": 1e300}, "partial_rotary_factor rotates"),
        ({"num_experts": 4, "num_experts_per_tok": 5, "moe_intermediate_size": 8}, "5 of 4 experts"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 3}, "1 of 3 groups"),
        ({"vocab_size": None}, "lacks 'vocab_size'"),
    ],
)
def test_contradictions_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder_spec(TEXT | change)


CPU = torch.device("cpu")
TOWER = {"depth": 1, "num_heads": 2, "patch_size": 14}
OLD_TOWER = TOWER | {"embed_dim": 16, "hidden_size": 32}
NEW_TOWER = TOWER | {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}


@pytest.mark.parametrize(
    ("model", "tower", "message"),
    [
        (Qwen2VL, OLD_TOWER | {"hidden_act": "prelu"}, "parameters of its own"),
        (Qwen2VL, OLD_TOWER | {"hidden_size": 48}, "rows have width 48, the decoder takes 32"),
        (Qwen25VL, NEW_TOWER | {"hidden_act": "unknown"}, "unknown"),
        (Qwen25VL, NEW_TOWER | {"window_size": 27}, "smaller than a merged patch of 28 pixels"),
        (Qwen25VL, NEW_TOWER | {"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"),
        (Qwen25VL, NEW_TOWER | {"num_heads": 4, "hidden_size": 24}, "width 24 .* 4 heads whose size is a multiple of 4"),
        (Qwen25VL, None, "lacks 'vision_config'"),
    ],
)
def test_contradictions_of_towers_are_named(model: type, tower: dict[str, object] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model(TEXT | {"vision_config": tower}, torch.float32, CPU)


def test_a_window_that_no_layer_uses_is_no_window() -> None:
    unused = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}
    assert decoder_spec(TEXT | unused) == decoder_spec(TEXT)


def test_a_mistral_decoder_has_windows_unless_the_config_says_null() -> None:
    """Like transformers, whose config.json leaves out values that are the default."""
    text, stack = TEXT, STACKS["mistral"]
    assert decoder_spec(text, stack).layers[0].mixer.window == 4096
    assert decoder_spec({**text, "sliding_window": None}, stack).layers[0].mixer.window is None


def test_heads_give_float32() -> None:
    table = torch.randn(10, 4).bfloat16()
    own = LmHead(4, 10, None, torch.bfloat16, CPU)
    dict(own.proj.tensors(""))["lm_head.weight"].copy_(table)
    own.proj.pack()
    x = torch.randn(3, 4).bfloat16()
    embedding = EmbeddingTable(10, 4, torch.bfloat16, CPU)
    embedding.weight.copy_(table)
    tied = LmHead(4, 10, embedding, torch.bfloat16, CPU)
    tied.pack()
    assert tied(x).dtype == torch.float32
    assert torch.equal(own(x), tied(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tied_head_and_its_embeddings_take_the_planned_bytes(dtype: torch.dtype) -> None:
    """They share one packed table where the C++ kernel multiplies this dtype."""
    embedding = EmbeddingTable(130, 6, dtype, CPU)
    table = torch.randn(130, 6).to(dtype)
    embedding.weight.copy_(table)
    head, held = LmHead(6, 130, embedding, dtype, CPU), embedding.packed_bytes(CPU)
    held += head.packed_bytes(CPU)
    head.pack()
    packed = head.packed
    if isinstance(packed, Panels):
        assert embedding.packed is packed
        assert packed.weight.nbytes + packed.bias.nbytes == held
    elif backend("linear", CPU, dtype) == "torch":
        assert embedding.weight.nbytes == held
    else:
        assert 2 * embedding.weight.nbytes == held
    ids, x = torch.tensor([0, 63, 64, 129, 5, 5]), torch.randn(7, 6).to(dtype)
    assert torch.equal(embedding(ids), table[ids])
    torch.testing.assert_close(head(x), (x.double() @ table.double().T).to(dtype).float(), rtol=1e-2, atol=1e-3)
    assert torch.equal(head(x[2:3]), head(x)[2:3])
    if (
        (native.products() or "").startswith("avx512")
        and backend("linear", CPU, torch.bfloat16) == "native"
        and dtype != torch.float16
    ):
        assert embedding.packed is packed


def test_flat_and_nested_configs_read_the_same() -> None:
    flat = decoder_spec(TEXT | {"rope_theta": 5e5, "tie_word_embeddings": True})
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 5e5}
    nested = decoder_spec({"text_config": {**TEXT, "rope_scaling": None, "rope_parameters": rope}, "tie_word_embeddings": True})
    assert flat == nested
    assert flat.layers[0].mixer.rope.theta == 5e5
    assert flat.tied


def test_layout_example() -> None:
    layout = plan_layout([(1, 4, 6)], 2, 2)
    assert layout.order is not None
    assert layout.order.tolist() == [0, 1, 3, 4, 2, 5]
    assert (layout.frames, layout.windows) == ([24], [16, 8])
    assert layout.h[:8].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert layout.w[:8].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert layout.w[16:20].tolist() == [4, 5, 4, 5]


def test_layout_without_windows_is_natural() -> None:
    layout = plan_layout([(2, 4, 4), (1, 2, 2)], 2, 0)
    assert layout.order is None
    assert layout.frames == layout.windows == [16, 16, 4]


def small_model() -> Qwen25VL:
    return Qwen25VL(TEXT | {"vision_config": NEW_TOWER}, torch.float32, CPU)


def test_int8_is_for_every_linear_but_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sensorium.models.weights.supported", lambda device: True)
    model = small_model()
    quantize(model, "int8")
    chosen = {name: layer.quantization for name, layer in model.named_modules() if isinstance(layer, Linear)}
    assert {name for name, value in chosen.items() if value is None} == {"head.proj"}
    assert chosen["visual.blocks.0.attn.qkv"] == chosen["language_model.layers.0.mlp.down"] == "int8"


@needs_int8
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_int8_rounds_stored_weights_once(stored: torch.dtype) -> None:
    """Weights that are wider than the model's bfloat16 are quantised as they are stored; the plan does not change."""
    model = Qwen25VL(TEXT | {"vision_config": NEW_TOWER}, torch.bfloat16, CPU)
    layer = model.get_submodule("language_model.layers.0.mlp.down")
    assert isinstance(layer, Linear)
    layer.stored_dtypes.add(stored)
    quantize(model, "int8")
    planned, weight = layer.packed_bytes(CPU), torch.randn(layer.weight.shape).to(stored)
    assert layer.weight.dtype == stored
    layer.weight.copy_(weight)
    layer.pack()
    x = torch.randn(5, weight.shape[1]).bfloat16()
    codes, scale = quantize_rows(weight)
    assert torch.equal(layer(x), int8_linear_reference(x, Int8Weight(codes, scale.flatten(), None)))
    tensors = (value for value in vars(layer.packed).values() if isinstance(value, torch.Tensor))
    assert sum(tensor.nbytes for tensor in tensors) == planned


def test_int8_wants_a_device_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sensorium.models.weights.supported", lambda device: False)
    with pytest.raises(ConfigError, match="quantization='int8' needs a CPU with AVX2 or AVX-512 VNNI"):
        quantize(small_model(), "int8")


def test_int4_is_for_the_decoder_unless_towers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sensorium.models.weights.supported", lambda device: True)
    for towers in (None, "int8", "int4"):
        model = small_model()
        quantize(model, {"method": "int4", "group_size": 32, "towers": towers})
        chosen = {name: layer.quantization for name, layer in model.named_modules() if isinstance(layer, Linear)}
        assert chosen["head.proj"] is None
        assert chosen["language_model.layers.0.mlp.down"] == Int4Options(32)
        assert chosen["visual.blocks.0.attn.qkv"] == (Int4Options(32) if towers == "int4" else towers)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"method": "int3"}, "method='int3'; it must be one of 'int8', 'fp8', 'int4'"),
        ({"method": "int4", "group": 64}, "unknown key 'group'; it may have method, towers"),
        ({"method": "int4", "group_size": 48}, "group_size=48; it must be one of 32, 64, 128"),
        ({"method": "int8", "group_size": 64}, "group_size, which is for the method int4"),
        ({"method": "int4", "activations": "int4"}, "activations='int4'; it must be one of '16', 'int8'"),
        ({"method": "int4", "towers": "awq"}, "towers='awq'; it must be one of"),
        ({"method": ["int4"]}, "it must be one of"),
        ({}, "method=None"),
    ],
)
def test_invalid_options_of_quantization(value: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quantize(small_model(), value)


@pytest.mark.parametrize("exact", [True, False])
def test_weights_of_float16_checkpoints_stay_in_16_bits(exact: bool) -> None:
    """Products are in float32. A weight that float16 cannot hold stays in float32."""
    layer = Linear(40, {"only": 75}, True, torch.float32, CPU)
    layer.quantization = "float16"
    for tensor in (layer.weight, layer.bias):
        tensor.copy_(torch.randn_like(tensor).half())
    layer.weight[3, 5] += 0 if exact else 1e-5
    weight, bias, planned = layer.weight.clone(), layer.bias.clone(), layer.packed_bytes(CPU)
    layer.pack()
    x = torch.randn(9, 40)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    assert torch.equal(layer(x[4:5]), layer(x)[4:5])
    if not keeps_float16(CPU, torch.float32):
        return
    assert (layer.packed.weight.dtype == torch.float16) == exact
    if exact:
        assert layer.packed.weight.nbytes + layer.packed.bias.nbytes + layer.bias.nbytes == planned
