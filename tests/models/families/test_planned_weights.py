"""The planned bytes of weights of a published size, on the meta device, against the parameters of transformers' class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import ensure_torchvision
from sensorium.engine.model_files import resolve
from sensorium.models.registry import find_architecture
from sensorium.models.weights import weight_bytes

ensure_torchvision()
import transformers as tf  # noqa: E402

CPU = torch.device("cpu")
TEXT: dict[str, Any] = {
    "model_type": "gemma", "vocab_size": 257216, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
}  # fmt: skip
VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "patch_size": 14, "image_size": 224, "projection_dim": 2048,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_table_is_planned_once(dtype: torch.dtype) -> None:
    """PaliGemma 3B: 2.9 billion parameters. Its head is tied to a table of 0.5 billion."""
    config = tf.PaliGemmaConfig(text_config=TEXT, vision_config=VISION)
    with torch.device("meta"):
        oracle = tf.PaliGemmaForConditionalGeneration(config).to(dtype)
    unused = sum(one.nbytes for name, one in oracle.named_parameters() if "vision_tower" in name and ".head." in name)
    stored = sum(one.nbytes for one in oracle.parameters()) - unused
    kind, raw = resolve(find_architecture("PaliGemmaForConditionalGeneration").model), config.to_dict()
    model = kind({**raw, "architectures": ["PaliGemmaForConditionalGeneration"]}, dtype, torch.device("meta"))
    planned = weight_bytes(model, CPU)
    assert abs(planned - stored) < 0.002 * stored, (planned, stored)  # rows of packed layers are padded
    assert planned - stored < 257216 * 2048 * dtype.itemsize / 10
