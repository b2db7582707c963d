"""Limits of media loading and decoding."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from weakref import WeakValueDictionary

from ...callers.errors import ConfigError, InputError, short_repr, typed
from ..geometry import FrameSampling

VIDEO_BACKENDS = ("pyav", "opencv")
CHANNELS = ("left", "right", "mix")


@dataclass(frozen=True)
class MediaUrl:
    """A URL or path inside a message: untrusted, unlike a path that the caller's own code passes."""

    url: str


@dataclass(frozen=True)
class FrameFiles:
    """A video in a message as one file per frame, `fps` frames per second: a MediaUrl each, or a Path of the caller's code."""

    files: tuple[object, ...]
    fps: float


class PagesClock:
    """CPU seconds that decoding the pages of one file has taken. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds


@dataclass(frozen=True, eq=False)
class PdfFile:
    """A PDF that its pages share.

    Args:
        sizes: width and height of each page in points, None for a broken page; () if unknown.
        source: path or URL of the file; "" for bytes.
        clock: what its pages have taken so far.
    """

    data: bytes = field(repr=False)
    sizes: tuple[tuple[float, float] | None, ...] = ()
    source: str = ""
    clock: PagesClock = field(default_factory=PagesClock, repr=False)

    @cached_property
    def digest(self) -> str:
        """Hash of the file."""
        return hashlib.sha256(self.data).hexdigest()


class PdfFiles:
    """Local PDFs whose pages are used one after the other: each file is read once for them.

    It holds the file that was read last, so that memory is bounded however many PDFs there are; pages in use hold theirs.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files = WeakValueDictionary[Hashable, PdfFile]()
        self._clocks = dict[Hashable, PagesClock]()
        self._last: PdfFile | None = None

    def once(self, key: Hashable, read: Callable[[], bytes]) -> PdfFile:
        """Return the file with this key, whose bytes are `read()`."""
        with self._lock:
            file = self._files.get(key)
            if file is None:
                file = PdfFile(read(), clock=self._clocks.setdefault(key, PagesClock()))
            self._last = self._files[key] = file
            return file


@dataclass(frozen=True, repr=False)
class PdfPage:
    """A page of a PDF, a TIFF or an animation as an image item. `number` counts from 1.

    `file`: path, open file, encoded bytes or http(s) URL. `opened`: set by `pdf_pages`, and when a page with `files` is read.
    `files`: set by `ocr`, where local files are read for all their pages.

    Raises:
        InputError: `file` or `number` has another type, or the number is out of range.
    """

    file: object
    number: int
    opened: PdfFile | None = field(default=None, init=False, repr=False, compare=False)
    files: PdfFiles | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.number) is not int or not 1 <= self.number < 1 << 31:
            raise InputError(f"number is {short_repr(self.number)}; give the number of a page, 1 or more", param="number")
        files = (str, os.PathLike, bytes, bytearray, memoryview, MediaUrl)
        if not isinstance(self.file, files) and not hasattr(self.file, "read"):
            raise InputError(
                f"file must be a path, an open file, bytes or a URL, not {typed(self.file)}", code="invalid_value", param="file"
            )

    @property
    def source(self) -> str:
        """Path or URL of the PDF; "" if it was given as bytes."""
        return source_of(self.file) or (self.opened.source if self.opened is not None else "")

    def __repr__(self) -> str:
        size = f"<{memoryview(self.file).nbytes:,} bytes>" if isinstance(self.file, bytes | bytearray | memoryview) else ""
        return f"PdfPage({short_repr(self.source) if self.source else size or short_repr(self.file)}, {self.number})"


def source_of(file: object) -> str:
    """Return the path or URL of a file that is given as such or is open; "" for bytes and data: URLs."""
    path = file.url if isinstance(file, MediaUrl) else getattr(file, "name", "") if hasattr(file, "read") else file
    path = os.fspath(path) if isinstance(path, os.PathLike) else path
    return path if isinstance(path, str) and path[:5].lower() != "data:" else ""


def page_of(file: PdfFile, number: int) -> PdfPage:
    """Return a page of a PDF whose bytes are known."""
    page = PdfPage(file.data, number)
    object.__setattr__(page, "opened", file)
    return page


def _is_number_or_text(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


@dataclass(frozen=True)
class AudioSelection:
    """Which sound of a file is used.

    Args:
        track: number of an audio track from 0, its language ("en", "eng" or "English"), or "default": the one that the
            container marks as the default, else the first.
        channel: number of a channel from 0, "left", "right", or "mix": the mean of all, or one of them where they cancel each
            other out.

    Raises:
        InputError: a value has another type or is out of range.
    """

    track: int | str = "default"
    channel: int | str = "mix"

    def __post_init__(self) -> None:
        for name in ("track", "channel"):
            value = getattr(self, name)
            if isinstance(value, str) and value.isdecimal():  # of a form or a command line
                object.__setattr__(self, name, int(value[:9]))
        if not _is_number_or_text(self.track) or self.track == "":
            advice = 'give the number of an audio track from 0, its language, or "default"'
            raise InputError(f"track is {short_repr(self.track)}; {advice}", param="track")
        if not _is_number_or_text(self.channel) or (isinstance(self.channel, str) and self.channel not in CHANNELS):
            advice = 'give the number of a channel from 0, "left", "right" or "mix"'
            raise InputError(f"channel is {short_repr(self.channel)}; {advice}", param="channel")


WHOLE_SOUND = AudioSelection()


@dataclass(frozen=True)
class DecodeSpec:
    """Decoding parameters of a family.

    Args:
        sampling: which frames of a video are used.
        rate: sample rate of audio in hertz.
        frames_per_chunk: frames of one vision chunk, for families that take videos in chunks.
        use_audio_in_video: the audio track of a video, if it has one, becomes a second item after the video.
        max_audio_samples: largest number of samples that the family takes; None: only the policy limits it. If a header does
            not give the length, decoding stops there.
        sound: which track and channel of an audio are used.
        video_sound: the same of the audio in a video.
    """

    sampling: FrameSampling = field(default_factory=FrameSampling)
    rate: int = 16000
    frames_per_chunk: int = 4
    use_audio_in_video: bool = False
    max_audio_samples: int | None = None
    sound: AudioSelection = AudioSelection()
    video_sound: AudioSelection = AudioSelection()


@dataclass(frozen=True)
class MediaPolicy:
    """Limits of media, the same for every caller.

    Args:
        allowed_local_media_path: folder that `file:` URLs and paths inside messages must be in, after following links;
            None refuses them. Paths that Python code or the command line passes are not restricted.
        allowed_media_domains: host names that http(s) may fetch from (subdomains are not included); None: any.
        allowed_media_ports: ports that http(s) may fetch from; None: any.
        allow_private_hosts: also fetch from private, loopback and link-local addresses.
        max_bytes: size of one encoded item, fetched, read or in a data: URL.
        timeout: seconds of each connect and each read of a fetch.
        max_seconds: seconds of a whole fetch.
        max_request_bytes: encoded bytes of all media of one request; equal URLs, files and texts count once.
        max_request_seconds: seconds of all fetches of one request together.
        max_total_bytes: bytes of media, encoded, decoded and as tensors, of all requests until they are processed. A download
            waits while its request, or all requests of its `cache_salt`, would hold more bytes than remain free.
        max_redirects: redirects per fetch; each target is checked.
        max_pixels: pixels of one image or frame, checked on the header.
        max_aspect_ratio: its longer side over the shorter one. None: only the model's own rule applies, such as 200 for
            Qwen2-VL; a resized image has at most `mm.tiling.plan.MAX_RESIZED_PIXELS` in any case.
        max_jpeg_scans: scans of one JPEG; encoders write about 10.
        max_image_pieces: strips or tiles of one TIFF, segments of a JPEG, chunks of a PNG.
        max_video_bytes: bytes of the decoded frames of one video.
        max_audio_gap: seconds of one hole in the times of an audio track, which becomes silence.
        max_audio_seconds: length of one audio. max_transcribed_seconds: the same for `transcribe`, which reads it in windows.
        min_audio_rate, max_audio_rate: its sample rate in hertz. A low rate grows by resampling: 1 Hz becomes 16,000.
        max_decoded_bytes: bytes that decoding one image or one audio holds at its peak, computed from the header.
        pdf_dpi: resolution at which pages of PDFs are rendered.
        max_pdf_pages: pages of one PDF, TIFF or animation, and of all of these in the messages of one request together.
        max_pages_seconds: seconds of CPU time that decoding the pages of one PDF, TIFF or animation may take together.
        background: RGB that transparent pixels are blended with.
        video_backend: "pyav" or "opencv".
        frame_recovery: replace a broken frame by the next readable one that comes before the next sampled frame.
        decode_isolation: "thread" decodes in the engine's process, "process" in a worker process with the limits below,
            which is restarted when it dies.
        worker_memory_bytes: address space of that worker.
        worker_seconds: seconds that decoding one item may take there, and seconds of CPU time in a thread.
        worker_sandbox: "require" refuses to decode, compile a grammar or render a template in a worker whose system calls
            the kernel cannot filter, "auto" warns once.

    Raises:
        ConfigError: a value is out of range.
    """

    allowed_local_media_path: str | None = None
    allowed_media_domains: tuple[str, ...] | None = None
    allowed_media_ports: tuple[int, ...] | None = (80, 443)
    allow_private_hosts: bool = False
    max_bytes: int = 512 << 20
    timeout: float = 10.0
    max_seconds: float = 120.0
    max_request_bytes: int = 1 << 30
    max_request_seconds: float = 300.0
    max_total_bytes: int = 4 << 30
    max_redirects: int = 5
    max_pixels: int = 178_956_970  # Pillow's own limit: half a GiB of 24-bit pixels
    max_aspect_ratio: float | None = None
    max_jpeg_scans: int = 64
    max_image_pieces: int = 1 << 16
    max_video_bytes: int = 4 << 30
    max_audio_gap: float = 3600.0
    max_audio_seconds: float = 4 * 3600.0
    max_transcribed_seconds: float = 24 * 3600.0
    min_audio_rate: float = 1000.0  # telephones use 8,000
    max_audio_rate: float = 768_000.0  # the highest of audio interfaces
    max_decoded_bytes: int = 1 << 30
    pdf_dpi: float = 144.0
    max_pdf_pages: int = 512
    max_pages_seconds: float = 600.0
    background: tuple[int, int, int] = (255, 255, 255)
    video_backend: str = "pyav"
    frame_recovery: bool = False
    decode_isolation: str = "thread"
    worker_memory_bytes: int = 4 << 30
    worker_seconds: float = 60.0
    worker_sandbox: str = "auto"

    def __post_init__(self) -> None:
        _one_of("video_backend", self.video_backend, VIDEO_BACKENDS)
        _one_of("decode_isolation", self.decode_isolation, ("thread", "process"))
        _one_of("worker_sandbox", self.worker_sandbox, ("auto", "require"))
        limits = ("max_bytes", "timeout", "max_seconds", "max_pixels", "max_video_bytes", "max_audio_seconds", "max_audio_gap")
        requests = ("max_request_bytes", "max_request_seconds", "max_total_bytes", "max_decoded_bytes")
        items = ("max_transcribed_seconds", "min_audio_rate", "max_audio_rate", "max_jpeg_scans", "max_image_pieces")
        pages = ("pdf_dpi", "max_pdf_pages", "max_pages_seconds")
        for name in (*limits, *requests, *items, *pages, "worker_memory_bytes", "worker_seconds"):
            _positive(name, getattr(self, name))
        if self.max_aspect_ratio is not None:
            _positive("max_aspect_ratio", self.max_aspect_ratio)
        if isinstance(self.max_redirects, bool) or not isinstance(self.max_redirects, int) or self.max_redirects < 0:
            raise ConfigError(f"max_redirects is {self.max_redirects!r}; give a whole number, 0 or more", param="max_redirects")
        if len(self.background) != 3 or not all(isinstance(c, int) and 0 <= c <= 255 for c in self.background):
            raise ConfigError(f"background is {self.background}; give three whole numbers from 0 to 255", param="background")
        if self.allowed_local_media_path == "":  # would mean the current folder of the process
            raise ConfigError(
                'allowed_local_media_path is empty; give a folder, "." for the current one, or None',
                param="allowed_local_media_path",
            )
        if isinstance(self.allowed_media_domains, str):
            raise ConfigError(
                "allowed_media_domains must be a list of host names, not one string", param="allowed_media_domains"
            )
        ports = self.allowed_media_ports
        if ports is not None and not (
            isinstance(ports, tuple | list) and all(type(port) is int and 0 < port < 65536 for port in ports)
        ):
            raise ConfigError(
                f"allowed_media_ports is {short_repr(ports)}; give whole numbers from 1 to 65535, or None for any port",
                param="allowed_media_ports",
            )
        for name in self.allowed_media_domains or ():
            _host(name)


def check_size(height: int, width: int, policy: MediaPolicy) -> None:
    """Raise InputError if an image or frame of this size is empty or over the limits of the policy."""
    if height < 1 or width < 1:
        raise InputError("it has no pixels; it is empty, broken or cut off")
    if height * width > policy.max_pixels:
        text = f"{width}x{height} is over the limit of {policy.max_pixels:,} pixels (media: max_pixels); scale it down"
        raise InputError(text, code="over_limit", param="max_pixels", limit=policy.max_pixels, value=height * width)
    if policy.max_aspect_ratio is not None and max(height, width) > policy.max_aspect_ratio * min(height, width):
        ratio = f"differ by more than {policy.max_aspect_ratio:g}:1 (media: max_aspect_ratio)"
        raise InputError(
            f"its sides {width}x{height} {ratio}; crop it first",
            code="over_limit",
            param="max_aspect_ratio",
            limit=policy.max_aspect_ratio,
        )


class DecodeClock:
    """CPU time of this thread since it began to decode an item."""

    def __init__(self, policy: MediaPolicy) -> None:
        self._seconds, self._end = policy.worker_seconds, time.thread_time() + policy.worker_seconds

    def check(self) -> None:
        """Raise InputError if decoding has taken longer than the policy allows."""
        if time.thread_time() > self._end:
            raise slow_error(self._seconds)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time inside the context, which is the caller's."""
        began = time.thread_time()
        yield
        self._end += time.thread_time() - began


def slow_error(seconds: float) -> InputError:
    """Return the error of an item that takes too long."""
    text = f"decoding it took longer than {seconds:g} s; give a shorter or smaller one, or raise worker_seconds"
    return InputError(text, param="worker_seconds")


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{name} is {value!r}; give a positive number", param=name)


def _host(name: object) -> None:
    try:
        plain = isinstance(name, str) and name.rstrip(".").encode("idna")
    except UnicodeError:
        plain = b""
    if not plain:
        raise ConfigError(
            f"allowed_media_domains holds {str(name)[:80]!r}; give whole host names, such as example.org",
            param="allowed_media_domains",
        )


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; the known ones are {', '.join(choices)}", param=name)


DEFAULT_POLICY = MediaPolicy()
