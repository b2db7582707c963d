"""Containers whose header never ends."""

from __future__ import annotations

import time

import pytest
from clips import clip
from sensorium.callers.errors import InputError
from sensorium.mm.geometry import FrameSampling
from sensorium.mm.media import container
from sensorium.mm.media.audio import probe_audio
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.media.video import probe_video

BOXES = b"\0\0\0\x18ftypisom\0\0\0\0isommp42" + b"\0\0\0\x08free" * 10_000


def test_a_header_that_takes_too_long_is_refused(monkeypatch, capfd):
    monkeypatch.setattr(container, "HEADER_SECONDS", 0.0)
    with pytest.raises(InputError, match="reading its header takes longer than 0 s"):
        probe_video(BOXES, FrameSampling(), MediaPolicy())
    with pytest.raises(InputError, match="reading its header takes longer than 0 s"):
        probe_audio(BOXES, 16000.0, MediaPolicy())
    assert capfd.readouterr().err == ""


def test_time_of_other_processes_does_not_count(monkeypatch):
    class Late(container._Timed):
        def read(self, size=-1, /):
            if self.tell() == 0:
                time.sleep(0.6)
            return super().read(size)

    monkeypatch.setattr(container, "HEADER_SECONDS", 0.5)
    monkeypatch.setattr(container, "_Timed", Late)
    assert probe_video(clip("h264-mp4"), FrameSampling(), MediaPolicy()).size


def test_other_unreadable_headers_give_the_error_of_the_caller():
    with pytest.raises(InputError, match="it begins as a video, but is broken or cut off"):
        probe_video(BOXES, FrameSampling(), MediaPolicy())
