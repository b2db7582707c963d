"""Windows of long audio are cut at pauses, sample-exact and in constant memory; texts of overlapping windows are merged."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from sensorium.callers.errors import ConfigError, InputError
from sensorium.pipelines.speech.merge import TextMerger, merge_overlap
from sensorium.pipelines.speech.vad import EnergyDetector, make_detector
from sensorium.pipelines.speech.windows import Window, WindowReader

RATE = 16_000


def sound(*parts: tuple[float, float], seed: int = 0) -> torch.Tensor:
    """Return audio of the given (seconds, loudness) stretches: syllables of noise over quiet noise."""
    random = np.random.default_rng(seed)
    pieces = []
    for seconds, loudness in parts:
        count = round(seconds * RATE)
        envelope = np.abs(np.sin(np.arange(count) / RATE * 2 * np.pi * 2))
        pieces.append(random.normal(0, 1, count) * (loudness * envelope + 1e-4))
    return torch.from_numpy(np.concatenate(pieces).astype(np.float32))


def read(
    samples: torch.Tensor, vad: bool = True, block: int = 7001, seconds: float = 30.0
) -> tuple[WindowReader, list[Window]]:
    detector = make_detector(True, RATE) if vad else None
    reader = WindowReader(iter(samples.split(block)), RATE, round(seconds * RATE), detector)
    return reader, list(reader.windows())


def seconds(windows: list[Window]) -> list[tuple[float, float]]:
    return [(round(one.start / RATE, 1), round(one.end / RATE, 1)) for one in windows]


def test_windows_hold_speech_and_end_in_pauses() -> None:
    samples = sound((5, 0), (20, 0.3), (1, 0), (14, 0.3), (6, 0), (3, 0.3))
    reader, windows = read(samples)
    assert seconds(windows) == [(4.5, 25.5), (25.5, 40.5), (45.5, 49.0)]
    assert reader.length == len(samples)
    assert [(round(a / RATE), round(b / RATE)) for a, b in reader.spans] == [(5, 25), (26, 40), (46, 49)]
    for window in windows:
        assert torch.equal(window.samples, samples[window.start : window.end])


def test_windows_do_not_depend_on_the_blocks_of_the_file() -> None:
    samples = sound((5, 0), (50, 0.3), (1, 0), (14, 0.3))
    found = [
        [(one.start, one.end, one.next_start, one.overlap) for one in read(samples, block=block)[1]]
        for block in (7001, 160_000, len(samples))
    ]
    assert found[0] == found[1] == found[2]


def test_without_voice_detection_every_sample_is_read() -> None:
    samples = sound((5, 0), (20, 0.3), (1, 0), (14, 0.3), (6, 0), (30, 0.3), seed=1)
    _, windows = read(samples, vad=False)
    assert windows[0].start == 0
    assert windows[-1].end == len(samples)
    for before, after in pairwise(windows):
        assert after.start == before.next_start <= before.end
        assert after.overlap == before.end - after.start


def test_windows_overlap_where_there_is_no_pause() -> None:
    samples = torch.randn(70 * RATE, generator=torch.Generator().manual_seed(0)) * 0.1
    _, windows = read(samples, vad=False)
    assert seconds(windows) == [(0.0, 30.0), (26.0, 56.0), (52.0, 70.0)]
    assert [one.overlap for one in windows] == [0, 4 * RATE, 4 * RATE]


@pytest.mark.parametrize("kind", ["silence", "noise", "hum", "quiet noise"])
def test_steady_sounds_are_no_speech(kind: str) -> None:
    time = torch.arange(25 * RATE) / RATE
    noise = torch.randn(len(time), generator=torch.Generator().manual_seed(0))
    made = {"silence": 0 * time, "noise": 0.2 * noise, "hum": (2 * torch.pi * 50 * time).sin() / 3, "quiet noise": 1e-3 * noise}
    reader, windows = read(made[kind])
    assert (windows, reader.spans, reader.length) == ([], [], len(time))


def test_memory_is_that_of_a_window() -> None:
    held = []
    blocks = (sound((1, 0.3), (0.4, 0), seed=number) for number in range(300))
    reader = WindowReader(blocks, RATE, 10 * RATE, make_detector(True, RATE))
    total = 0
    for window in reader.windows():
        held.append(len(reader._buffer) + sum(map(len, reader._unclassified)))
        total += window.end - window.start
    assert max(held) < 33 * RATE
    assert reader.length == 420 * RATE
    assert total > 300 * RATE


def test_a_detector_may_be_given() -> None:
    def every_frame(rate: float) -> object:
        return lambda samples: torch.ones(-(-len(samples) // 512))

    reader = WindowReader(iter([torch.zeros(5 * RATE)]), RATE, 30 * RATE, make_detector(every_frame, RATE))
    assert seconds(list(reader.windows())) == [(0.0, 5.0)]
    for given, error in (("silly", InputError), (3, InputError)):
        with pytest.raises(error, match=f"vad={given!r} must be"):
            make_detector(given, RATE)


def test_silero_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sensorium.pipelines.speech.vad.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="silero-vad") as caught:
        make_detector("silero", RATE)
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_config", "vad")
    with pytest.raises(ConfigError, match="16000 Hz, this model takes 8000 Hz"):
        make_detector("silero", 8000)


def test_the_detector_goes_on_from_block_to_block() -> None:
    samples = sound((30, 0.3))
    detector, frame = EnergyDetector(RATE), 512
    parts = torch.cat([detector(part) for part in samples.split(320 * frame)])
    assert len(parts) == -(-len(samples) // frame)
    assert 0.5 < float((parts > 0.5).float().mean()) < 1


def merged(left: str, right: str) -> str:
    merger = TextMerger()
    return merger.add(left) + merger.add(right, overlap=2.0) + merger.finish()


@pytest.mark.parametrize(
    ("left", "right", "whole"),
    [
        (
            "It was a dark and stormy nigh",
            "or a dark and stormy night; the rain fell",
            "It was a dark and stormy night; the rain fell",
        ),
        ("one two three", "Three, four", "one two three four"),
        ("one two three four", "three four five", "one two three four five"),
        ("no common", "words at all", "no common words at all"),
        ("今天天气很好我们去", "很好我们去公园吧", "今天天气很好我们去公园吧"),
        ("", "words", "words"),
    ],
)
def test_seams(left: str, right: str, whole: str) -> None:
    assert merged(left, right) == whole


def test_no_word_is_lost_or_doubled_wherever_the_cut_is() -> None:
    """Windows of 40 words that overlap by 8, with a wrong word at each cut, for every offset of the first window."""
    words = [f"word{number % 97}x{number % 89}" for number in range(600)]

    def windows(phase: int) -> Iterator[list[str]]:
        for start in range(-phase, len(words) - 8, 32):
            part = words[max(0, start) : start + 40]
            yield (
                (["cut"] if start > 0 else [])
                + part[1 if start > 0 else 0 : -1]
                + (["cu"] if start + 40 < len(words) else part[-1:])
            )

    for phase in range(32):
        text = ""
        for part in windows(phase):
            text = merged(text, " ".join(part)) if text else " ".join(part)
        assert text.split() == words


def test_repeated_phrases_outside_the_overlap_are_kept() -> None:
    """30 s of 75 words each overlap by 4 s; a phrase of the left window comes again in the right one."""
    phrase = "what your country can do for you ask what you can do"
    left = f"{phrase} {' '.join(f'left{i}' for i in range(48))} seen"
    right = f"seen {' '.join(f'right{i}' for i in range(40))} {phrase}"
    assert merge_overlap(left, right, 4.0) == (left, right.removeprefix("seen "), 0, 1)
    assert merge_overlap(left, right, 30.0)[0] == left


@pytest.mark.parametrize("ratio", [10.0, 5.0])
def test_speech_in_noise_is_read(ratio: float) -> None:
    """Syllables with a low spectrum, in white noise that is `ratio` decibels quieter."""
    speech = torch.nn.functional.avg_pool1d(sound((2, 0), (9, 0.3), (2, 0))[None], 15, 1, 7)[0]
    noise = torch.randn(len(speech), generator=torch.Generator().manual_seed(0))
    noise *= speech[2 * RATE : 11 * RATE].square().mean().sqrt() / 10 ** (ratio / 20)
    _, windows = read(speech + noise)
    assert min(one.start for one in windows) <= 2 * RATE
    assert max(one.end for one in windows) >= 11 * RATE - RATE // 10


def test_a_short_trimmed_utterance_is_read() -> None:
    phase = 2 * torch.pi * torch.linspace(120, 180, RATE).cumsum(0) / RATE  # a pitch that glides
    voice = torch.stack([(number * phase).sin() for number in range(1, 12)]).mean(0)
    assert seconds(read(0.3 * voice)[1]) == [(0.0, 1.0)]


@pytest.mark.shared
@pytest.mark.parametrize("ratio", [10.0, 5.0])
def test_real_speech_in_noise_is_read(shared_data: Path, ratio: float) -> None:
    speech = torch.from_numpy(soundfile.read(shared_data / "speech" / "jfk.flac", dtype="float32")[0])
    noise = torch.randn(len(speech), generator=torch.Generator().manual_seed(0))
    noise *= speech.square().mean().sqrt() / 10 ** (ratio / 20)
    _, windows = read(speech + noise)
    assert sum(one.end - one.start for one in windows) >= 0.9 * len(speech)


def test_what_a_given_detector_returns_is_checked() -> None:
    for wrong in (None, torch.zeros(1), [0.5]):
        detector = make_detector(lambda rate, wrong=wrong: lambda samples: wrong, RATE)
        with pytest.raises(InputError, match=r"the detector of vad returned .* must return a tensor of 2 finite"):
            detector(torch.zeros(1000))
    with pytest.raises(InputError, match="vad returned None; it must return a function"):
        make_detector(lambda rate: None, RATE)
    with pytest.raises(InputError, match="ZeroDivisionError: division by zero") as error:
        make_detector(lambda rate: lambda samples: 1 / 0, RATE)(torch.zeros(1000))
    assert error.value.info.param == "vad"
    with pytest.raises(InputError, match="failed for 16000 Hz: ZeroDivisionError"):
        make_detector(lambda rate: 1 / 0, RATE)
