"""Clustering of voices, and turns from the activity of overlapping windows."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from sensorium.engine.speaker_networks import RATE, load_speaker_networks
from sensorium.pipelines.speech import clustering
from sensorium.pipelines.speech.clustering import assign, cluster
from sensorium.pipelines.speech.diarization import Diarizer, voice_of
from sensorium.pipelines.speech.segments import SpeakerTurn
from tone_speakers import NETWORKS, conversation

WEIGHTS = os.environ.get("SENSORIUM_SPEAKER_MODEL")  # a folder; the packages are used if it is not set
HAS_WEIGHTS = bool(WEIGHTS or (find_spec("whisperx") and find_spec("resemblyzer")))
ANYBODY = (1, 64)
EDGE = 0.06  # seconds: a frame hears this much around its middle


def turns_of(samples: torch.Tensor, limits: tuple[int, int] = ANYBODY, block: int | None = None) -> tuple[SpeakerTurn, ...]:
    diarizer = Diarizer(NETWORKS, limits)
    for part in samples.split(block or len(samples)):
        diarizer.add(part)
    return diarizer.finish()


def numbers(turns: tuple[SpeakerTurn, ...]) -> list[int]:
    return [int(turn.speaker.removeprefix("SPEAKER_")) for turn in turns]


def test_turns_have_the_times_of_the_speech() -> None:
    spoken = [(0.5, 3.0, 2), (3.5, 6.0, 0), (5.0, 9.0, 1), (9.5, 12.0, 2), (20.0, 24.0, 1), (24.5, 26.0, 0)]
    turns = turns_of(conversation(30.0, spoken))
    assert numbers(turns) == [0, 1, 2, 0, 2, 1]
    for turn, (start, end, _) in zip(turns, spoken, strict=True):
        assert abs(turn.start - start) < EDGE
        assert abs(turn.end - end) < EDGE


@pytest.mark.parametrize("block", [999, 40_000, 16_000 * 17])
def test_turns_do_not_depend_on_blocks(block: int) -> None:
    samples = conversation(40.3, [(i, i + 1.2, i % 4) for i in range(38)])
    assert turns_of(samples, block=block) == turns_of(samples)


@pytest.mark.parametrize("seconds", [0.01, 0.3, 1.0, 4.99, 5.0, 5.01, 6.0, 21.3])
def test_audio_of_any_length(seconds: float) -> None:
    turns = turns_of(conversation(seconds, [(0.0, seconds, 1)]))
    assert turns == () if seconds < 0.1 else numbers(turns) == [0]
    if turns:
        assert turns[0].start < EDGE
        assert seconds - EDGE < turns[0].end <= seconds


def test_silence_and_no_samples_have_no_turns() -> None:
    assert turns_of(torch.zeros(20 * RATE)) == ()
    assert Diarizer(NETWORKS, ANYBODY).finish() == ()


def test_more_speakers_than_a_window_tells_apart() -> None:
    spoken = [(4.0 * i, 4.0 * i + 3.5, i % 4) for i in range(12)]
    assert numbers(turns_of(conversation(50.0, spoken))) == [0, 1, 2, 3] * 3


def test_the_number_of_speakers_may_be_given() -> None:
    spoken = [(4.0 * i, 4.0 * i + 3.5 - (i % 3 == 2), i % 3) for i in range(9)]
    samples = conversation(38.0, spoken)
    assert set(numbers(turns_of(samples))) == {0, 1, 2}
    for limits, count in (((2, 2), 2), ((1, 1), 1), ((1, 2), 2), ((2, 8), 3), ((3, 3), 3)):
        assert len(set(numbers(turns_of(samples, limits)))) == count
    assert len(set(numbers(turns_of(conversation(9.0, [(1.0, 8.0, 0)]), (3, 4))))) <= 3


def test_known_speakers_have_their_names() -> None:
    voices = [(name, voice_of(NETWORKS, conversation(3.0, [(0.5, 2.5, tone)]))) for name, tone in (("Ann", 2), ("Bob", 3))]
    diarizer = Diarizer(NETWORKS, ANYBODY, [(name, voice) for name, voice in voices if voice is not None])
    diarizer.add(conversation(20.0, [(1.0, 4.0, 0), (5.0, 9.0, 2), (10.0, 14.0, 1), (15.0, 18.0, 2)]))
    assert [turn.speaker for turn in diarizer.finish()] == ["SPEAKER_00", "Ann", "SPEAKER_01", "Ann"]
    assert voice_of(NETWORKS, conversation(3.0, [(1.0, 1.2, 0)])) is None
    assert voice_of(NETWORKS, torch.zeros(0)) is None


def test_what_stays_in_memory_does_not_grow_with_the_samples() -> None:
    diarizer = Diarizer(NETWORKS, ANYBODY)
    kept = []
    for _ in range(6):
        diarizer.add(conversation(60.0, [(0.0, 60.0, 1)]))
        kept.append(len(diarizer.reader._buffer))
    assert max(kept) < 30 * RATE
    activity = sum(active.nbytes for active in diarizer.reader.active)
    assert activity / 360 < 1_500  # bytes per second


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def naive(vectors: np.ndarray, weights: np.ndarray, similarity: float) -> list[frozenset[int]]:
    """Return the members of clusters, by trying all pairs of clusters in each step."""
    groups = [frozenset([i]) for i in range(len(vectors))]
    while len(groups) > 1:
        means = unit(np.stack([sum(vectors[i] * weights[i] for i in group) for group in groups]))
        table = means @ means.T - 9 * np.eye(len(groups))
        left, right = np.unravel_index(table.argmax(), table.shape)
        if table[left, right] < similarity:
            break
        joined = groups[left] | groups[right]
        groups = [group for i, group in enumerate(groups) if i not in (left, right)] + [joined]
    return groups


@pytest.mark.parametrize("seed", range(5))
def test_clusters_are_those_of_all_pairs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = unit(np.repeat(rng.normal(size=(5, 6)), 8, 0) + 0.5 * rng.normal(size=(40, 6)))
    weights = rng.uniform(0.5, 3, 40).astype(np.float32)
    centres = cluster(vectors, weights, np.arange(40), 0.8, (1, 64), 0.0)
    groups = naive(vectors, weights, 0.8)
    expected = unit(np.stack([sum(vectors[i] * weights[i] for i in group) for group in groups]))
    assert len(centres) == len(expected) > 1
    np.testing.assert_allclose((centres @ expected.T).max(1), 1.0, atol=1e-5)


def test_voices_that_are_heard_together_are_different_speakers() -> None:
    rng = np.random.default_rng(0)
    pair = unit(np.array([[1.0, 0.0, 0.0], [0.88, 0.47, 0.0]]))
    vectors = unit(np.tile(pair, (10, 1)) + 0.05 * rng.normal(size=(20, 3)))
    weights = np.full(20, 2.0, np.float32)
    assert len(cluster(vectors, weights, np.arange(20), 0.8, (1, 64), 0.0)) == 1
    assert len(cluster(vectors, weights, np.arange(20) // 2, 0.8, (1, 64), 0.0)) == 2


def test_many_voices_are_clustered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    voices = unit(rng.normal(size=(3, 16)))
    owners = rng.integers(0, 3, 500)
    vectors = unit(voices[owners] + 0.1 * rng.normal(size=(500, 16)))
    weights, windows = np.ones(500, np.float32), np.arange(500)
    monkeypatch.setattr(clustering, "_MAX_NODES", 40)
    centres = cluster(vectors, weights, windows, 0.8, (1, 64), 0.02)
    assert len(centres) == 3
    np.testing.assert_allclose((centres @ voices.T).max(0), 1.0, atol=0.01)


def test_merging_ends_when_few_enough_are_left() -> None:
    vectors, searches = unit(np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)), 0

    def count(frame: object, event: str, called: object) -> None:
        nonlocal searches
        searches += event == "c_call" and getattr(called, "__name__", "") == "argmax"

    clusters = clustering._Clusters(vectors, np.ones(40, np.float32), np.arange(40))
    sys.setprofile(count)
    try:
        clusters.merge(-np.inf, 20)
    finally:
        sys.setprofile(None)
    assert len(clusters.sizes) == 20
    assert 0 < searches < 100


def test_short_noise_is_no_speaker() -> None:
    vectors = unit(np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]))
    weights = np.array([30.0, 30.0, 0.5], np.float32)
    assert len(cluster(vectors, weights, np.arange(3), 0.8, (1, 64), 0.03)) == 1
    assert len(cluster(vectors, weights, np.arange(3), 0.8, (2, 64), 0.03)) == 2


def test_speakers_of_a_window_are_different() -> None:
    nan = np.nan
    tables = [
        np.array([[0.9, 0.8], [0.95, 0.1], [nan, nan]], np.float32),
        np.array([[0.1], [0.2]], np.float32),
        np.zeros((0, 2), np.float32),
    ]
    assert assign(tables) == [[1, 0, -1], [-1, 0], []]


@pytest.mark.skipif(not HAS_WEIGHTS, reason="no weights: set SENSORIUM_SPEAKER_MODEL, or install whisperx and resemblyzer")
@pytest.mark.shared
def test_two_human_voices(shared_data: Path) -> None:
    samples, rate = soundfile.read(shared_data / "speech" / "long_two_speakers.flac", dtype="float32")
    diarizer = Diarizer(load_speaker_networks(WEIGHTS), ANYBODY)
    assert rate == RATE
    diarizer.add(torch.from_numpy(samples))
    turns = diarizer.finish()
    assert {turn.speaker for turn in turns} == {"SPEAKER_00", "SPEAKER_01"}
    assert max(turn.end for turn in turns if turn.speaker == "SPEAKER_00") < 65
    assert min(turn.start for turn in turns if turn.speaker == "SPEAKER_01") > 64
