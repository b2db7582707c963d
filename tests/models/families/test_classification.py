"""Classes of prompts and scores of pairs, from checkpoints for classification, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lora import hook, matrices, write
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config
from safetensors.torch import load_file, save_file
from sensorium import LLM, PoolingParams
from sensorium.callers.errors import ConfigError, InputError
from tokenizers.processors import TemplateProcessing
from torch.nn import functional as F

ensure_torchvision()
import transformers as tf  # noqa: E402

SPECIALS = ["<pad>", "[CLS]", "[SEP]"]
TEXTS = ["def f(x): return x", "import os", "class A: pass\n" * 6]
ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert", "distilbert", "mpnet", "gte", "deberta-v2", "deberta")


def build(
    folder: Path, kind: str, labels: int, auto: Any = tf.AutoModelForSequenceClassification, **config: Any
) -> tuple[Any, Any]:
    """Save a random checkpoint with `labels` classes; return its model and tokenizer."""
    words = fast_tokenizer(SPECIALS, pad_token="<pad>")
    ids = [(name, words.convert_tokens_to_ids(name)) for name in SPECIALS]
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    words.backend_tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=ids)
    sizes = text_config(words) | {"max_position_embeddings": 200, "pad_token_id": 0 if kind == "bert" else 3}
    sizes |= {"head_dim": 16, "layer_norm_eps": 1e-5}
    sizes |= {"type_vocab_size": 2 if kind == "bert" else 1} if kind not in ("distilbert", "mpnet") else {}
    sizes |= {"dim": 64, "n_heads": 4, "n_layers": 3, "hidden_dim": 128} if kind == "distilbert" else {}
    sizes |= {"pad_token_id": 1} if kind == "mpnet" else {}  # its class ignores the config's
    sizes |= {"relative_attention": True, "pos_att_type": "p2c|c2p"} if kind.startswith("deberta") else {}
    made = tf.CONFIG_MAPPING[kind](**sizes, num_labels=labels, **config)
    model = auto.from_config(made).eval()
    randomise(model, 0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name.lower() and name.endswith("weight"):
            parameter.data.add_(1)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return model, words


def logits_of(model: Any, words: Any, *texts: str) -> torch.Tensor:
    inputs = words(*texts, return_tensors="pt", return_token_type_ids=model.config.model_type == "bert")
    with torch.inference_mode():
        return model(**inputs).logits[0]


@pytest.mark.parametrize("kind", [*ENCODERS, "llama", "qwen3", "gemma"])
def test_classes(kind: str, tmp_path: Path) -> None:
    """Short and long prompts in one batch; raw numbers; a vector of the same checkpoint."""
    model, words = build(tmp_path, kind, 3)
    with LLM(tmp_path, max_num_seqs=4) as llm:
        found = llm.classify(TEXTS, use_tqdm=False)
        raw = llm.classify(TEXTS, PoolingParams(use_activation=False), use_tqdm=False)
        (encoded,) = llm.encode(TEXTS[0], pooling_task="classify", use_tqdm=False)
        (plain,) = llm.encode(TEXTS[0], PoolingParams(normalize=False), use_tqdm=False)
        with pytest.raises(ConfigError, match="has 3 classes, and score needs one"):
            llm.score("a", "b", use_tqdm=False)
        assert llm.generate("a", use_tqdm=False)[0].error is not None
    for text, one, numbers in zip(TEXTS, found, raw, strict=True):
        expected = logits_of(model, words, text)
        torch.testing.assert_close(numbers.probs, expected, rtol=1e-3, atol=2e-4)
        torch.testing.assert_close(torch.tensor(one.outputs.probs), expected.softmax(-1), rtol=1e-3, atol=2e-4)
    assert found[0].outputs.num_classes == 3
    assert torch.equal(encoded.outputs.data, found[0].probs)
    assert plain.outputs.data.norm() > 1.01


@pytest.mark.parametrize("kind", [kind for kind in ENCODERS if kind != "gte"])
def test_classes_of_tokens(kind: str, tmp_path: Path) -> None:
    """Short and long prompts in one batch; raw numbers; a vector of the same checkpoint; what it cannot do is refused."""
    model, words = build(tmp_path, kind, 5, tf.AutoModelForTokenClassification)
    task = "token_classify"
    with LLM(tmp_path, max_num_seqs=4) as llm:
        found = llm.encode(TEXTS, pooling_task=task, use_tqdm=False)
        raw = llm.encode(TEXTS, PoolingParams(task=task, use_activation=False), use_tqdm=False)
        (plain,) = llm.encode(TEXTS[0], use_tqdm=False)
        with pytest.raises(ConfigError, match="classifies tokens, not prompts; use encode"):
            llm.classify(TEXTS[0])
        with pytest.raises(ConfigError, match="classifies tokens, not prompts; use encode"):
            llm.reward(TEXTS[0])
        with pytest.raises(InputError, match=r"classifies tokens; use encode"):
            llm.encode(TEXTS[0], pooling_task="classify", use_tqdm=False)[0].outputs  # noqa: B018
        with pytest.raises(InputError, match=r"pooling_task='token_classify' and PoolingParams.* contradict"):
            llm.encode(TEXTS[0], PoolingParams(task="embed"), pooling_task=task)
    assert plain.outputs.data.shape == (64,)
    for text, one, numbers in zip(TEXTS, found, raw, strict=True):
        expected = logits_of(model, words, text)
        assert expected.std() > 0.3
        torch.testing.assert_close(numbers.data, expected, rtol=1e-3, atol=2e-4)
        torch.testing.assert_close(one.outputs.data, expected.softmax(-1), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("kind", "products", "replaced"),
    [
        ("bert", r"attention\.self\.(query|value)$|pooler\.dense$", "classifier"),
        ("qwen3", r"(q|v|down)_proj$", "score"),
        ("qwen3", r"q_proj$|score$", ""),
    ],
)
def test_adapters_of_requests(kind: str, products: str, replaced: str, tmp_path: Path) -> None:
    """Matrices of the stack, and a head that is replaced or has matrices of its own; other prompts keep the base model's."""
    model, words = build(tmp_path / "base", kind, 3)
    pairs, more = matrices(model, products), dict[str, torch.Tensor]()
    with LLM(tmp_path / "base", max_num_seqs=4, enable_lora=True) as llm:
        plain = [logits_of(model, words, text) for text in TEXTS]
        if replaced:
            for name, parameter in model.get_submodule(replaced).named_parameters():
                parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)) / 4
                more[f"base_model.model.{replaced}.{name}"] = parameter.data.clone()
        folder = write(tmp_path / "adapter", str(tmp_path / "base"), pairs, more=more, task_type="SEQ_CLS")
        llm.load_adapter("mine", folder)
        hook(model, pairs, dict.fromkeys(pairs, 2.0))
        raw = PoolingParams(use_activation=False)
        found = llm.classify(TEXTS, raw, use_tqdm=False, adapter=["mine", None, "mine"])
        of_tokens = PoolingParams(task="token_classify", use_activation=False)
        (tokens,) = llm.encode(TEXTS[0], of_tokens, use_tqdm=False, adapter="mine") if kind == "qwen3" else (None,)
    for index, adapted in enumerate((True, False, True)):
        expected = logits_of(model, words, TEXTS[index])
        assert not torch.allclose(expected, plain[index], atol=1e-2)
        torch.testing.assert_close(found[index].probs, expected if adapted else plain[index], rtol=1e-3, atol=2e-4)
    if tokens is not None:
        torch.testing.assert_close(tokens.data[-1], logits_of(model, words, TEXTS[0]), rtol=1e-3, atol=2e-4)


def test_classes_of_tokens_need_a_head(tmp_path: Path) -> None:
    """A head for prompts serves each token, too."""
    model, words = build(tmp_path, "qwen3", 3)
    with LLM(tmp_path, max_num_seqs=4) as llm:
        (found,) = llm.encode(TEXTS[0], PoolingParams(task="token_classify", use_activation=False), use_tqdm=False)
    with torch.inference_mode():
        inputs = words(TEXTS[0], return_tensors="pt")
        expected = model.score(model.model(**inputs).last_hidden_state[0])
    torch.testing.assert_close(found.data, expected, rtol=1e-3, atol=2e-4)
    build(tmp_path, "bert", 2, tf.AutoModelForMaskedLM)
    with LLM(tmp_path) as llm, pytest.raises(ConfigError, match="'token_classify': this checkpoint has no such head"):
        llm.encode("a", pooling_task="token_classify")


@pytest.mark.parametrize("kind", [*ENCODERS, "qwen3"])
def test_scores_of_a_cross_encoder(kind: str, tmp_path: Path) -> None:
    model, words = build(tmp_path, kind, 1)
    with LLM(tmp_path) as llm:
        found = llm.score("import os", TEXTS, use_tqdm=False)
        with pytest.raises(InputError, match="not a string"):
            llm.score("import os", {"image": "x.png"}, use_tqdm=False)
    for text, one in zip(TEXTS, found, strict=True):
        assert abs(one.score - float(logits_of(model, words, "import os", text).sigmoid())) < 1e-4


def test_rewards_of_a_model_with_one_class(tmp_path: Path) -> None:
    model, words = build(tmp_path, "llama", 1)
    with LLM(tmp_path, max_num_seqs=4) as llm:
        found = llm.reward(TEXTS, use_tqdm=False)
        (activated,) = llm.reward(TEXTS[0], PoolingParams(use_activation=True), use_tqdm=False)
    for text, one in zip(TEXTS, found, strict=True):
        torch.testing.assert_close(one.outputs.data, logits_of(model, words, text), rtol=1e-3, atol=2e-4)
    torch.testing.assert_close(activated.data, found[0].data.sigmoid())


@pytest.mark.parametrize("architecture", ["Qwen2ForRewardModel", "Qwen2ForProcessRewardModel"])
def test_rewards_of_published_reward_models(architecture: str, tmp_path: Path) -> None:
    """Rewards of the last token and of each step token equal those of the published head, two layers with ReLU."""
    labels, step = 1 + ("Process" in architecture), "[SEP]"
    model, words = build(tmp_path, "qwen2", 2)
    stored, generator = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(1)
    del stored["score.weight"]
    stored |= {
        f"score.{i}.{part}": torch.randn(shape, generator=generator) / 8
        for i, outputs in ((0, 64), (2, labels))
        for part, shape in (("weight", (outputs, 64)), ("bias", (outputs,)))
    }
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    text = f"import os{step}def f(x):{step} return x{step}"
    with torch.inference_mode():
        hidden = model.model(**words(text, return_tensors="pt")).last_hidden_state[0]
        hidden = F.linear(hidden, stored["score.0.weight"], stored["score.0.bias"]).relu()
        scores = F.linear(hidden, stored["score.2.weight"], stored["score.2.bias"])
    ends = [i for i, token in enumerate(words(text)["input_ids"]) if token == words.convert_tokens_to_ids(step)]
    assert len(ends) >= 3
    with LLM(tmp_path, max_num_seqs=4) as llm:
        if labels == 1:
            (found,) = llm.reward(text, use_tqdm=False)
            torch.testing.assert_close(found.data, scores[-1], rtol=1e-3, atol=2e-4)
        else:
            with pytest.raises(ConfigError, match=r"has 2 classes.*; give step_token"):
                llm.reward(text, use_tqdm=False)
            with pytest.raises(InputError, match=r"step_token='import os' is [0-9] tokens; give one"):
                llm.reward(text, use_tqdm=False, step_token="import os")
            found, none = llm.reward([text, {"prompt_token_ids": [5, 6]}], use_tqdm=False, step_token=step)
            torch.testing.assert_close(found.outputs.data, scores[ends].softmax(-1), rtol=1e-3, atol=2e-4)
            assert "the prompt has no step token" in none.error.message


def test_separators_inside_texts_start_no_second_text(tmp_path: Path) -> None:
    """Token types are those of transformers' tokenizer, for single texts and for pairs in one batch."""
    model, words = build(tmp_path, "bert", 1)
    single, query, documents = "import [SEP] os", "a [SEP] b", ["x [SEP] y", *TEXTS]
    with LLM(tmp_path, max_num_seqs=4) as llm:
        (found,) = llm.classify(single, PoolingParams(use_activation=False), use_tqdm=False)
        scores = llm.score(query, documents, use_tqdm=False)
    torch.testing.assert_close(found.probs, logits_of(model, words, single), rtol=1e-3, atol=2e-4)
    for document, one in zip(documents, scores, strict=True):
        assert abs(one.score - float(logits_of(model, words, query, document).sigmoid())) < 1e-4


def test_labels_that_are_no_mapping_are_named(tmp_path: Path) -> None:
    build(tmp_path, "llama", 2)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stored | {"id2label": 5}))
    with pytest.raises(ConfigError, match=r"id2label in config\.json is 5; it must map"):
        LLM(tmp_path)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"problem_type": "regression"}, lambda logits: logits),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda logits: logits),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, torch.sigmoid),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.ReLU"}, None),
    ],
    ids=str,
)
def test_the_activation_is_the_published_one(config: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    model, words = build(tmp_path, "llama", 2)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stored | config))
    if expected is None:
        with pytest.raises(ConfigError, match=r"activation 'torch\.nn\.modules\.activation\.ReLU' is not supported"):
            LLM(tmp_path)
        return
    with LLM(tmp_path) as llm:
        (found,) = llm.classify(TEXTS[0], use_tqdm=False)
    torch.testing.assert_close(found.probs, expected(logits_of(model, words, TEXTS[0])), rtol=1e-3, atol=2e-4)
