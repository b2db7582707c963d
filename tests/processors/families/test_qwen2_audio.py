"""Qwen2-Audio's tokens and tensors against transformers' processor, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import audio_tokenizer, build_checkpoint, load_processor
from sensorium.callers.errors import ConfigError, InputError, MediaError
from sensorium.mm.embeddings import ROWS
from sensorium.mm.fields import group_mergeable, merge
from sensorium.mm.types import AudioItem, EmbeddingItem, MediaHeader
from sensorium.models.families.qwen2_audio.processing import Qwen2AudioProcessingInfo
from sensorium.processors.files import ProcessorFiles, read_preprocessors
from sensorium.processors.interface import ProcessingInfo
from sensorium.processors.spans import lay_out

PLACEHOLDER = 640


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("models") / "qwen2_audio", "qwen2_audio")


@pytest.fixture(scope="module")
def info(folder: Path) -> ProcessingInfo:
    return Qwen2AudioProcessingInfo(read_preprocessors(folder))


def sound(count: int) -> np.ndarray:
    return np.random.default_rng(count).normal(0, 0.1, count).astype(np.float32)


@pytest.mark.parametrize("counts", [[321], [480, 481, 640, 641], [16_000, 63_999, 64_000], [9600, 9601, 9760, 9761, 9921]])
def test_tokens_and_features_equal(counts: list[int], folder: Path, info: ProcessingInfo) -> None:
    sounds = [sound(count) for count in counts]
    text = "a <|audio_bos|><|AUDIO|><|audio_eos|> b" * len(counts)
    made = load_processor(folder)(text=[text], audio=sounds, sampling_rate=16_000, return_tensors="pt")
    items = [info.process(AudioItem(torch.from_numpy(one), 16_000), torch.float32) for one in sounds]
    spans = [(info.span("audio", geometry),) for _, geometry in items]
    ids, ranges = lay_out(audio_tokenizer().encode(text).ids, {"audio": spans}, info.placeholder_ids).expand()
    assert list(ids) == made["input_ids"][0].tolist()
    assert [[where.length for where in one] for one in ranges["audio"]] == [[len(span.token_ids)] for (span,) in spans]
    frames = made["feature_attention_mask"].sum(-1).tolist()
    for i, ((kwargs, geometry), count) in enumerate(zip(items, counts, strict=True)):
        features = kwargs["input_features"].data
        assert info.geometry(MediaHeader("audio", samples=count)) == geometry
        assert int(kwargs["audio_frames"].data) == frames[i]
        assert frames[i] <= len(features) <= min(frames[i] + 2, 400)
        torch.testing.assert_close(features, made["input_features"][i].T[: len(features)], atol=1e-5, rtol=0)


def test_expanded_placeholders(info: ProcessingInfo) -> None:
    span = info.span("audio", info.geometry(MediaHeader("audio", samples=1600)))
    assert span.token_ids == (PLACEHOLDER, PLACEHOLDER)
    assert lay_out([1, PLACEHOLDER, PLACEHOLDER, 2], {"audio": [(span,)]}, info.placeholder_ids).expand()[0] == (
        1,
        PLACEHOLDER,
        PLACEHOLDER,
        2,
    )


def test_items_merge(info: ProcessingInfo) -> None:
    items = [info.process(AudioItem(torch.from_numpy(sound(n)), 16_000), torch.bfloat16)[0] for n in (5000, 321, 64_000)]
    assert group_mergeable(items) == [[0, 1, 2]]
    batch = merge(items)
    lengths = [len(item["input_features"].data) for item in items]
    assert batch["input_features"].shape == (sum(lengths), 24)
    assert batch["input_features"].dtype == torch.bfloat16
    assert batch["audio_frames"].tolist() == [32, 3, 400]
    for item, rows in zip(items, batch["input_features"].split(lengths), strict=True):
        assert torch.equal(item["input_features"].data, rows)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (64_001, r"it lasts 4\.00 s, the model takes at most 4 s; cut it into several items"),
        (320, r"its 320 samples are too few for one token; give at least 321 \(20 ms\)"),
        (1, "too few for one token"),
    ],
)
def test_lengths_that_are_refused(count: int, text: str, info: ProcessingInfo) -> None:
    with pytest.raises(InputError, match=text):
        info.geometry(MediaHeader("audio", samples=count))
    with pytest.raises(InputError, match=text):
        info.process(AudioItem(torch.zeros(count), 16_000), torch.float32)


def test_an_upper_bound_may_be_over_the_limit(info: ProcessingInfo) -> None:
    header = MediaHeader("audio", samples=64_032, exact=False)
    assert info.geometry(header) == info.geometry(MediaHeader("audio", samples=64_000))


def test_precomputed_embeddings(info: ProcessingInfo) -> None:
    parser = info.parser()
    [source] = parser.parse({"audio": {"audio_embeds": torch.zeros(7, 64)}})["audio"]
    assert isinstance(source.data, EmbeddingItem)
    assert info.embeds_geometry(source.data).num_embeds == 7
    with pytest.raises(MediaError, match="64"):
        parser.parse({"audio": {"audio_embeds": torch.zeros(7, 65)}})
    with pytest.raises(InputError, match="at most 100"):
        info.embeds_geometry(EmbeddingItem("audio", {ROWS: torch.zeros(101, 64)}))


def test_forms_of_one_and_of_several(info: ProcessingInfo) -> None:
    parse = info.parser().parse
    one, rated = sound(400), (sound(400), 8000)
    for value, count in ((one, 1), (rated, 1), ([rated], 1), ([rated, one, b"x"], 3), ([0.1, 0.2], 1), (b"x", 1)):
        assert len(parse({"audio": value})["audio"]) == count
    with pytest.raises(InputError, match="unknown modality 'image'"):
        parse({"image": b"x"})


def test_options_are_refused_by_name(folder: Path, info: ProcessingInfo) -> None:
    assert info.with_kwargs({}).options_key("audio") == info.options_key("audio")
    with pytest.raises(ConfigError, match="unknown processing option 'fps'"):
        info.with_kwargs({"fps": 2})
    assert info.shrink_kwargs("audio", (100, 1, 1), 10) is None


def test_files_that_contradict_each_other(folder: Path) -> None:
    files = read_preprocessors(folder)

    def build(audio: dict[str, Any] | None = None, **config: Any) -> Qwen2AudioProcessingInfo:
        return Qwen2AudioProcessingInfo(ProcessorFiles(config=dict(files.config) | config, audio=audio or files.audio))

    assert build().placeholder_ids == {"audio": PLACEHOLDER}
    with pytest.raises(
        ConfigError, match=r"num_mel_bins is 24 in audio_config of config.json, but the preprocessor's JSON sets 80"
    ):
        build(audio=dict(files.audio) | {"feature_size": 80})
    with pytest.raises(ConfigError, match="max_source_positions is 200"):
        build(audio=dict(files.audio) | {"chunk_length": 30})
    with pytest.raises(ConfigError, match=r"audio_token_index 643 .* outside the vocabulary of 643"):
        build(audio_token_index=643)
    published = Qwen2AudioProcessingInfo(ProcessorFiles(config={"audio_config": {}, "text_config": {"vocab_size": 156_032}}))
    assert published.placeholder_ids == {"audio": 151_646}
    assert published.geometry(MediaHeader("audio", samples=480_000)).num_embeds == 750
