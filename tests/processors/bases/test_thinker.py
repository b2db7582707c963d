"""Processing of the Qwen Omni thinkers: interleaved rows, options, video files, precomputed embeddings."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from sensorium.callers.errors import ConfigError
from sensorium.mm.media import gate
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.parse import MediaSource
from sensorium.mm.types import ItemGeometry, MediaHeader
from sensorium.models.families.qwen2_5_omni.processing import Qwen25OmniProcessingInfo
from sensorium.models.families.qwen3_omni.processing import Qwen3OmniProcessingInfo
from sensorium.processors.files import ProcessorFiles

TOGETHER = {"use_audio_in_video": True}
VIDEO, AUDIO, START, END = 151656, 151646, 151647, 151648


def made(kind, *options, **config):
    text = {"vocab_size": 152064, "hidden_size": 8}
    return kind(ProcessorFiles({"thinker_config": {"text_config": text, **config}}), *options)


def shown(kind, clip, rows, **config):
    """Return both spans' rows as text: v for video, a for audio, . for the start and end token."""
    sound = ItemGeometry(rows, 1, 1, linear=True)
    info = made(kind, TOGETHER, **config)
    first, second = info.spans("video", [clip, sound])
    assert first.token_ids == second.token_ids
    assert (first.max_added_tokens, second.max_added_tokens) == (len(first.token_ids), 0)
    assert (first.modality, second.modality, second.shared) == (None, "audio", True)
    assert not (first.is_embed & second.is_embed).any()
    assert (first.num_embeds, second.num_embeds) == (clip.num_embeds, rows)
    letters = {START: "<", END: ">", VIDEO: "v", AUDIO: "a"}
    return "".join(letters[token] for token in first.token_ids)


def test_rows_are_ordered_by_time():
    """Qwen2.5 takes two seconds (50 positions) at a time, Qwen3 one position; shorter audio ends before its video."""
    clip = ItemGeometry(3, 2, 4, 2, time_step=25.0)
    assert shown(Qwen25OmniProcessingInfo, clip, 60) == "<vvvv" + "a" * 50 + "vv" + "a" * 10 + ">"
    assert shown(Qwen25OmniProcessingInfo, clip, 3) == "<vvvvaaavv>"
    assert (
        shown(Qwen25OmniProcessingInfo, clip, 60, seconds_per_chunk=1)
        == "<vv" + "a" * 25 + "vv" + "a" * 25 + "vv" + "a" * 10 + ">"
    )
    clip = ItemGeometry(2, 2, 4, 2, time_step=4.0)
    assert shown(Qwen3OmniProcessingInfo, clip, 6) == "<vvaaaavvaa>"
    assert shown(Qwen3OmniProcessingInfo, clip, 2) == "<vvaavv>"


def test_options():
    for name in ("use_audio_in_video", "load_audio_from_video"):
        assert made(Qwen3OmniProcessingInfo, {name: True}).decode_spec.use_audio_in_video
    assert not made(Qwen3OmniProcessingInfo, TOGETHER, {"load_audio_from_video": False}).decode_spec.use_audio_in_video
    assert made(Qwen3OmniProcessingInfo).with_kwargs(TOGETHER).options_key("video") != made(
        Qwen3OmniProcessingInfo
    ).options_key("video")
    with pytest.raises(ConfigError, match="use_audio_in_video is 'yes'; the known ones are True and False"):
        made(Qwen3OmniProcessingInfo, {"use_audio_in_video": "yes"})


@pytest.mark.parametrize(("frames", "rows"), [(1, 1), (8, 1), (50, 7), (99, 13), (100, 13), (101, 14), (300, 39)])
def test_lengths_of_qwen3_omni(frames, rows):
    """The pairs of frames and rows are from the published code."""
    info = made(Qwen3OmniProcessingInfo)
    assert info.geometry(MediaHeader("audio", samples=160 * frames)) == ItemGeometry(rows, 1, 1, linear=True)


def filmed(seconds, sound):
    """Return an mp4 of 4 frames per second, with a tone of the same length if `sound` is set."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        video = container.add_stream("mpeg4", rate=4)
        video.width = video.height = 64
        video.pix_fmt = "yuv420p"
        track = container.add_stream("aac", rate=16_000, layout="mono") if sound else None
        for number in range(4 * seconds):
            picture = np.full((64, 64, 3), 10 * number, np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(video.encode())
        if track is not None:
            tone = 0.3 * np.sin(np.arange(16_000 * seconds, dtype=np.float32) * 0.1)
            for start in range(0, len(tone), 1024):
                frame = av.AudioFrame.from_ndarray(tone[None, start : start + 1024], format="fltp", layout="mono")
                frame.sample_rate, frame.pts = 16_000, start
                container.mux(track.encode(frame))
            container.mux(track.encode())
    return out.getvalue()


@pytest.mark.parametrize("how", ["thread", "process"])
def test_the_audio_of_a_file_is_its_track(how):
    info, policy = made(Qwen25OmniProcessingInfo, TOGETHER), MediaPolicy(decode_isolation=how)
    source = MediaSource("video", 0, filmed(2, sound=True))
    clip, sound = gate.decode(source, info.decode_spec, policy)
    assert [header.modality for header in gate.probe(source, info.decode_spec, policy)] == ["video", "audio"]
    assert clip.frames.shape == (4, 64, 64, 3)
    assert len(sound.samples) == pytest.approx(32_000, abs=2048)
    assert float(sound.samples.abs().max()) > 0.2
    cut = made(Qwen25OmniProcessingInfo, TOGETHER, {"video_start": 0.5, "video_end": 1.25}).decode_spec
    part, inside = gate.decode(source, cut, policy)
    assert part.plan.timestamps[0] == 0.5
    assert torch.equal(inside.samples, sound.samples[8_000:20_000])
    assert [header.samples for header in gate.probe(source, cut, policy)] == [0, 12_000]
    alone = made(Qwen25OmniProcessingInfo).decode_spec
    assert len(gate.decode(source, alone, policy)) == 1
    silent = MediaSource("video", 0, filmed(2, sound=False))
    assert len(gate.decode(silent, info.decode_spec, policy)) == len(gate.probe(silent, info.decode_spec, policy)) == 1


def test_audio_attached_to_frames_is_used():
    frames, policy = np.zeros((4, 64, 64, 3), np.uint8), MediaPolicy()
    sounds = [np.full(16_000, value, np.float32) for value in (0.1, 0.2)]
    sources = [MediaSource("video", 0, (frames, {"fps": 2.0, "audio": (sound, 16_000)})) for sound in sounds]
    assert gate.content_hash(sources[0], policy) != gate.content_hash(sources[1], policy)
    spec = made(Qwen25OmniProcessingInfo, TOGETHER).decode_spec
    for source, given in zip(sources, sounds, strict=True):
        _, sound = gate.decode(source, spec, policy)
        assert torch.equal(sound.samples, torch.from_numpy(given))
