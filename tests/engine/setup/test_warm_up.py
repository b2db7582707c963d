"""Warm-up: a small item of each modality goes through a new model, unless it is too large for a CPU; failures are harmless."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from infos import INFOS
from sensorium import LLM
from sensorium.engine.setup import loader
from sensorium.engine.setup.warm_up import encode_small_items

CPU, GPU = torch.device("cpu"), torch.device("meta")


def encoded(info: Any, device: torch.device) -> list[str]:
    """Return the modalities that a model is asked to encode."""
    calls: list[str] = []
    model: Any = SimpleNamespace(embed_multimodal=lambda modality, tensors: calls.append(modality))
    encode_small_items(model, info, info.modalities, torch.float32, device)
    return calls


@pytest.mark.parametrize("name", sorted(INFOS.keys() - {"RawTensorInfo"}))  # only its network knows what it takes
def test_each_modality_is_encoded(name: str) -> None:
    no_font = name.startswith("Ernie")  # it writes on the frames of videos with a font of the checkpoint
    assert encoded(INFOS[name], GPU) == (["image"] if no_font else list(INFOS[name].modalities))


def test_large_items_are_left_out_on_a_cpu() -> None:
    assert encoded(INFOS["Qwen2VLProcessingInfo"], CPU) == ["image"]  # a small video is resized to more patches
    assert encoded(INFOS["WhisperProcessingInfo"], CPU) == []


def test_a_failure_is_left_to_the_first_request(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[str] = []

    def fail(modality: str, tensors: object) -> None:
        asked.append(modality)
        raise RuntimeError("device")

    model: Any = SimpleNamespace(embed_multimodal=fail)
    with caplog.at_level(logging.DEBUG, "sensorium"):
        encode_small_items(model, INFOS["Qwen2VLProcessingInfo"], ("image", "video"), torch.float32, GPU)
    assert asked == ["image", "video"]  # the second modality is tried after the first one failed
    failures = [(record.getMessage(), str(record.exc_info and record.exc_info[1])) for record in caplog.records]
    assert failures == [(f"encoding a small {name} failed", "device") for name in asked]


def test_only_modalities_that_requests_may_have(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(loader, "encode_small_items", lambda model, info, modalities, *_: calls.append(modalities))
    for options in ({}, {"limit_mm_per_prompt": {"image": 0}}, {"warm_up": False}):
        with LLM(checkpoint, max_model_len=64, **options) as llm:
            assert llm.stats.encoder_calls == llm.mm_cache_stats.misses == 0
    assert calls == [["image", "video"], ["video"]]
