"""What a drafter expects of rows before it has seen a step: the costs that were measured for the model's weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sensorium.engine.config import make_config
from sensorium.engine.drafts.depth import STEP_COSTS, StepCosts
from sensorium.engine.model_files import load_model_files
from sensorium.engine.setup import drafts
from sensorium.engine.setup.model_source import ModelSource
from sensorium.engine.setup.resolve import load_processing
from sensorium.kernels import bodies, measure, native
from sensorium.models.interface import Model


def built(folder: Path, **options: object) -> tuple[object, Model]:
    config = make_config(folder, {"device": "cpu", **options})
    files = load_model_files(config.model)
    return config, ModelSource(config, files, load_processing(files, {})).build_on_meta()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "bfloat16", "quantization": "int8"}, "int8"),
        ({"dtype": "bfloat16", "quantization": "int4"}, "int4"),
        ({"dtype": "bfloat16", "quantization": {"method": "int4", "activations": "int8"}}, "w4a8"),
    ],
)
def test_costs_are_those_of_the_models_weights(
    options: dict[str, object], expected: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {weights: tuple(1.0 + i * number for i in range(16)) for number, weights in enumerate(measure.WEIGHTS)}
    monkeypatch.setattr(bodies, "may_measure", lambda: True)
    monkeypatch.setattr(drafts, "row_costs", table.__getitem__)
    config, model = built(checkpoint, **options)
    drafter, reason = drafts.make_drafter(config, model, torch.bfloat16)
    assert reason == "" or native.library() is None
    if drafter is not None:
        assert [drafter.costs.seconds(rows) for rows in range(1, 17)] == list(table[expected])


def test_a_named_instruction_set_has_the_table(checkpoint: Path) -> None:
    config, model = built(checkpoint, dtype="bfloat16")
    assert drafts.first_costs(config, model) in STEP_COSTS.values(), "nothing is measured in tests"
    assert StepCosts(drafts.first_costs(config, model)).seconds(1) == 1.0
