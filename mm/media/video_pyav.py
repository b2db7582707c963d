"""Encoded videos with PyAV: index of the packets, and decoding of requested frames."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...callers.errors import InputError
from .container import check_codec, open_container
from .formats import wrong_format_error
from .orientation import has_swapped_sides, upright
from .policy import DecodeClock, MediaPolicy, check_size
from .video_orientation import orientation_of_track

if TYPE_CHECKING:
    from av import Packet
    from av.container import InputContainer
    from av.video.codeccontext import VideoCodecContext
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

DEFAULT_FPS = 24.0  # frame rate if a video has none

# Playlists, concatenations and image sequences are excluded: they make FFmpeg open other files.
FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,m4v,flv,asf,ogg,gif,apng,h264,hevc,obu,ivf,mjpeg,"
    "dv,mxf,nut,rm,yuv4mpegpipe,wtv,vc1,roq"
)

_MAX_PACKETS = 1 << 20  # nearly ten hours at 30 per second

# Decoders that reliably know which frames no other frame refers to: such frames are skipped unless they are requested.
_NONREF_DECODERS = ("h264", "mpeg4", "mpeg1video", "mpeg2video")


@dataclass(frozen=True)
class VideoIndex:
    """Index of a video, read from its packets without decoding.

    A frame's number counts decodable frames in presentation order. Packets before the first keyframe, and those that an edit
    list removes, have no number.

    Args:
        height, width: of the frames, upright.
        orientation: EXIF orientation of the decoded frames.
        times: seconds of every frame from the first one, by number.
        fps: average frames per second.
        packets: `(number or -1, is keyframe)` of every packet, in decoding order.
        numbers: presentation timestamp -> number; None if packets have no usable timestamps, as in raw streams. Frames are
            then numbered in decoder output order.
        first_frame_delay: seconds from the start of the stream to the first frame.
        exact: False if the count is an upper bound.
        stated: frames according to the container's header, 0 if it says nothing or an AVI file is complete. A file that is
            cut off has fewer packets.
    """

    height: int
    width: int
    orientation: int
    times: tuple[float, ...]
    fps: float
    packets: tuple[tuple[int, bool], ...]
    numbers: dict[int | None, int] | None
    first_frame_delay: float
    exact: bool
    stated: int

    @property
    def total(self) -> int:
        return len(self.times)


class _Packet(NamedTuple):
    pts: int | None
    dts: int | None
    key: bool
    dropped: bool


def index_video(data: bytes, policy: MediaPolicy) -> VideoIndex:
    """Index an encoded video. The sample aspect ratio is ignored.

    Raises:
        InputError: the container is unknown, has no video, the size of its frames is refused by the policy, it has too many
            packets, or reading them takes too long.
    """
    with _opened(data, policy) as (container, stream):
        orientation = orientation_of_track(data, container.format.name, stream.id, container.streams.video.index(stream))
        height, width = stream.codec_context.height, stream.codec_context.width
        check_size(height, width, policy)
        vp8 = stream.codec_context.codec.canonical_name == "vp8"
        packets = [
            _Packet(p.pts, p.dts, p.is_keyframe, p.is_discard or (vp8 and _is_hidden(p)))
            for p in _packets(container, stream, DecodeClock(policy))
        ]
        # AVI has no presentation timestamps: FFmpeg makes them up from the decoding order
        avi = container.format.name == "avi"
        stamps = {} if avi and stream.codec_context.has_b_frames else _stamps(packets)
        # the average rate of a raw stream is made up, too; its header may have the real one
        rate = stream.average_rate if avi or any(p.pts is not None for p in packets) else stream.guessed_rate
        unit, start = float(stream.time_base or 0), None if avi else stream.start_time
        stated = stream.frames
        if avi and packets and (packets[-1].dts or 0) + 1 >= stated:
            stated = 0  # AVI counts gaps as frames; its decoding times are numbers of frames
    if has_swapped_sides(orientation):
        height, width = width, height
    fps = float(rate) if rate and rate > 0 else DEFAULT_FPS
    if not stamps or unit <= 0:
        times = tuple(i / fps for i in range(len(packets)))
        plain = tuple((i, packet.key) for i, packet in enumerate(packets))
        return VideoIndex(height, width, orientation, times, fps, plain, None, 0.0, False, stated)
    order = sorted(set(stamps.values()))
    numbers: dict[int | None, int] = {pts: number for number, pts in enumerate(order)}
    times = tuple((pts - order[0]) * unit for pts in order)
    if not rate and times[-1] > 0:
        fps = (len(times) - 1) / times[-1]
    marked = tuple((numbers[stamps[i]] if i in stamps else -1, packet.key) for i, packet in enumerate(packets))
    delay = 0.0 if start is None else (order[0] - start) * unit
    exact = any(p.key for p in packets) and len(order) == len(stamps) and all(p.pts is not None for p in packets)
    return VideoIndex(height, width, orientation, times, fps, marked, numbers, delay, exact, stated)


def _is_hidden(packet: Packet[VideoStream]) -> bool:
    """Return whether a VP8 frame is only a reference and not shown (RFC 6386, 9.1)."""
    return not memoryview(packet)[0] & 0x10


def read_frames(
    data: bytes, index: VideoIndex, wanted: Container[int], clock: DecodeClock
) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Yield the requested frames that can be decoded, in decoding order: number, and upright RGB uint8 `[height, width, 3]`.

    Only packets that these frames need are decoded; other packets are skipped up to a keyframe. If that does not give all
    frames, the video is decoded again from its start for the rest. Broken packets are left out. A frame's size may differ
    from the header's. `wanted` may shrink during the iteration.
    """
    through = [range(len(index.packets))]
    parts = through if index.numbers is None else decode_ranges(index.packets, wanted)
    yield from _read(data, index, wanted, parts, clock)
    if any(part.start for part in parts) and any(number in wanted for number, _ in index.packets):
        yield from _read(data, index, wanted, through, clock)


def _read(
    data: bytes, index: VideoIndex, wanted: Container[int], parts: Sequence[range], clock: DecodeClock
) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    from av.video.reformatter import VideoReformatter

    reformatter = VideoReformatter()
    for number, frame in _decoded(data, index, wanted, parts, clock):
        if number in wanted:
            pixels = reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
            yield number, upright(pixels, index.orientation)


def decode_ranges(packets: Sequence[tuple[int, bool]], wanted: Container[int]) -> list[range]:
    """Return positions of the packets that must be decoded for the requested frames, as ranges that start at keyframes.

    A frame stored after a keyframe but shown before it may refer to frames before that keyframe, so its range starts at the
    keyframe before. The first range starts at packet 0, because packets before the first keyframe may set up the decoder.
    """
    result: list[range] = []
    before = key = 0
    shown: int | None = None
    for position, (number, is_key) in enumerate(packets):
        if is_key:
            before, key, shown = key, 0 if shown is None else position, number
        if number < 0 or number not in wanted:
            continue
        start = before if shown is not None and number < shown else key
        if result and start <= result[-1].stop:
            result[-1] = range(result[-1].start, position + 1)
        else:
            result.append(range(start, position + 1))
    return result


def _decoded(
    data: bytes, index: VideoIndex, wanted: Container[int], parts: Sequence[range], clock: DecodeClock
) -> Iterator[tuple[int, VideoFrame]]:
    todo = list(parts)
    with _opened(data) as (container, stream):
        decoder = stream.codec_context
        decoder.thread_count = 1
        # a wrong size in the header must not make the decoder allocate much more than was admitted;
        # small frames need a minimum: H.263 and MPEG-4 refuse fewer than 89,600 pixels
        decoder.options = {"max_pixels": str(max(1 << 17, 4 * (index.height + 64) * (index.width + 64)))}
        lean = index.numbers is not None and decoder.name in _NONREF_DECODERS
        count = 0
        for position, packet in enumerate(_packets(container, stream, clock)):
            while todo and position >= todo[0].stop:
                todo.pop(0)
            if not todo:
                return
            if position < todo[0].start:
                continue
            if lean:
                number = index.packets[position][0]  # -1: may be the second field of a requested frame
                decoder.skip_frame = "DEFAULT" if number < 0 or number in wanted else "NONREF"
            frames = _decode(decoder, packet)
            if position == todo[0].stop - 1:
                frames += _decode(decoder, None)
                decoder.flush_buffers()
            for frame in frames:
                number = count if index.numbers is None else index.numbers.get(frame.pts, -1)
                count += 1
                yield number, frame


def _decode(decoder: VideoCodecContext, packet: Packet[VideoStream] | None) -> list[VideoFrame]:
    from av.error import FFmpegError

    try:
        return decoder.decode(packet)
    except FFmpegError:  # a broken packet; the next one may be good
        return []


def _stamps(packets: Sequence[_Packet]) -> dict[int, int]:
    """Return position -> presentation timestamp of the packets that give a frame; empty if the timestamps are unusable.

    They are unusable if most packets have none or share one, or if time goes back, as in concatenated files.
    """
    if any(a.dts > b.dts for a, b in pairwise(packets) if a.dts is not None and b.dts is not None):
        return {}
    first = next((i for i, packet in enumerate(packets) if packet.key), 0)
    start = packets[first].pts if packets else None
    stamps = {
        i: packet.pts
        for i, packet in enumerate(packets)
        if i >= first and not packet.dropped and packet.pts is not None and (start is None or packet.pts >= start)
    }
    # two fields of a frame may be two packets, one without a timestamp; more packets without one mean a broken container
    usable = 2 * len(stamps) >= sum(not packet.dropped for packet in packets[first:])
    return stamps if usable and 10 * len(set(stamps.values())) >= 9 * len(stamps) else {}


@contextmanager
def _opened(data: bytes, policy: MediaPolicy | None = None) -> Iterator[tuple[InputContainer, VideoStream]]:
    import av

    # the first bytes of a raw stream of JPEGs are those of an image
    kind = "mjpeg" if data.startswith(b"\xff\xd8") and b"\xff\xd9\xff\xd8" in data else None
    with open_container(data, FORMATS, wrong_format_error(data, "video"), policy, kind) as container:
        streams = [s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic]
        if not streams:
            raise InputError("it holds no video")
        if streams[0].codec_context is None:
            raise InputError("its codec is not supported; convert it to H.264", code="unsupported")
        check_codec(streams[0].codec_context.name)
        yield container, streams[0]


def _packets(container: InputContainer, stream: VideoStream, clock: DecodeClock) -> Iterator[Packet[VideoStream]]:
    """Yield packets with content up to the end or to where the file is truncated. InputError if they are too many or slow."""
    from av.error import FFmpegError

    try:
        for count, packet in enumerate(container.demux(stream)):
            if count > _MAX_PACKETS:
                raise InputError(
                    f"it has more than {_MAX_PACKETS:,} video packets; cut it into shorter videos",
                    code="over_limit",
                    limit=_MAX_PACKETS,
                )
            clock.check()
            if packet.size:
                yield packet
    except FFmpegError:
        return
