"""Every family's encoder can be recorded: the second run needs no transfers to or from a device; CPU replays are exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from family import Family, ask
from parity import LoadedModels, each
from sensorium import LLM
from sensorium.kernels import native
from sensorium.kernels.graph import UploadCache, capture
from sensorium.mm.fields import FieldElem, group_mergeable, merge
from sensorium.models.layers.basic import WeightedLayer
from torch import Tensor

THERE = torch.device("meta")
# torch's CPU attention counts as random
DRAWS = (
    "aria",
    "canary",
    "cohere_asr",
    "gemma3n",
    "granite4_vision",
    "granite_speech",
    "granite_speech_adapter",
    "granite_speech_plus",
    "idefics2",
    "midashenglm",
    "minicpmo",
    "minicpmv2_6",
    "minicpmv4_5",
    "mllama",
    "moonshine_streaming",
    "phi4_multimodal",
    "phi4mm",
    "ultravox",
)


def encoder_calls(row: Family, llm: LLM, seed: int) -> Iterator[tuple[str, list[Mapping[str, FieldElem]]]]:
    """Yield the modality and the items of every encoder call for the row's fullest prompt."""
    prepared = llm.engine.inputs.process(ask(row, max(row.default_cases(), key=len), seed).ours)
    items = [*prepared.features, *prepared.cross]
    for ids in group_mergeable([item.kwargs for item in items], [item.modality for item in items]):
        yield items[ids[0]].modality, [items[i].kwargs for i in ids]


def without_memory(llm: LLM) -> Any:
    """Return the model on the meta device, with packed layers."""
    source = llm.engine.loop.core.executor._source
    assert source is not None
    model: Any = source.build_on_meta()
    for module in model.modules():
        if hasattr(module, "pack"):
            module.pack()
    for module in model.modules():
        if isinstance(module, WeightedLayer):
            module.after_load()
    return model


@pytest.mark.sampled
@each
@torch.inference_mode()
def test_what_the_host_works_out_is_sent_once(row: Family, loaded: LoadedModels, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = loaded.llm(row.name)
    model, known = without_memory(llm), UploadCache._upload
    if not model.recordable:
        pytest.skip("its encoder keeps tensors between calls and is not recorded")

    def send(sent: UploadCache, tensor: Tensor, device: torch.device) -> Tensor:
        found = known(sent, tensor, device)
        assert found is not tensor, "other numbers than the first time"
        return found

    monkeypatch.setattr(UploadCache, "_upload", send)
    for modality, items in encoder_calls(row, llm, 0):
        sent = UploadCache()
        for again in (False, True):
            sent.capturing = again
            with sent:
                model.embed_multimodal(modality, merge(items, THERE))
        assert not sent.data_dependent, "numbers are read off the device, or an index is a mask"


@pytest.mark.sampled
@pytest.mark.skipif(native.library() is None, reason="the C++ kernels are not built")
@each
@torch.inference_mode()
def test_a_recorded_call_has_the_bits_of_any_other(row: Family, loaded: LoadedModels) -> None:
    llm = loaded.llm(row.name)
    model = llm.engine.loop.core.executor.runner.model
    if not model.recordable:
        pytest.skip("its encoder keeps tensors between calls and is not recorded")
    encode = model.embed_multimodal
    for modality, items in encoder_calls(row, llm, 0):
        given: dict[str, Any] = deepcopy(merge(items))  # the items themselves are in the cache of processed items
        tensors = [one for value in given.values() for one in (value if isinstance(value, list) else [value])]
        inputs = [tensor for tensor in tensors if tensor.is_floating_point()]
        fixed = [tensor for tensor in tensors if not tensor.is_floating_point()]
        _, graph = capture(lambda given=given, modality=modality: encode(modality, given), constants=fixed)
        if graph is None:
            assert row.name in DRAWS
            continue
        for value in inputs:
            value.copy_(value.flip(0))
        for found, expected in zip(graph.replay(), encode(modality, given), strict=True):
            assert torch.equal(found, expected)
