"""Sequences of texts: columns of tables, string arrays, generators. Errors of the wrong task name the right call."""

from __future__ import annotations

from array import array
from collections import deque
from pathlib import Path
from typing import Any

import family
import numpy as np
import pytest
import torch
from oracle import ensure_torchvision, fast_tokenizer, text_config
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import InputError
from sensorium.mm.columns import column_values

ensure_torchvision()
import transformers as tf  # noqa: E402

TEXTS = ["import os", "x = 1", "class A"]


class Series:
    """What pandas' and polars' Series have in common."""

    dtype, shape = object, (3,)

    def __init__(self, values: list[str]) -> None:
        self._values = values

    def to_list(self) -> list[str]:
        return self._values


class Array:
    """What pyarrow's arrays and chunked arrays have in common."""

    def to_pylist(self) -> list[str]:
        return TEXTS


class Table:
    columns, shape = ("text",), (3, 1)


def real_columns() -> dict[str, Any]:
    """Return columns of the libraries that are installed."""
    found = dict[str, Any]()
    for name, make in {
        "pandas": lambda one: one.Series(TEXTS, index=[7, 8, 9]),
        "polars": lambda one: one.Series(TEXTS),
        "pyarrow": lambda one: one.chunked_array([TEXTS[:1], TEXTS[1:]]),
    }.items():
        try:
            found[name] = make(__import__(name))
        except ImportError:
            continue
    return found


COLUMNS: dict[str, Any] = {
    "tuple": tuple(TEXTS),
    "array": np.array(TEXTS),
    "objects": np.array(TEXTS, dtype=object),
    "strings": np.array(TEXTS, dtype=np.dtypes.StringDType()),
    "series": Series(TEXTS),
    "arrow": Array(),
    "values": dict(enumerate(TEXTS)).values(),
    "keys": dict.fromkeys(TEXTS).keys(),
    "deque": deque(TEXTS),
} | real_columns()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder, words = tmp_path_factory.mktemp("embedder"), fast_tokenizer(["<pad>"], pad_token="<pad>")
    tf.BertModel(tf.BertConfig(**text_config(words) | {"max_position_embeddings": 64, "pad_token_id": 0})).save_pretrained(
        folder
    )
    words.save_pretrained(folder)
    return LLM(folder, max_num_seqs=4)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(family.save(family.load_rows()["text-llama"], tmp_path_factory.mktemp("decoder") / "model"), max_num_seqs=4)


@pytest.mark.parametrize("name", [*COLUMNS, "generator"])
def test_embed_and_score_take_every_sequence(embedder: LLM, name: str) -> None:
    def column() -> Any:
        return iter(TEXTS) if name == "generator" else COLUMNS[name]

    expected = embedder.embed(TEXTS, use_tqdm=False)
    found = embedder.embed(column(), use_tqdm=False)
    assert [one.error for one in found] == [None] * 3
    assert all(torch.equal(one.vector, other.vector) for one, other in zip(found, expected, strict=True))
    scores = [one.score for one in embedder.score(TEXTS[0], TEXTS, use_tqdm=False)]
    assert [one.score for one in embedder.score(TEXTS[0], column(), use_tqdm=False)] == scores
    pairs = [one.score for one in embedder.score(column(), TEXTS, use_tqdm=False)]
    assert pairs == pytest.approx([1.0] * 3, abs=1e-5)
    assert len(embedder.encode(column(), use_tqdm=False)) == 3


@pytest.mark.parametrize("name", [*COLUMNS, "generator"])
def test_generate_takes_every_sequence(decoder: LLM, name: str) -> None:
    params = SamplingParams(max_tokens=2, temperature=0)
    column = iter(TEXTS) if name == "generator" else COLUMNS[name]
    found = decoder.generate(column, params, use_tqdm=False)
    assert [one.prompt for one in found] == TEXTS


def test_numbers_of_a_column_are_not_the_tokens_of_one_prompt(decoder: LLM) -> None:
    found = decoder.generate(Series([1, 2]), SamplingParams(max_tokens=1), use_tqdm=False)  # type: ignore[list-item]
    assert [one.error and one.error.code for one in found] == ["invalid_value"] * 2
    (one,) = decoder.generate([1, np.int64(2)], SamplingParams(max_tokens=1), use_tqdm=False)
    assert one.prompt_token_ids == [1, 2]


def test_lists_of_token_ids_are_prompts_of_embed_too(embedder: LLM) -> None:
    ids = embedder.engine.tokenizer.encode(TEXTS[0])
    for several in ([ids, ids], [ids], ids):
        for found in embedder.embed(several, use_tqdm=False):
            assert found.prompt_token_ids == ids
            assert found.vector is not None


@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_set_is_refused_because_nobody_could_assign_its_results(embedder: LLM, decoder: LLM, kind: type[set[str]]) -> None:
    for call, param in ((embedder.embed, "inputs"), (decoder.generate, "prompts")):
        with pytest.raises(InputError) as caught:
            call(kind(TEXTS))  # type: ignore[operator]
        assert (caught.value.info.code, caught.value.info.param) == ("invalid_value", param)


def test_conversations_of_a_column(decoder: LLM) -> None:
    talks = [[{"role": "user", "content": text}] for text in TEXTS]
    column, params = np.empty(3, dtype=object), SamplingParams(max_tokens=1)
    column[:] = talks
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert len(decoder.chat(column, params, use_tqdm=False, chat_template=template)) == 3


def test_what_is_one_input_stays_one(embedder: LLM) -> None:
    pixels = np.zeros((4, 4, 3), np.uint8)
    for value in ("text", b"bytes", pixels, [1, 2], ("a",), Path("a.png"), {"text": "a"}, torch.zeros(3), np.zeros(3), None, 3):
        assert column_values(value, "inputs") is None
    with pytest.raises(InputError) as caught:
        embedder.embed(Table())
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_value", "inputs")
    (missing,) = embedder.embed(np.array([float("nan")], dtype=object), use_tqdm=False)
    assert missing.error is not None


def test_chat_names_the_call_of_an_embedder(embedder: LLM) -> None:
    talk = [{"role": "user", "content": "a"}]
    with pytest.raises(InputError, match="it computes vectors") as caught:
        embedder.chat(talk)
    assert caught.value.info.code == "unsupported"
    (found,) = embedder.generate("import os", use_tqdm=False)
    assert found.error.code == "unsupported"
    assert "it computes vectors" in found.error.message


@pytest.mark.parametrize(("labels", "call"), [(1, "it scores pairs of a query.*; use llm.score"), (3, "use llm.classify")])
def test_chat_names_the_call_of_a_classifier(tmp_path: Path, labels: int, call: str) -> None:
    words = fast_tokenizer(["<pad>"], pad_token="<pad>")
    config = tf.BertConfig(**text_config(words) | {"max_position_embeddings": 64, "pad_token_id": 0, "num_labels": labels})
    tf.BertForSequenceClassification(config).save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    with LLM(tmp_path, max_num_seqs=4) as llm, pytest.raises(InputError, match=call):
        llm.chat([{"role": "user", "content": "a"}])


def test_numbers_in_an_array_or_a_range_are_no_column():
    assert column_values(array("f", [0.0, 1.0]), "audio") is None
    assert column_values(range(3), "prompts") is None
