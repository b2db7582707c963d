"""Open an encoded container with PyAV, without access to other files and within a time limit."""

from __future__ import annotations

import io
import math
import time
from typing import TYPE_CHECKING, Any

from ...callers.errors import InputError
from .policy import MediaPolicy
from .sample_tables import check_tables

if TYPE_CHECKING:
    from av.container import InputContainer

HEADER_SECONDS = 5.0
"""CPU time limit of a header. FFmpeg reads most in milliseconds, but reads endless empty boxes without a limit."""


_NAMES = (
    "h264 hevc vvc av1 libdav1d libaom-av1 vp6 vp6f vp8 vp9 libvpx libvpx-vp9 theora mpegvideo mpeg1video mpeg2video mpeg4 "
    "msmpeg4 msmpeg4v1 msmpeg4v2 h263 h263i h263p flv wmv1 wmv2 wmv3 vc1 mjpeg gif apng ffv1 ffvhuff huffyuv utvideo rawvideo "
    "h261 vp5 cfhd qtrle rpza smc msrle msvideo1 8bps indeo2 indeo3 indeo4 indeo5 zmbv flashsv flashsv2 asv1 asv2 magicyuv hap "
    "speedhq r210 r10k v308 v408 snow fraps lagarith roqvideo "
    "prores dnxhd dvvideo svq1 svq3 cinepak rv10 rv20 rv30 rv40 v210 "
    "aac aac_fixed aac_latm ac3 ac3_fixed acelp.kelvin adpcm_adx adpcm_argo adpcm_ima_alp adpcm_ima_apm adpcm_ima_oki "
    "adpcm_ima_qt adpcm_ima_smjpeg adpcm_ima_ssi adpcm_ima_wav adpcm_ima_ws adpcm_ms adpcm_sbpro_2 adpcm_sbpro_3 "
    "adpcm_sbpro_4 adpcm_swf adpcm_yamaha alac als amrnb amrwb ape aptx aptx_hd atrac1 atrac3 atrac3al atrac3plus "
    "atrac3plusal cook dca dsd_lsbf dsd_lsbf_planar dsd_msbf dsd_msbf_planar dss_sp dst dvaudio eac3 evrc flac g722 g723_1 "
    "g726 g726le g728 g729 gsm gsm_ms hcom iac ilbc imc libopencore_amrnb libopencore_amrwb libopus libspeex libvorbis "
    "mace3 mace6 metasound mlp mp1 mp1float mp2 mp2float mp3 mp3adu mp3adufloat mp3float mp3on4 mp3on4float mpc7 mpc8 "
    "msnsiren nellymoser on2avc opus osq pcm_alaw pcm_bluray pcm_dvd pcm_f16le pcm_f24le pcm_f32be pcm_f32le pcm_f64be "
    "pcm_f64le pcm_mulaw pcm_s16be pcm_s16be_planar pcm_s16le pcm_s16le_planar pcm_s24be pcm_s24le pcm_s24le_planar "
    "pcm_s32be pcm_s32le pcm_s32le_planar pcm_s64be pcm_s64le pcm_s8 pcm_s8_planar pcm_u16be pcm_u16le pcm_u24be pcm_u24le "
    "pcm_u32be pcm_u32le pcm_u8 pcm_vidc qcelp qdm2 qdmc qoa ra_144 ra_288 real_144 real_288 roq_dpcm s302m sbc shorten "
    "sipr sonic speex tak truehd truespeech tta twinvq vorbis wavpack wmalossless wmapro wmav1 wmav2 wmavoice ws_snd1 xma1 "
    "xma2"
)
CODECS = frozenset(_NAMES.split())
"""FFmpeg names of the decoders that are used. Codecs of still images are not among them: their probing decodes pixels."""
_PROBE_BYTES = 16  # bytes per pixel of a frame that FFmpeg decodes while it probes
_PROBED = 5_000_000  # bytes that FFmpeg reads at most to find the streams; its default


def check_codec(name: str) -> None:
    """Raise InputError for a decoder that is not used."""
    if name not in CODECS:
        raise InputError(f"its codec {name} is not supported for video and audio; convert it", code="unsupported")


def open_container(
    data: bytes, formats: str, unknown: str, policy: MediaPolicy | None = None, kind: str | None = None
) -> InputContainer:
    """Open the container and read its header.

    Args:
        formats: FFmpeg names of the accepted formats, without playlists, which would open files and URLs.
        unknown: error message for data that FFmpeg cannot open.
        policy: limits of the frames that FFmpeg decodes for missing parameters.
        kind: the format, if FFmpeg cannot tell it from the first bytes.

    Raises:
        InputError: the format is unknown, sample tables are forged, or the header takes longer than HEADER_SECONDS.
    """
    import av

    check_tables(data)
    source = _Timed(data)
    try:
        options = open_options(formats, policy or MediaPolicy())
        container: InputContainer | None = av.open(source, "r", kind, options=options, **_lenient_tags(av.__version__))
    except av.error.FFmpegError:
        container = None
    if source.late:
        raise InputError(f"reading its header takes longer than {HEADER_SECONDS:g} s; the file is broken or hostile")
    if container is None:
        raise InputError(unknown)
    source.deadline = math.inf
    return container


def _lenient_tags(version: str) -> dict[str, Any]:
    """Return the arguments of `av.open` with which tags that are not UTF-8 raise nothing. PyAV 19 needs none."""
    return {"metadata_errors": "ignore"} if int(version.partition(".")[0]) < 19 else {}


def open_options(formats: str, policy: MediaPolicy) -> dict[str, str]:
    """Return FFmpeg's options for a file of untrusted bytes: the accepted formats and codecs, and no protocol."""
    return {
        "format_whitelist": formats,
        "protocol_whitelist": "none",
        "codec_whitelist": ",".join(sorted(CODECS)),
        "max_pixels": str(min(policy.max_pixels, policy.max_decoded_bytes // _PROBE_BYTES)),
        "probesize": str(_PROBED),
    }


class _Timed(io.BytesIO):
    """A file that ends at the deadline. It does not raise, because PyAV prints further exceptions of a failed file."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.deadline, self.late = time.thread_time() + HEADER_SECONDS, False

    def read(self, size: int | None = -1, /) -> bytes:
        self.late = self.late or time.thread_time() > self.deadline
        return b"" if self.late else super().read(size)
