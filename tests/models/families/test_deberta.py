"""Vectors and classes of DeBERTa, against transformers: kinds of products with distances, buckets, and a convolution."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lora import matrices, write
from measured import peak_bytes
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config
from sensorium import LLM
from sensorium.callers.errors import CheckpointError, ConfigError
from sensorium.kernels.metadata import AttentionMetadata
from sensorium.models.families.bert.model import Bert
from sensorium.models.interface import ForwardBatch, StepLimits
from sensorium.models.layers.basic import WeightedLayer
from tokenizers.processors import TemplateProcessing

ensure_torchvision()
import transformers as tf  # noqa: E402

CPU = torch.device("cpu")
SPECIALS = ["<pad>", "[CLS]", "[SEP]"]
TEXTS = ["def f(x): return x", "import os", "class A: pass\n" * 12]  # the last one has more tokens than `span`
BOTH = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
V3 = BOTH | {"position_buckets": 16, "max_relative_positions": -1, "norm_rel_ebd": "layer_norm", "share_att_key": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "V3": ("deberta-v2", V3),
    "V2 with a convolution": ("deberta-v2", V3 | {"conv_kernel_size": 3, "conv_act": "gelu"}),
    "own projections": ("deberta-v2", V3 | {"share_att_key": False}),
    "no buckets": ("deberta-v2", V3 | {"position_buckets": -1, "max_relative_positions": 20, "norm_rel_ebd": "none"}),
    "keys only": ("deberta-v2", V3 | {"pos_att_type": "c2p", "share_att_key": False, "position_biased_input": True}),
    "queries only": ("deberta-v2", V3 | {"pos_att_type": "p2c", "type_vocab_size": 2}),
    "no products": ("deberta-v2", V3 | {"pos_att_type": None}),
    "absolute": ("deberta-v2", {}),
    "V1": ("deberta", BOTH | {"max_relative_positions": -1}),
    "V1 with few distances": ("deberta", BOTH | {"max_relative_positions": 20, "pos_att_type": "c2p|p2c"}),
    "V1 keys only": ("deberta", BOTH | {"pos_att_type": ["c2p"]}),
}


def build(folder: Path, case: str, auto: Any = tf.AutoModel, **changes: Any) -> tuple[Any, Any]:
    """Save a random checkpoint; return its model and tokenizer."""
    words = fast_tokenizer(SPECIALS, pad_token="<pad>")
    ids = [(name, words.convert_tokens_to_ids(name)) for name in SPECIALS]
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    kind, config = CASES[case]
    sizes = text_config(words) | {"max_position_embeddings": 200} | config | changes
    model = auto.from_config(tf.CONFIG_MAPPING[kind](**sizes)).eval()
    randomise(model, 0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name.lower() and name.endswith("weight"):
            parameter.data.add_(1)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return model, words


@pytest.mark.parametrize("case", CASES)
def test_vectors(case: str, tmp_path: Path) -> None:
    """Short and long prompts in one batch, and alone."""
    model, words = build(tmp_path, case)
    with LLM(tmp_path, max_num_seqs=4) as llm:
        together = llm.embed(TEXTS, pooling="tokens", use_tqdm=False)
        (alone,) = llm.embed([TEXTS[0]], pooling="tokens", use_tqdm=False)
    assert torch.allclose(alone.vector, together[0].vector, atol=1e-5)
    for text, found in zip(TEXTS, together, strict=True):
        ids = words(text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            hidden = model(ids).last_hidden_state[0]
        assert (found.vector - torch.nn.functional.normalize(hidden, dim=-1)).abs().max() < 1e-4


def test_a_masked_language_model_embeds(tmp_path: Path) -> None:
    """Its head and, without such a table, positions that it stores are not used."""
    for legacy in (True, False):
        model, words = build(tmp_path, "V3", tf.AutoModelForMaskedLM, legacy=legacy)
        with LLM(tmp_path) as llm:
            (found,) = llm.embed(TEXTS[0], pooling="cls", use_tqdm=False)
        with torch.inference_mode():
            hidden = model.deberta(**words(TEXTS[0], return_tensors="pt")).last_hidden_state[0, 0]
        assert (found.vector - torch.nn.functional.normalize(hidden, dim=-1)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pos_att_type": ["c2c"]}, "pos_att_type 'c2c'"),
        ({"relative_attention": False}, "needs relative_attention"),
        ({"conv_kernel_size": 3, "conv_groups": 2}, "conv_groups"),
        ({"embedding_size": 32}, "embedding_size 32"),
        ({"is_decoder": True}, "is_decoder"),
    ],
    ids=str,
)
def test_configs_that_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    build(tmp_path, "V3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=words):
        LLM(tmp_path)


def test_adapters_change_layers_whose_rows_are_tokens(tmp_path: Path) -> None:
    """Those of projections that distances go through, too, are refused."""
    model, _ = build(tmp_path / "base", "V3")
    write(tmp_path / "mlp", str(tmp_path / "base"), matrices(model, r"intermediate\.dense$"))
    write(tmp_path / "query", str(tmp_path / "base"), matrices(model, r"query_proj$"))
    with LLM(tmp_path / "base", enable_lora=True) as llm:
        llm.load_adapter("mlp", tmp_path / "mlp")
        plain, adapted = llm.embed([TEXTS[0]] * 2, adapter=[None, "mlp"], use_tqdm=False)
        with pytest.raises(CheckpointError, match="query_proj"):
            llm.load_adapter("query", tmp_path / "query")
    assert not torch.allclose(plain.vector, adapted.vector, atol=1e-2)


@pytest.mark.parametrize("case", ["V3", "V2 with a convolution", "V1"])
def test_a_step_takes_no_more_memory_than_planned(case: str) -> None:
    rows, block, (kind, config) = 256, 16, CASES[case]
    sizes = {"num_hidden_layers": 2, "vocab_size": 640, "hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 384}
    model = Bert({"model_type": kind, **sizes, **config}, torch.float32, CPU)
    for module in model.modules():
        if isinstance(module, WeightedLayer):
            for _, tensor in module.tensors(""):
                tensor.zero_()
            module.pack()
    ids, ends = torch.arange(rows), torch.stack((torch.zeros(rows).long(), torch.full((rows,), rows)))
    table = torch.arange(rows // block, dtype=torch.int32)[None]
    attn = AttentionMetadata((0, rows), (rows,), table, ids, block, key_range=ends)
    caches = [torch.zeros(2, rows // block, block, s.kv_heads, s.head_dim) for s in model.cache_specs]

    def run() -> None:
        model.forward(ForwardBatch(ids.clone(), ids[None].clone(), [attn] * 2, caches))

    planned = model.forward_bytes(StepLimits(rows, rows, rows, CPU))
    assert planned / 2 < peak_bytes(run) <= planned
