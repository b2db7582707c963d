"""What may come in and how it is decoded: the limits of the media gate. Knows no family, no codec and no network."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import ConfigError
from ..geometry import SamplingPolicy

VIDEO_BACKENDS = ("pyav", "opencv")


@dataclass(frozen=True)
class MediaUrl:
    """A URL or path that stands inside a message: untrusted, unlike a path that the caller's own Python hands over."""

    url: str


@dataclass(frozen=True)
class DecodeSpec:
    """What a family wants of a decoded item: which frames of a clip, and the rate of sound in hertz.

    `frames_per_chunk`: frames of one timed piece where a video is fed in pieces (vision chunks). `sound`: that of a clip is
    an item of its own, which comes after it; a clip without any is one item. `longest_sound`: samples that the family takes
    at most; of a sound whose header does not tell its length, no more are decoded. None: as the policy allows.
    """

    sampling: SamplingPolicy = field(default_factory=SamplingPolicy)
    rate: int = 16000
    frames_per_chunk: int = 4
    sound: bool = False
    longest_sound: int | None = None


@dataclass(frozen=True)
class MediaPolicy:
    """Limits of the gate, the same for every caller.

    Args:
        allowed_local_media_path: folder that `file:` URLs and paths inside messages must stay in, links followed;
            None refuses them. A path that Python code or the command line hands over is not bound by it.
        allowed_media_domains: host names http(s) may be fetched from (their subdomains are not included); None: any.
        allow_private_hosts: also fetch from private, loopback and link-local addresses.
        max_bytes: of one encoded item, fetched, read or in a data: URL.
        timeout: seconds for each connect and each read of a fetch.
        max_seconds: for a whole fetch.
        max_redirects: followed per fetch, each checked anew.
        max_pixels: of one picture or frame, checked on the header.
        max_video_bytes: decoded frames of one clip.
        max_audio_seconds: length of one sound.
        background: RGB that transparency is laid on.
        video_backend: "pyav" or "opencv".
        frame_recovery: a broken frame is replaced by the next readable one before the following target.
        decode_isolation: "thread" runs codecs beside the engine, "process" in a worker with the limits below that is
            restarted when it dies.
        worker_memory_bytes, worker_seconds: address space of that worker, and time for one item.

    Raises:
        ConfigError: a value outside its limits.
    """

    allowed_local_media_path: str | None = None
    allowed_media_domains: tuple[str, ...] | None = None
    allow_private_hosts: bool = False
    max_bytes: int = 512 << 20
    timeout: float = 10.0
    max_seconds: float = 120.0
    max_redirects: int = 5
    max_pixels: int = 178_956_970  # Pillow's own limit: a quarter GiB of 24-bit pixels, doubled
    max_video_bytes: int = 4 << 30
    max_audio_seconds: float = 4 * 3600.0
    background: tuple[int, int, int] = (255, 255, 255)
    video_backend: str = "pyav"
    frame_recovery: bool = False
    decode_isolation: str = "thread"
    worker_memory_bytes: int = 4 << 30
    worker_seconds: float = 60.0

    def __post_init__(self) -> None:
        _one_of("video_backend", self.video_backend, VIDEO_BACKENDS)
        _one_of("decode_isolation", self.decode_isolation, ("thread", "process"))
        for name in ("max_bytes", "timeout", "max_seconds", "max_pixels", "max_video_bytes", "max_audio_seconds"):
            _positive(name, getattr(self, name))
        if isinstance(self.max_redirects, bool) or not isinstance(self.max_redirects, int) or self.max_redirects < 0:
            raise ConfigError(f"max_redirects is {self.max_redirects!r}; give a whole number, 0 or more")
        for name in ("worker_memory_bytes", "worker_seconds"):
            _positive(name, getattr(self, name))
        if len(self.background) != 3 or not all(isinstance(c, int) and 0 <= c <= 255 for c in self.background):
            raise ConfigError(f"background is {self.background}; give three whole numbers from 0 to 255")
        if self.allowed_local_media_path == "":  # would be the folder that the process happens to be in
            raise ConfigError('allowed_local_media_path is empty; give a folder, "." for the current one, or None')
        if isinstance(self.allowed_media_domains, str):
            raise ConfigError("allowed_media_domains is a list of host names, not one text")
        for name in self.allowed_media_domains or ():
            _host(name)


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{name} is {value!r}; give a positive number")


def _host(name: object) -> None:
    try:
        plain = isinstance(name, str) and name.rstrip(".").encode("idna")
    except UnicodeError:
        plain = b""
    if not plain:
        raise ConfigError(f"allowed_media_domains holds {str(name)[:80]!r}; give whole host names, such as example.org")


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; the known ones are {', '.join(known)}")
