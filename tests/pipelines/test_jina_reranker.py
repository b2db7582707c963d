"""jina-reranker-m0 against its publisher's rule: an MLP over transformers' last hidden state, after the score token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family import IMAGE_SIZES, make_media
from measured import measured_steps
from oracle import build_checkpoint, build_processor, load_oracle
from safetensors.torch import load_file, save_file
from sensorium import LLM

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, torch.Tensor]]:
    """Return a checkpoint in the publisher's layout, transformers' model, and the MLP."""
    folder = build_checkpoint(tmp_path_factory.mktemp("jina") / "model", "qwen2_vl", layers=2, vision_depth=2)
    model = load_oracle(folder)[0]
    gen = torch.Generator().manual_seed(3)
    shapes = {"score.0.weight": (64, 64), "score.0.bias": (64,), "score.2.weight": (1, 64), "score.2.bias": (1,)}
    mlp = {name: torch.randn(shape, generator=gen) / 4 for name, shape in shapes.items()}
    stored = load_file(folder / "model.safetensors")
    save_file(stored | mlp, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["JinaVLForRanking"]}))
    return folder, model, mlp


def processed(text: str, images: list[Any]) -> dict[str, Any]:
    made = build_processor("qwen2_vl", min_pixels=56 * 56, max_pixels=768 * 28 * 28)
    return dict(made(text=[text], images=images or None, return_tensors="pt"))


def expected(model: Any, mlp: dict[str, torch.Tensor], text: str, images: list[Any]) -> float:
    made = processed(text, images)
    ids = torch.cat([made["input_ids"], torch.tensor([[100]])], 1)
    kinds = (ids == model.config.image_token_id).int()
    given = {name: made[name] for name in ("pixel_values", "image_grid_thw") if name in made}
    with torch.inference_mode():
        hidden = model.model(input_ids=ids, mm_token_type_ids=kinds, **given).last_hidden_state[0, -1]
        inner = torch.relu(mlp["score.0.weight"] @ hidden + mlp["score.0.bias"])
        logit = mlp["score.2.weight"] @ inner + mlp["score.2.bias"]
    return float(torch.sigmoid(logit - 2.65))


def test_scores_are_the_publishers(checkpoint: tuple[Path, Any, dict[str, torch.Tensor]]) -> None:
    folder, model, mlp = checkpoint
    page, other = make_media("image", (90, 130), 0), make_media("image", (60, 80), 1)
    llm = LLM(folder, max_model_len=1024, max_num_seqs=4)
    found = llm.score("what is it", ["a house", page, {"image": other}], use_tqdm=False)
    found += llm.score(other, ["a house", page], use_tqdm=False)
    cases = [
        ("a house", "what is it", []),
        (IMAGE, "what is it", [page]),
        (IMAGE, "what is it", [other]),
        ("a house", IMAGE, [other]),
        (IMAGE, IMAGE, [page, other]),
    ]
    wanted = [expected(model, mlp, f"**Document**:\n{doc}\n**Query**:\n{query}", images) for doc, query, images in cases]
    assert [one.error for one in found] == [None] * 5
    assert [one.score for one in found] == pytest.approx(wanted, abs=2e-5)
    assert max(wanted) - min(wanted) > 1e-3
    assert llm.score("a", "", use_tqdm=False)[0].error is not None


def test_a_score_does_not_depend_on_the_batch(checkpoint: tuple[Path, Any, dict[str, torch.Tensor]]) -> None:
    llm = LLM(checkpoint[0], max_model_len=1024, max_num_seqs=4)
    documents = ["a house", *(make_media("image", size, 2) for size in ((90, 130), (60, 60), (150, 40)))]
    together = llm.score("what is it", documents, use_tqdm=False)
    alone = [llm.score("what is it", one, use_tqdm=False)[0] for one in documents]
    assert [one.score for one in together] == [one.score for one in alone]


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.full)])
def test_every_size_takes_the_publishers_tokens(every: int, checkpoint: tuple[Path, Any, dict[str, torch.Tensor]]) -> None:
    llm = LLM(checkpoint[0], max_model_len=4096, max_num_seqs=4)
    for size in IMAGE_SIZES[::every]:
        image = make_media("image", size, 0)
        sides = [[{"type": "image", "image": image}], [{"type": "text", "text": "what is it"}]]
        (plan,) = llm.plan([{"role": "user", "content": content} for content in sides])
        assert plan.num_embeds == int((processed(IMAGE, [image])["input_ids"] == checkpoint[1].config.image_token_id).sum()), (
            size
        )


def test_steps_take_no_more_memory_than_planned(checkpoint: tuple[Path, Any, dict[str, torch.Tensor]]) -> None:
    llm = LLM(checkpoint[0], max_model_len=1024, max_num_seqs=4, device="cpu")
    with measured_steps(llm.engine.loop.core.executor.runner.model) as found:
        llm.score("what is it", [make_media("image", (150, 150), seed) for seed in range(4)], use_tqdm=False)
    assert {what for what, _, _ in found} == {"forward", "image"}
    assert [one for one in found if one[2] > 1.001 * one[1]] == []  # small tensors on the host are not planned
