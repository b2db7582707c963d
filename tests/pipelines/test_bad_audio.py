"""Audio that is empty, broken or unusual: `llm.transcribe` gives a typed error or a right answer, and the batch goes on."""

from __future__ import annotations

import asyncio
import io
import itertools
import struct
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from sensorium import LLM, AsyncLLM, Gap, Media, SamplingParams
from sensorium.mm.media import gate
from sensorium.mm.media.policy import AudioSelection
from sensorium.pipelines.speech.live_session import LiveStream
from sensorium.pipelines.speech.options import LiveOptions

RATE = 16_000
SHORT = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def llm(whisper: Path) -> LLM:
    return LLM(whisper, max_num_seqs=4)


def noise(seconds: float, rate: int = RATE, channels: int = 1) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.2, (round(seconds * rate), channels)).astype(np.float32)


def wav(samples: np.ndarray, rate: int = RATE) -> bytearray:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="PCM_16")
    return bytearray(file.getvalue())


def lying(field: bytes, offset: int, value: int) -> bytes:
    """Return 2 s of audio with another value in a chunk of the header."""
    data = wav(noise(2))
    at = data.index(field) + offset
    data[at : at + 4] = struct.pack("<I", value)
    return bytes(data)


def heard(llm: LLM, audio: object, **options: Any) -> list[Any]:
    return llm.transcribe(audio, **{"language": "en", "sampling_params": SHORT, "vad": False, "use_tqdm": False} | options)


@pytest.mark.parametrize(
    ("audio", "said"),
    [
        pytest.param(b"", "it is empty", id="empty file"),
        pytest.param(np.zeros(0, np.float32), "holds no samples", id="empty array"),
        pytest.param(bytes(wav(noise(0))), "holds no samples", id="file without samples"),
        pytest.param(np.array([0.1, np.nan] * RATE, np.float32), "NaN", id="NaN"),
        pytest.param((noise(2)[:, 0], 1), "from 1000 to 768000 Hz", id="1 Hz"),
        pytest.param(bytes(wav(noise(2), 1)), "from 1000 to 768000 Hz", id="file of 1 Hz"),
        pytest.param(lying(b"fmt ", 12, 0), "Hz|broken or cut off", id="rate 0"),
        pytest.param(bytes(wav(noise(2)))[:30], "broken or cut off", id="half a header"),
    ],
)
def test_refused(llm: LLM, audio: object, said: str) -> None:
    broken, good = heard(llm, [audio, noise(1)[:, 0]])
    assert said.split("|")[0] in broken.error.message or said.split("|")[-1] in broken.error.message
    assert (broken.text, broken.error.index) == ("", 0)
    assert good.error is None


@pytest.mark.parametrize(
    ("audio", "seconds"),
    [
        pytest.param((noise(2, channels=8).T, RATE), 2.0, id="8 channels"),
        pytest.param(bytes(wav(noise(2, channels=8))), 2.0, id="file of 8 channels"),
        pytest.param((noise(2, 192_000)[:, 0], 192_000), 2.0, id="192 kHz"),
        pytest.param(bytes(wav(noise(2, 192_000), 192_000)), 2.0, id="file of 192 kHz"),
        pytest.param(lying(b"data", 4, 0xFFFF_FFF0), 2.0, id="length of 37 hours"),
        pytest.param(lying(b"data", 4, 100), 2.0, id="length of 50 samples, but 2 s are there"),
    ],
)
def test_transcribed(llm: LLM, audio: Any, seconds: float) -> None:
    """The text is that of the same samples, mixed and resampled, in memory that does not depend on what the header says."""
    tracemalloc.start()
    (one,) = heard(llm, audio)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert one.error is None
    assert one.duration == pytest.approx(seconds, abs=0.01)
    assert peak < 64 << 20
    if isinstance(audio, tuple) and audio[1] == RATE:
        assert heard(llm, (audio[0].mean(0), RATE))[0].text == one.text


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("form", ["bytes", "path"])
def test_cut_off(llm: LLM, tmp_path: Path, form: str, isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text so far is that of the samples that the file has; the error says that the file is cut off."""
    policy = replace(llm.config.media, decode_isolation=isolation)
    monkeypatch.setattr(llm.engine, "config", replace(llm.config, media=policy))
    whole, path = bytes(wav(noise(2))), tmp_path / "cut.wav"
    data = whole[: 44 + RATE]
    path.write_bytes(data)
    cut, good = heard(llm, [data if form == "bytes" else path, whole])
    assert cut.error.message == "it is cut off (it has 16,044 of 64,044 bytes); download or export it again"
    assert (cut.error.code, cut.error.modality, cut.error.index) == ("invalid_media", "audio", 0)
    assert (cut.text, cut.duration) == (heard(llm, bytes(wav(noise(2)[: RATE // 2])))[0].text, 0.5)
    assert cut.text
    assert good.error is None


def test_without_sound(llm: LLM) -> None:
    (one,) = heard(llm, np.zeros(5 * RATE, np.float32), vad=True)
    assert (one.text, one.error, one.skipped, one.duration) == ("", None, "silence", 5.0)


def test_streams_that_stall_jump_and_never_end(llm: LLM) -> None:
    """A stream that stalls ends after `idle_timeout`; the samples that an endless one holds have a limit."""

    async def stalls() -> AsyncIterator[Any]:
        yield noise(0.8)[:, 0]
        yield Gap(3600.0)
        yield noise(0.7)[:, 0]
        await asyncio.sleep(3600)

    enough = asyncio.Event()

    async def endless() -> AsyncIterator[Any]:
        for count in itertools.count():
            if count == 60:
                enough.set()
            yield noise(0.5)[:, 0]
            await asyncio.sleep(0)

    async def main() -> None:
        options = {"language": "en", "sampling_params": SHORT, "vad": False, "max_window": 1.0}
        engine = AsyncLLM(llm)
        events = [event async for event in engine.stream_transcribe(stalls(), RATE, idle_timeout=0.5, **options)]
        assert (events[-1].kind, events[-1].reason) == ("ended", "idle")
        assert events[-1].end == pytest.approx(3601.5)
        live = LiveStream(engine, LiveOptions(max_buffer_bytes=1 << 19, **options))

        async def read() -> None:
            async for event in live.read(endless()):
                assert event.lag <= (1 << 19) / 4 / RATE

        reading = asyncio.ensure_future(read())
        await enough.wait()
        assert live.transcriber.lag <= (1 << 19) / 4 / RATE
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    asyncio.run(main())


def sides() -> np.ndarray:
    """Return stereo samples `[n, 2]` with another noise in each channel."""
    return np.concatenate([noise(2), noise(2)[::-1] * 0.5], 1)


@pytest.mark.parametrize("form", ["bytes", "path", "samples"])
def test_the_options_of_an_item_take_precedence(llm: LLM, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sides.wav"
    path.write_bytes(wav(sides()))
    data: object = {"bytes": path.read_bytes(), "path": path, "samples": (sides().T, RATE)}[form]
    chosen: list[AudioSelection] = []
    blocks = gate.audio_blocks
    monkeypatch.setattr(gate, "audio_blocks", lambda *args: chosen.append(args[3]) or blocks(*args))
    left, right, default, wrong, scaled = heard(
        llm,
        [Media(data, channel="left"), Media(data, channel=1, track=0), data, Media(data, channel=7), Media(data, fps=2.0)],
        channel="right",
    )
    assert [(one.channel, one.track) for one in chosen[:3]] == [("left", "default"), (1, 0), ("right", "default")]
    assert left.error is right.error is default.error is None
    assert right.text == default.text
    assert (wrong.error.modality, wrong.error.index, wrong.error.param) == ("audio", 3, "channel")
    assert (scaled.error.index, scaled.error.param) == (4, "fps")


@pytest.mark.parametrize(("name", "value"), [("channel", "middle"), ("channel", 1.5), ("track", ""), ("track", [1])])
def test_wrong_options_of_an_item_fail_alone(llm: LLM, name: str, value: Any) -> None:
    bad, good = heard(llm, [Media(bytes(wav(noise(1))), **{name: value}), noise(1)[:, 0]])
    assert f"{name} is " in bad.error.message
    assert (bad.error.code, bad.error.modality, bad.error.index, bad.error.param) == ("invalid_media", "audio", 0, name)
    assert good.error is None


def test_warnings_name_the_file_and_the_side(llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "phase.wav"
    data = bytes(wav(np.concatenate([noise(1) * 0.9, -noise(1)], 1)))
    path.write_bytes(data)
    heard(llm, [noise(1)[:, 0], path, data])
    texts = [record.message for record in caplog.records if "out of phase" in record.message]
    assert {text.split(": ")[0] for text in texts} == {str(path), "audio 2"}  # decoded in threads, in any order
    assert all("so channel 1 (right) is used" in text for text in texts)
