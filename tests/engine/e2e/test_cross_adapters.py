"""Adapters of requests of models whose decoder reads encoder rows by cross-attention: the oracle adds B(A(x))."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family import ask, make_media
from lora import compare, hook, logprobs, matrices, table_matrices, table_tensors, write
from parity import ROWS, LoadedModels, greedy, make_llm
from sensorium import SamplingParams

pytestmark = pytest.mark.in_process

TARGETS = {
    "whisper": (
        r"decoder.*(self_attn|encoder_attn)\.(q|k|v|out)_proj$|decoder.*fc[12]$|encoder\.layers.*(q_proj|v_proj|fc1)$|proj_out$",
        "a",
    ),
    "moonshine": (r"decoder.*(self_attn|encoder_attn)\.(q|k|v)_proj$|encoder\.layers.*(k_proj|fc2)$", "a"),
    "mllama": (r"layers.*(cross_attn|self_attn)\.(q|k|v|o)_proj$|layers\.1\.mlp\.(up|down)_proj$|multi_modal_projector$", "i"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> LoadedModels:
    return LoadedModels(tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("name", TARGETS)
def test_answers_are_those_of_transformers(world: LoadedModels, tmp_path: Path, name: str) -> None:
    """Keys of cross-attention are those of the adapter, also where a step writes keys of several sequences."""
    (chosen, items), row, base = TARGETS[name], ROWS[name], world.folder(name)
    model, processor = row.load(base)
    pairs = matrices(model, chosen)
    tables = table_matrices(model, "embed_tokens$") if name == "whisper" else {}
    folder = write(tmp_path / "adapter", str(base), pairs, more=table_tensors(tables))
    question, params = ask(row, items, 0), greedy(6, logprobs=3)
    with make_llm(row, base, enable_lora=True, batch_invariant=True) as llm:
        info = llm.load_adapter("mine", folder)
        assert 0 < info.num_bytes <= llm.explain().adapters
        both = llm.generate([question.ours] * 3, params, use_tqdm=False, adapter=[None, "mine", None])
        alone = [llm.generate(question.ours, params, use_tqdm=False, adapter=one)[0] for one in (None, "mine", None)]
        assert [logprobs(one) for one in both] == [logprobs(one) for one in alone]
        compare(llm, row, model, processor, question)
        hook(model, pairs | tables, dict.fromkeys(pairs | tables, 2.0))
        compare(llm, row, model, processor, question, adapter="mine")
        with pytest.raises(AssertionError):
            compare(llm, row, model, processor, question)


def test_encoder_rows_follow_the_part_that_changes_the_encoder(world: LoadedModels, tmp_path: Path) -> None:
    row, base = ROWS["whisper"], world.folder("whisper")
    model, _ = row.load(base)
    decoder = write(tmp_path / "decoder", str(base), matrices(model, r"decoder.*encoder_attn\.v_proj$"))
    encoder = write(tmp_path / "encoder", str(base), matrices(model, r"encoder\.layers.*fc1$"))
    question = ask(row, "a", 0).ours
    with make_llm(row, base, enable_lora=True) as llm:
        for folder in (decoder, encoder):
            llm.load_adapter(folder.name, folder)
        ours, calls = llm.engine.loop.core.executor.runner.model, list[str]()
        real = ours.embed_multimodal
        ours.embed_multimodal = lambda modality, tensors: (calls.append(modality), real(modality, tensors))[1]
        counts = []
        for adapter in (None, "decoder", "encoder", "encoder"):
            (output,) = llm.generate(question, greedy(2), use_tqdm=False, adapter=adapter)
            assert output.error is None
            counts.append(len(calls))
        assert counts == [1, 1, 2, 2]


def test_transcripts(world: LoadedModels, tmp_path: Path) -> None:
    """Text, language and word times are those of an engine into whose weights the adapter is merged."""
    row, base = ROWS["whisper"], world.folder("whisper")
    model, _ = row.load(base)
    folder = write(tmp_path / "adapter", str(base), matrices(model, r"encoder_attn\.(k|v)_proj$|encoder\.layers.*fc1$"))
    audio = make_media("audio", (12_000,), 1), 16_000
    options: dict[str, Any] = {
        "use_tqdm": False,
        "vad": False,
        "sampling_params": SamplingParams(temperature=0.0, max_tokens=8),
    }
    with make_llm(row, base, enable_lora=True) as llm, make_llm(row, folder) as merged:
        llm.load_adapter("mine", folder)
        (ours,) = llm.transcribe(audio, adapter="mine", **options)
        (theirs,) = merged.transcribe(audio, **options)
        (plain,) = llm.transcribe(audio, **options)
    assert (ours.error, theirs.error) == (None, None)
    assert (ours.text, ours.language) == (theirs.text, theirs.language)
    assert ours.text != plain.text
