"""Vectors of text encoders and of decoders in sentence-transformers' layout, against transformers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from measured import peak_bytes
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config
from safetensors.torch import save_file
from sensorium import LLM, AsyncLLM, PoolingParams
from sensorium.callers.errors import ConfigError, InputError
from sensorium.kernels.metadata import AttentionMetadata
from sensorium.models.families.bert.model import Bert
from sensorium.models.interface import ForwardBatch, StepLimits
from sensorium.models.layers.basic import WeightedLayer
from sensorium.pipelines.similarity import sigmoid
from tokenizers.processors import TemplateProcessing

ensure_torchvision()
import transformers as tf  # noqa: E402

CPU = torch.device("cpu")
SPECIALS = ["<pad>", "[CLS]", "[SEP]"]
TEXTS = ["def f(x): return x", "import os", "class A: pass\n" * 6]


def tokenizer(template: str) -> Any:
    words = fast_tokenizer(SPECIALS, pad_token="<pad>")
    ids = [(name, words.convert_tokens_to_ids(name)) for name in SPECIALS]
    words.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=ids)
    return words


def save(folder: Path, model: Any, words: Any, pooling: str) -> None:
    randomise(model, 0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name.lower() and name.endswith("weight"):
            parameter.data.add_(1)
    model.eval().save_pretrained(folder)
    words.save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "modules.json").write_text("[]")
    modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "word_embedding_dimension": 64}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes | {pooling: True, "include_prompt": True}))


def check(folder: Path, model: Any, words: Any, pool: Any) -> None:
    """Compare vectors of short and long prompts in one batch."""
    with LLM(folder, max_num_seqs=4) as llm:
        found = llm.embed(TEXTS, use_tqdm=False)
        (told,) = llm.embed(["x = 1"], instruction="query: ", use_tqdm=False)
        (alone,) = llm.embed([TEXTS[2]], use_tqdm=False)
    assert torch.allclose(alone.vector, found[2].vector, atol=1e-5)
    for text, one in [*zip(TEXTS, found, strict=True), ("query: x = 1", told)]:
        ids = words(text, return_tensors="pt")["input_ids"]
        assert one.output.prompt_token_ids == ids[0].tolist()
        with torch.inference_mode():
            hidden = model(ids).last_hidden_state[0]
        expected = torch.nn.functional.normalize(pool(hidden), dim=-1)
        assert (one.vector - expected).abs().max() < 1e-4


def encoder(kind: str, words: Any) -> Any:
    sizes = text_config(words) | {"max_position_embeddings": 200, "pad_token_id": 0 if kind == "bert" else 3}
    sizes |= {"pad_token_id": 1} if kind == "mpnet" else {}  # its class ignores the config's
    sizes |= {"local_attention": 6} if kind == "modernbert" else {}
    sizes |= {"dim": 64, "n_heads": 4, "n_layers": 3, "hidden_dim": 128} if kind == "distilbert" else {}
    pooler = {} if kind in ("modernbert", "distilbert") else {"add_pooling_layer": kind == "bert"}
    return tf.AutoModel.from_config(tf.CONFIG_MAPPING[kind](**sizes), **pooler)


KINDS = ["bert", "roberta", "xlm-roberta", "modernbert", "distilbert", "mpnet", "nomic_bert", "gte"]


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_of_encoders(kind: str, tmp_path: Path) -> None:
    words = tokenizer("[CLS] $A [SEP]")
    model = encoder(kind, words)
    mean = kind in ("roberta", "modernbert", "mpnet", "nomic_bert")
    save(tmp_path, model, words, "pooling_mode_mean_tokens" if mean else "pooling_mode_cls_token")
    check(tmp_path, model, words, (lambda hidden: hidden.mean(0)) if mean else (lambda hidden: hidden[0]))


PUBLISHED = {
    "nomic_bert": {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "n_embd": 64, "n_head": 4, "n_layer": 3,
        "n_inner": 128, "n_positions": 200, "activation_function": "swiglu", "rotary_emb_base": 1000, "qkv_proj_bias": False,
        "layer_norm_epsilon": 1e-12, "type_vocab_size": 2,
    },
    "gte": {
        "architectures": ["NewModel"], "model_type": "new", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3,
        "intermediate_size": 128, "layer_norm_eps": 1e-12, "hidden_act": "gelu", "max_position_embeddings": 200,
        "type_vocab_size": 1, "rope_theta": 20000.0, "rope_scaling": {"factor": 8.0, "type": "ntk"},
        "position_embedding_type": "rope",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", PUBLISHED)
def test_vectors_of_encoders_with_their_publishers_config(kind: str, tmp_path: Path) -> None:
    """Tensors have the names of transformers' class, which its `save_pretrained` replaces by the publisher's."""
    words = tokenizer("[CLS] $A [SEP]")
    model = encoder(kind, words)
    save(tmp_path, model, words, "pooling_mode_cls_token")
    prefix = "new." if kind == "gte" else ""
    save_file(
        {f"{prefix}{name}": value.contiguous() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[kind] | {"vocab_size": len(words), "pad_token_id": 3}))
    if kind == "gte":
        dim, theta, factor = 16, 20000.0, 8.0
        model.rotary_emb.inv_freq = 1.0 / (theta * factor) ** (torch.arange(0, dim, 2) / dim) / factor ** (2 / dim)
    check(tmp_path, model, words, lambda hidden: hidden[0])


def test_features_of_other_encoders_are_refused(tmp_path: Path) -> None:
    """Nomic Embed's mixture of experts."""
    words = tokenizer("[CLS] $A [SEP]")
    save(tmp_path, encoder("nomic_bert", words), words, "pooling_mode_cls_token")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"moe_every_n_layers": 2}))
    with pytest.raises(ConfigError, match=r"moe_every_n_layers in config\.json of a nomic_bert encoder is not supported"):
        LLM(tmp_path)


@pytest.mark.parametrize("kind", ["bert", "mpnet", "nomic_bert"])
def test_a_step_takes_no_more_memory_than_planned(kind: str) -> None:
    rows, block = 256, 16
    model = Bert(
        {"model_type": kind, "num_hidden_layers": 2, "vocab_size": 640, "hidden_size": 96, "num_attention_heads": 4},
        torch.float32,
        CPU,
    )
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


def test_scores_of_a_text_reranker(tmp_path: Path) -> None:
    """The prompt equals the published one of Qwen3-Reranker, with an empty <think> block."""
    words = fast_tokenizer(SPECIALS, pad_token="<pad>")
    words.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    )
    model = tf.Qwen3ForCausalLM(tf.Qwen3Config(**text_config(words), head_dim=16)).eval()
    randomise(model, 0)
    model.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    with LLM(tmp_path) as llm:
        (found,) = llm.score("import os", {"text": "class A"}, instruction="find", use_tqdm=False)
    judge = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".'
    )
    user = "<Instruct>: find\n<Query>: import os\n<Document>: class A"
    text = f"<|im_start|>system\n{judge}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    ids = words(f"{text}<think>\n\n</think>\n\n", return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert found.output.prompt_token_ids == ids[0].tolist()
    with torch.inference_mode():
        yes, no = model(ids).logits[0, -1, [words.encode(word, add_special_tokens=False)[0] for word in ("yes", "no")]]
    assert abs(found.score - float(torch.sigmoid(yes - no))) < 1e-4


def test_vectors_of_a_decoder(tmp_path: Path) -> None:
    """A decoder embeds a text without chat template. The vector is the hidden state of the token that the tokenizer appends."""
    words = tokenizer("$A [SEP]")
    words.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = tf.AutoModel.from_config(tf.Qwen3Config(**text_config(words), head_dim=16))
    save(tmp_path, model, words, "pooling_mode_lasttoken")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3Model"]
    for architecture in ("Qwen3Model", "Qwen3ForCausalLM"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
        check(tmp_path, model, words, lambda hidden: hidden[-1])
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    check(tmp_path, model, words, lambda hidden: hidden.mean(0))


POOL = {
    "last": lambda hidden: hidden[-1],
    "cls": lambda hidden: hidden[0],
    "mean": lambda hidden: hidden.mean(0),
    "max": lambda hidden: hidden.amax(0),
    "cls+mean": lambda hidden: torch.cat((hidden[0], hidden.mean(0))),
    "tokens": lambda hidden: hidden,
}


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_poolings_of_a_call(kind: str, tmp_path: Path) -> None:
    """Prompts of a decoder are cut into chunks, and all rows of a prompt that is in the prefix cache are computed again."""
    words = tokenizer("[CLS] $A [SEP]")
    qwen = tf.Qwen3Config(**text_config(words), head_dim=16)
    model = encoder(kind, words) if kind == "bert" else tf.AutoModel.from_config(qwen)
    save(tmp_path, model, words, "pooling_mode_cls_token")
    text, options = TEXTS[2], {} if kind == "bert" else {"max_num_batched_tokens": 16}
    ids = words(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        hidden = model(ids).last_hidden_state[0]
    with LLM(tmp_path, max_num_seqs=4, **options) as llm:
        default, *_ = llm.embed([text, TEXTS[0]], use_tqdm=False)
        assert torch.equal(default.vector, llm.embed(text, pooling="cls", use_tqdm=False)[0].vector)
        for name, pool in POOL.items():
            one, _ = llm.embed([text, TEXTS[0]], pooling=name, use_tqdm=False)
            expected = torch.nn.functional.normalize(pool(hidden), dim=-1)
            assert one.vector.shape == expected.shape
            assert (one.vector - expected).abs().max() < 1e-4
        (plain,) = llm.embed(text, pooling="tokens", pooling_params=PoolingParams(normalize=False), use_tqdm=False)
        assert (plain.vector - hidden).abs().max() < 1e-4
        (named,) = llm.encode(text, pooling_task="token_embed", use_tqdm=False)
        assert torch.equal(named.data, llm.embed(text, pooling="tokens", use_tqdm=False)[0].vector)
        (short,) = llm.embed(text, pooling="tokens", dimensions=8, use_tqdm=False)
        assert short.vector.shape == (ids.shape[1], 8)
        assert short.vector.norm(dim=-1) == pytest.approx(1.0, abs=1e-5)
        assert len(short.outputs.embedding) == ids.shape[1]
        assert short.outputs.hidden_size == 8
        (named,) = llm.embed(text, pooling_params=PoolingParams(task="token_embed"), use_tqdm=False)
        assert named.vector.shape == hidden.shape
        with pytest.raises(InputError) as caught:
            llm.embed(text, pooling="sum")
        assert (caught.value.info.code, caught.value.info.param) == ("invalid_value", "pooling")
        with pytest.raises(InputError, match="pooling='mean' and pooling_params with pooling='tokens' contradict each other"):
            llm.embed(text, pooling="mean", pooling_params=PoolingParams(task="token_embed"))
        with pytest.raises(InputError, match="needs pooling=\"tokens\", not 'mean'"):
            llm.encode(text, PoolingParams(pooling="mean"), pooling_task="token_embed")
        with pytest.raises(InputError, match="pooling_task='embed' and PoolingParams\\(task='token_embed'\\) contradict"):
            llm.encode(text, PoolingParams(task="token_embed"), pooling_task="embed")


def test_a_score_embeds_each_query_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = tokenizer("[CLS] $A [SEP]")
    save(tmp_path, encoder("bert", words), words, "pooling_mode_cls_token")
    with LLM(tmp_path, max_num_seqs=4) as llm:
        single = [llm.score(query, TEXTS[1], use_tqdm=False)[0].score for query in TEXTS[:2]]
        prompts, request = [], llm.engine.request
        monkeypatch.setattr(
            llm.engine, "request", lambda prompt, *args, **kw: prompts.append(prompt) or request(prompt, *args, **kw)
        )
        assert len(llm.score(TEXTS[0], TEXTS, use_tqdm=False)) == len(TEXTS)
        assert [one["prompt"] for one in prompts] == [TEXTS[0], *TEXTS]
        prompts.clear()
        pairs = asyncio.run(AsyncLLM(llm).score([*TEXTS[:2], *TEXTS[:2]], [TEXTS[1]] * 4))
        assert [one["prompt"] for one in prompts] == [*TEXTS[:2], *[TEXTS[1]] * 4]
        failed = llm.score("import os " * 400, TEXTS, use_tqdm=False)
    assert [one.score for one in pairs] == pytest.approx(single * 2, abs=1e-5)
    assert [one.score for one in failed] == [None] * len(TEXTS)
    assert all("tokens" in one.error.message for one in failed)


def test_probabilities_of_large_logits() -> None:
    assert [sigmoid(logit) for logit in (-1e4, 0.0, 1e4)] == [0.0, 0.5, 1.0]


def test_vectors_of_voyage(tmp_path: Path) -> None:
    """Qwen3 whose tokens all attend to each other, with a linear layer over the hidden states, then their mean."""
    words = tokenizer("$A")
    model = tf.AutoModel.from_config(tf.Qwen3Config(**text_config(words), head_dim=16))
    save(tmp_path, model, words, "pooling_mode_mean_tokens")
    linear = torch.randn(96, 64, generator=torch.Generator().manual_seed(1)) / 8
    tensors = {f"model.{name}": value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors | {"linear.weight": linear}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["VoyageQwen3BidirectionalEmbedModel"], "num_labels": 96}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(tmp_path, max_num_seqs=4) as llm:
        found = llm.embed(TEXTS, use_tqdm=False)
        (short,) = llm.embed(TEXTS[0], dimensions=32, use_tqdm=False)
    assert short.vector.shape == (32,)
    for text, one in zip(TEXTS, found, strict=True):
        ids = words(text, return_tensors="pt")["input_ids"]
        everything = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
        with torch.inference_mode():
            hidden = model(ids, attention_mask=everything).last_hidden_state[0]
        expected = torch.nn.functional.normalize((hidden @ linear.T).mean(0), dim=-1)
        assert (one.vector - expected).abs().max() < 1e-4


LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA4 = {"hidden_size_per_layer_input": 0, "global_head_dim": 16, "layer_types": [*LAYERS[1:], "full_attention"]}
TO_ALL: dict[str, tuple[str, dict[str, Any]]] = {
    "EmbeddingGemma": ("Gemma3Text", {"use_bidirectional_attention": True, "sliding_window": 8, "layer_types": LAYERS}),
    "odd window": ("Gemma3Text", {"use_bidirectional_attention": True, "sliding_window": 5, "layer_types": LAYERS}),
    "both keys": (
        "Gemma3Text",
        {"use_bidirectional_attention": True, "is_causal": False, "sliding_window": 6, "layer_types": LAYERS},
    ),
    "Gemma 4": ("Gemma4Text", GEMMA4 | {"use_bidirectional_attention": "all", "sliding_window": 6}),
    "Qwen3": ("Qwen3", {"is_causal": False}),
    "Mistral": ("Mistral", {"is_causal": False, "sliding_window": 3}),
    "causal": ("Mistral", {"is_causal": True, "sliding_window": 3}),
}


@pytest.mark.parametrize("case", TO_ALL)
def test_vectors_of_decoders_whose_tokens_attend_to_all(case: str, tmp_path: Path) -> None:
    """Windows reach to both sides. Publishers of embedders set `is_causal` or, in Gemma 3, a key of its own."""
    kind, changes = TO_ALL[case]
    words = tokenizer("[CLS] $A [SEP]")
    model = tf.AutoModel.from_config(getattr(tf, f"{kind}Config")(**text_config(words) | {"head_dim": 16} | changes))
    save(tmp_path, model, words, "pooling_mode_mean_tokens")
    check(tmp_path, model, words, lambda hidden: hidden.mean(0))


def test_scores_of_a_checkpoint_without_a_head_are_cosines(tmp_path: Path) -> None:
    words = tokenizer("[CLS] $A [SEP]")
    save(tmp_path, encoder("bert", words), words, "pooling_mode_mean_tokens")
    with LLM(tmp_path, max_num_seqs=4) as llm:
        query, *documents = (one.vector for one in llm.embed(["x = 1", *TEXTS], use_tqdm=False))
        found = llm.score("x = 1", TEXTS, use_tqdm=False)
    assert [one.score for one in found] == pytest.approx([float(query @ one) for one in documents], abs=1e-5)
