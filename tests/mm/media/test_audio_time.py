"""Times inside containers: late tracks, holes, jumps, and the choice of tracks."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from sensorium.callers.errors import InputError, MediaError
from sensorium.mm.media import gate
from sensorium.mm.media.audio import audio_blocks, decode_with_warnings, probe_audio
from sensorium.mm.media.policy import AudioSelection, DecodeSpec, MediaPolicy
from sensorium.mm.media.timeline import Timeline
from sensorium.mm.parse import MediaSource
from timed_audio import RATE, Track, timed, tone

POLICY = MediaPolicy()


def late(seconds: float, at: float) -> float:
    return at + seconds


def with_hole(seconds: float, after: float, at: float) -> float:
    return at + seconds if at > after else at


def sounds(samples: np.ndarray, rate: int = RATE) -> tuple[float, float, float]:
    """Return when the sound begins and ends, and its longest silence, in seconds."""
    loud = np.nonzero(np.abs(samples) > 0.05)[0]
    return loud[0] / rate, loud[-1] / rate, np.diff(loud).max() / rate


def decoded(data: bytes, **sound: int | str) -> np.ndarray:
    return decode_with_warnings(data, RATE, POLICY, None, AudioSelection(**sound)).samples.numpy()


@pytest.mark.parametrize(
    ("form", "codec"),
    [("matroska", "libopus"), ("mp4", "aac"), ("mov", "pcm_s16le"), ("mpegts", "aac")],
)
def test_a_late_track_begins_with_silence(form: str, codec: str) -> None:
    track = Track(tone(440, 1.0), codec, shift=partial(late, 4.087))
    data = timed(form, track, video=6.0)
    first, last, _ = sounds(decoded(data))
    assert first == pytest.approx(4.087, abs=0.03)  # the encoder's delay is part of what is late
    assert last == pytest.approx(5.087, abs=0.05)
    header = probe_audio(data, RATE, POLICY)
    assert not header.exact
    assert header.samples == pytest.approx(len(decoded(data)), abs=RATE // 10)


def test_a_file_without_video_begins_at_the_zero_of_its_container() -> None:
    """Times of Matroska and MP4 count from a zero in the file; those of MPEG-TS begin anywhere."""
    track = Track(tone(440, 1.0), "libopus", shift=partial(late, 4.087))
    assert sounds(decoded(timed("matroska", track)))[0] == pytest.approx(4.087, abs=0.02)
    assert sounds(decoded(timed("mpegts", Track(tone(440, 1.0), "aac", shift=partial(late, 4.087)))))[0] < 0.05


def test_a_piece_of_a_stream_begins_at_once() -> None:
    data = timed("matroska", Track(tone(440, 1.0), shift=partial(late, 5000.0)))
    audio = decode_with_warnings(data, RATE, POLICY)
    assert sounds(audio.samples.numpy())[0] < 0.02
    assert "begin at 5,000.0 s" in audio.warnings[0]


@pytest.mark.parametrize(("form", "codec"), [("matroska", "libopus"), ("mp4", "aac"), ("ogg", "libopus"), ("mpegts", "aac")])
def test_holes_are_silence(form: str, codec: str) -> None:
    data = timed(form, Track(tone(440, 6.0), codec, shift=partial(with_hole, 20.0, 3.5)))
    samples = decoded(data)
    first, last, longest = sounds(samples)
    assert first < 0.03
    assert longest == pytest.approx(20.0, abs=0.05)
    assert last == pytest.approx(26.0, abs=0.06)
    blocks = list(audio_blocks(data, RATE, POLICY))
    assert sum(map(len, blocks)) == len(samples)


def test_lost_packets_are_silence() -> None:
    """Discontinuous transmission leaves out the packets of silence."""
    track = Track(tone(440, 3.0), shift=lambda at: None if 1.0 < at < 1.5 else at)
    first, last, longest = sounds(decoded(timed("webm", track)))
    assert first < 0.02
    assert longest == pytest.approx(0.5, abs=0.03)
    assert last == pytest.approx(3.0, abs=0.02)


def test_times_that_lie_are_refused_with_the_limit() -> None:
    data = timed("matroska", Track(tone(440, 2.0), shift=partial(with_hole, 7200.0, 1.0)))
    for call in (partial(decode_with_warnings, data, RATE), partial(probe_audio, data, RATE)):
        with pytest.raises(InputError) as error:
            call(POLICY)
        assert (error.value.info.code, error.value.info.limit) == ("over_limit", 3600.0)
        assert error.value.info.param == "max_audio_gap"
    with pytest.raises(InputError, match="at most 60 s are filled"):
        list(audio_blocks(data, RATE, MediaPolicy(max_audio_gap=60.0)))
    with pytest.raises(InputError, match="the limit max_audio_seconds is 7000 s"):
        probe_audio(data, RATE, MediaPolicy(max_audio_gap=1e5, max_audio_seconds=7000.0))


def test_a_timeline_goes_on_where_times_begin_again() -> None:
    timeline = Timeline(0.0, True, POLICY)
    gaps = []
    for time in (1.0, 2.05, 3.0, 0.0, 1.0, 90_000.0, 90_001.0):
        gaps.append(timeline.gap(time))
        timeline.add(1.0)
    assert gaps == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert timeline.restarts == 2
    assert timeline.silence_seconds == 1.0


def test_the_default_track_is_the_one_that_is_marked() -> None:
    data = timed(
        "matroska",
        Track(tone(300, 2.0), language="eng"),
        Track(tone(600, 2.0), language="ger"),
        Track(tone(900, 2.0), language="fre", is_default=True),
    )

    def pitch(track: int | str) -> int:
        return int(np.abs(np.fft.rfft(decoded(data, track=track)[RATE // 2 : RATE * 3 // 2])).argmax())

    assert pitch("default") == 900
    assert [pitch(number) for number in range(3)] == [300, 600, 900]
    assert [pitch(language) for language in ("de", "deu", "German", "en-US", "fr")] == [600, 600, 600, 300, 900]
    for track, text in ((3, "track is 3"), ("ja", "track is 'ja'")):
        with pytest.raises(InputError, match=f"{text}, but its audio tracks") as error:
            pitch(track)
        assert error.value.info.param == "track"


def test_a_silent_track_is_reported_if_another_has_sound() -> None:
    silence = Track(np.zeros(2 * RATE, np.float32), language="eng", is_default=True)
    data = timed("matroska", silence, Track(tone(600, 2.0), language="ger"))
    (text,) = decode_with_warnings(data, RATE, POLICY).warnings
    assert text == "its audio track 0 is silent, but track 1 of 0 (eng, default), 1 (ger) is not; track= chooses one"
    texts = list[str]()
    list(gate.audio_blocks(MediaSource("audio", 0, data), RATE, POLICY, warn=texts.append))
    assert texts == [text]
    assert not decode_with_warnings(timed("matroska", silence, silence), RATE, POLICY).warnings


def test_tracks_are_chosen_in_a_worker_process() -> None:
    policy, sound = MediaPolicy(decode_isolation="process"), AudioSelection("German", "left")
    silence = Track(np.zeros(RATE, np.float32), language="eng", is_default=True)
    source = MediaSource("audio", 0, timed("matroska", silence, Track(tone(600, 1.0), language="ger")))
    (audio,) = gate.decode(source, DecodeSpec(rate=RATE, sound=sound), policy)
    assert sounds(audio.samples.numpy())[0] < 0.02
    texts = list[str]()
    list(gate.audio_blocks(source, RATE, policy, warn=texts.append))
    assert "is silent, but track 1" in texts[0]


@pytest.mark.parametrize(
    ("value", "name"), [(-1, "track"), (1.5, "track"), (None, "track"), ("up", "channel"), (True, "channel")]
)
def test_wrong_selections_are_refused(value: object, name: str) -> None:
    with pytest.raises(InputError, match=name) as error:
        AudioSelection(**{name: value})
    assert error.value.info.param == name


def test_the_audio_of_a_video_is_aligned_with_its_frames() -> None:
    data = timed("matroska", Track(tone(440, 2.0), shift=partial(late, 1.5)), video=4.0)
    spec = DecodeSpec(rate=16_000, use_audio_in_video=True)
    _, audio = gate.decode(MediaSource("video", 0, data), spec, POLICY)
    assert sounds(audio.samples.numpy(), 16_000)[0] == pytest.approx(1.5, abs=0.02)


def test_audios_and_videos_have_selections_of_their_own() -> None:
    spec = DecodeSpec(rate=16_000, use_audio_in_video=True, sound=AudioSelection(5), video_sound=AudioSelection(0))
    data = timed("matroska", Track(tone(440, 2.0)), video=2.0)
    assert len(gate.decode(MediaSource("video", 0, data), spec, POLICY)) == 2
    with pytest.raises(MediaError, match="track is 5"):
        gate.decode(MediaSource("audio", 0, data), spec, POLICY)
