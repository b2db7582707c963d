"""An item encoded among others is, bit for bit, the item encoded alone; and what the encoder cache keeps may be used for it."""

from typing import Any

import numpy as np
import pytest
import torch
from oracle import build_checkpoint
from sensorium.engine.config import load_model_files
from sensorium.engine.loader import load_processing, resolve
from sensorium.mm.fields import group, merge
from sensorium.mm.registry import find
from sensorium.mm.types import AudioItem, FramePlan, ImageItem, VideoItem
from sensorium.models import weights

SIZES = [(60, 60), (90, 130), (140, 70), (60, 60), (56, 112), (101, 99), (200, 40), (112, 112)]
SECONDS = [0.05, 1.0, 0.333, 4.0, 2.71, 0.5]


def items(info: Any, dtype: torch.dtype) -> list[tuple[str, Any]]:
    """(modality, processed item) of every kind the family takes, in mixed order."""
    rng = np.random.default_rng(0)
    found: list[tuple[str, Any]] = []
    for i, (height, width) in enumerate(SIZES if "image" in info.modalities else []):
        frames = torch.from_numpy(rng.integers(0, 256, (4, height, width, 3), dtype=np.uint8))
        found.append(("image", ImageItem(frames[0])))
        if i % 3 == 0:
            plan = FramePlan((0, 1, 2, 3), (0.0, 0.5, 1.0, 1.5), 4, 2.0)
            found.append(("video", VideoItem(frames, plan)))
    for seconds in SECONDS if "audio" in info.modalities else []:
        found.append(("audio", AudioItem(torch.from_numpy(rng.normal(0, 0.3, int(16000 * seconds)).astype(np.float32)), 16000)))
    return [(modality, info.process(item, dtype)[0]) for modality, item in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen2_audio"])
@pytest.mark.parametrize("quantization", [None, "int8"])
@torch.inference_mode()
def test_together_equals_alone(tmp_path, family, dtype, quantization):
    path = build_checkpoint(tmp_path / family, family, 0)
    files = load_model_files(path)
    row = find(files.architecture)
    model = resolve(row.model)(files.config, dtype, torch.device("cpu"))
    weights.load(path, model, quantization)
    made = items(load_processing(row, files, {}), dtype)
    for ids in group([kwargs for _, kwargs in made], [modality for modality, _ in made]):
        modality = made[ids[0]][0]
        together = model.embed_multimodal(modality, merge([made[i][1] for i in ids]))
        backwards = model.embed_multimodal(modality, merge([made[i][1] for i in reversed(ids)]))[::-1]
        for i, rows, again in zip(ids, together, backwards, strict=True):
            (alone,) = model.embed_multimodal(modality, merge([made[i][1]]))
            assert torch.equal(rows, alone), f"{modality} {i} differs in company"
            assert torch.equal(again, alone), f"{modality} {i} differs in other company"
