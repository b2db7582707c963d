"""jina-embeddings-v4: tasks, passages, vectors of tokens and scores, with the oracle of its row in tests/families."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from embedder import load_embedders
from family import make_media
from oracle import save_checkpoint
from sensorium import LLM
from sensorium.callers.errors import ConfigError

ROW = load_embedders()["jina_v4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_checkpoint(tmp_path_factory.mktemp("jina") / "model", *ROW.build(0))
    ROW.finish(path)
    return path


@pytest.mark.parametrize("task", ["retrieval", "code"])
def test_vectors_are_the_publishers(task: str, folder: Path) -> None:
    model, processor = ROW.load(folder, task)
    image = make_media("image", (90, 130), 0)
    with LLM(folder, max_model_len=512, max_num_seqs=4, hf_overrides={"task": task}) as llm:
        found = [*llm.embed(["a house", image], use_tqdm=False), *llm.embed("a house", instruction="Passage", use_tqdm=False)]
        tokens = llm.embed(["a house", image], pooling="tokens", use_tqdm=False)
        scores = llm.score("a house", ["a house", image], use_tqdm=False)
    given = [ROW.inputs(processor, "a house"), ROW.inputs(processor, image), ROW.inputs(processor, "a house", "Passage: ")]
    with torch.inference_mode():
        query, page, passage = (ROW.run(model, one) for one in given)
        of_tokens = [ROW.run(model, one, True) for one in given[:2]]
    for one, theirs in zip([*found, *tokens], [query, page, passage, *of_tokens], strict=True):
        assert one.error is None, one.error
        assert one.vector.shape == theirs.shape
        assert (one.vector - theirs).abs().max() < 3e-5
    assert [one.score for one in scores] == pytest.approx([float(query @ one) for one in (passage, page)], abs=5e-5)


def test_an_unknown_task_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no task 'codes'; did you mean code"):
        LLM(folder, hf_overrides={"task": "codes"})
