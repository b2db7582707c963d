"""The packed tower against the towers of transformers on small random weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle import randomise
from sensorium.models.vision.radio import radio_spec, summary_rows
from sensorium.models.vision.spec import RotarySpec
from towers import CASES, hidden, load, make_items, make_patches


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_states_equal(name: str) -> None:
    case = CASES[name]
    oracle = case.build()
    randomise(oracle, 0)
    items = make_items(case.grids)
    made = make_patches(case, items)
    theirs = case.run(oracle, items, made, case.grids)
    ours = load(case, oracle)(made, case.grids)
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        assert (mine - other).abs().max() < 2e-4 * max(1.0, float(other.std()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_items_are_isolated(name: str, dtype: torch.dtype) -> None:
    """States are equal bit for bit alone, in a batch, and in another batch."""
    case = CASES[name]
    oracle = case.build()
    randomise(oracle, 0)
    tower = load(case, oracle, dtype)
    items = make_items(case.grids)
    counts = [t * h * w for t, h, w in case.grids]
    together = tower(make_patches(case, items), case.grids)
    backwards = tower(make_patches(case, items[::-1]), case.grids[::-1])
    for i, grid in enumerate(case.grids):
        alone = tower(make_patches(case, items[i : i + 1]), [grid])
        for one, all_, other in zip(alone, together, backwards, strict=True):
            assert torch.equal(one, all_.split(counts)[i])
            assert torch.equal(one, other.split(counts[::-1])[len(counts) - 1 - i])


@torch.inference_mode()
def test_interleaved_pairs_are_the_same_pairs() -> None:
    """Interleaved pairs equal rotated halves with queries and keys in another order."""
    case = CASES["kimi_k25"]
    oracle = case.build()
    randomise(oracle, 0)
    made = make_patches(case, make_items(case.grids))
    (halves,) = load(case, oracle)(made, case.grids)
    for name, tensor in oracle.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            tensor.copy_(tensor.unflatten(0, (4, 2, 6)).transpose(1, 2).flatten(0, 2))
    rotary = RotarySpec(order="alternating", interleaved=True)
    (pairs,) = load(replace(case, spec=replace(case.spec, rotary=rotary)), oracle)(made, case.grids)
    assert torch.allclose(halves, pairs, atol=1e-5)


@torch.inference_mode()
def test_class_rows_may_be_kept() -> None:
    case = CASES["clip"]
    oracle = case.build()
    randomise(oracle, 0)
    items = make_items(case.grids)
    kept = replace(case, spec=replace(case.spec, keep_class=True))
    ours = load(kept, oracle)(make_patches(case, items), case.grids)
    theirs = hidden(oracle, items, items[0], case.grids)
    assert torch.allclose(ours[1], theirs[2].flatten(0, 1), atol=1e-4)


@pytest.mark.parametrize(
    ("args", "rows"),
    [
        ({"cls_token_per_teacher": True, "teachers": [{"name": "clip"}, {"name": "sam", "use_summary": False}]}, [0]),
        ({"cls_token_per_teacher": True, "teachers": [{"name": "clip"}, {"name": "dino_v2"}, {"name": "clip"}]}, [0, 1]),
        ({"teachers": [{"name": "clip"}, {"name": "dino_v2"}]}, [0, 1]),
        ({}, [0]),
        ({"cls_token_per_teacher": False, "teachers": [{"name": "clip"}, {"name": "dino_v2"}]}, [0]),
    ],
)
def test_a_summary_of_radio_has_a_row_per_name_of_a_teacher(args, rows):
    assert summary_rows({"args": args}) == rows


def test_radio_has_a_class_row_per_teacher_unless_told_otherwise():
    args = {"model": "vit_base_patch16_224", "teachers": [{"name": "clip"}, {"name": "dino_v2"}], "cpe_num_registers": 4}
    assert radio_spec({"args": args}, 1).registers == 6
    assert radio_spec({"args": args | {"cls_token_per_teacher": False}}, 1).registers == 5
    assert radio_spec({"args": {"model": "vit_base_patch16_224"}}, 1).registers == 1
