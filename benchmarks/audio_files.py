"""Which audio files decode, and whether the samples are FFmpeg's: every pair of muxer and encoder that `ffmpeg` can write.

Run: `python benchmarks/audio_files.py [--folder DIR]`; needs the program ffmpeg. Prints a table.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from sensorium.callers.errors import InputError
from sensorium.mm.media.audio import decode_audio, probe_audio
from sensorium.mm.media.policy import MediaPolicy

SECONDS = 1.3
LAYOUTS = ((2, 44_100), (2, 48_000), (1, 16_000), (1, 8000), (2, 22_050))  # channels and rate, tried in order
EQUAL = 2e-3  # root mean square of the difference; decoders of lossy codecs differ by their rounding
ANY = """aac ac3 adpcm_ima_wav adpcm_ms alac dca eac3 flac g722 g726 libgsm_ms libmp3lame libopus libvorbis mp2
pcm_alaw pcm_mulaw pcm_f32le pcm_s16le pcm_s24le pcm_u8 truehd tta wavpack wmav2"""
PAIRS = """
matroska avi asf nut wav wtv: ANY
mov: ANY pcm_s16be adpcm_ima_qt
mp4: aac ac3 alac dca eac3 flac libmp3lame libopus mp2 truehd libvorbis
ipod: aac alac ac3
3gp adts latm f4v ismv psp: aac
webm: libopus libvorbis
ogg oga spx: libopus libvorbis flac libspeex
mpegts: aac ac3 dca eac3 libmp3lame libopus mp2 s302m truehd pcm_bluray
mpeg vob dvd: mp2 ac3 libmp3lame dca pcm_dvd
flv: aac libmp3lame adpcm_swf pcm_s16le nellymoser libspeex pcm_alaw
caf: aac ac3 alac libopus pcm_alaw pcm_f32le pcm_f64be pcm_s16be pcm_s24le libgsm adpcm_ima_qt g722 flac libmp3lame
aiff: pcm_s16be pcm_s24be pcm_s16le pcm_f32be pcm_f64be pcm_alaw pcm_mulaw adpcm_ima_qt libgsm
au: pcm_alaw pcm_mulaw pcm_s16be pcm_s24be pcm_f32be pcm_f64be g722 g726le
w64: pcm_s16le pcm_f32le adpcm_ms pcm_alaw
mxf gxf: pcm_s16le pcm_s24le
voc: pcm_u8 pcm_s16le pcm_alaw
rm: ac3 real_144
swf mp3: libmp3lame
ac3: ac3
eac3: eac3
dts: dca
mp2: mp2
flac: flac
tta: tta
wv: wavpack
mlp: mlp
truehd: truehd
sbc: sbc
g722: g722
g726: g726
gsm: libgsm
oma: pcm_s16be
ircam: pcm_s16le pcm_f32le pcm_alaw
sox: pcm_s32le
rso: pcm_u8
mmf: adpcm_yamaha
adx: adpcm_adx
ast: pcm_s16be_planar
smjpeg: pcm_s16le
roq: roq_dpcm
spdif: ac3
wsaud: adpcm_ima_ws
kvag: adpcm_ima_ssi
apm: adpcm_ima_apm
alp: adpcm_ima_alp
argo_asf: adpcm_argo
aptx: aptx
""".replace("ANY", ANY.replace("\n", " "))
"""Muxers, and the encoders that they may take."""
LAYOUT_OF = {  # which of LAYOUTS; default: the first, then the second
    **dict.fromkeys(("libgsm_ms", "libgsm", "g726", "g726le", "real_144"), 3),
    **dict.fromkeys(("g722", "libspeex", "nellymoser"), 2),
    **dict.fromkeys(("libopus", "dca", "truehd", "mlp", "pcm_dvd", "pcm_bluray", "s302m", "sbc"), 1),
    **dict.fromkeys(("adpcm_swf", "roq_dpcm"), 4),
}


@dataclass(frozen=True)
class Row:
    """The outcome for a file. `length`: samples more than FFmpeg's; `error`: root mean square of the difference."""

    name: str
    outcome: str
    length: int = 0
    error: float = 0.0
    header: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keep the files here")
    parser.add_argument("--only", default="", help="names that contain this text")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        rows = [compare(path) for path in files(folder) if args.only in path.name]
    counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in sorted({row.outcome for row in rows})}
    print(f"{len(rows)} files: {counts}\n")
    print("| file | outcome | samples more than FFmpeg | difference | bound minus samples, or error |\n|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: (row.outcome == "equal", row.outcome, row.name)):
        print(f"| {row.name} | {row.outcome} | {row.length:+d} | {row.error:.1e} | {row.header} |")


def files(folder: Path) -> Iterator[Path]:
    """Write the files that are missing, and yield all that could be written."""
    for channels, rate in LAYOUTS:
        path = folder / f"source-{channels}-{rate}.wav"
        if not path.exists():
            _run("ffmpeg", "-f", "f32le", "-ar", str(rate), "-ac", str(channels), "-i", "-", "-y", str(path),
                 data=signal(channels, rate).astype("<f4").tobytes())  # fmt: skip
    for line in PAIRS.strip().splitlines():
        muxers, encoders = (part.split() for part in line.split(":"))
        for muxer, encoder in product(muxers, encoders):
            path = folder / f"{encoder}.{muxer}"
            if (path.exists() or _written(path, muxer, encoder)) and path.stat().st_size:
                yield path


def _written(path: Path, muxer: str, encoder: str) -> bool:
    first = LAYOUT_OF.get(encoder)
    for channels, rate in (LAYOUTS[first],) if first is not None else LAYOUTS[:2]:
        source, codec = path.parent / f"source-{channels}-{rate}.wav", ("-c:a", encoder, "-strict", "-2", "-f", muxer)
        if _run("ffmpeg", "-v", "error", "-y", "-i", str(source), *codec, str(path)) is not None and path.stat().st_size > 500:
            return True
    path.write_bytes(b"")  # not tried again
    return False


def signal(channels: int, rate: int) -> np.ndarray:
    """Return `[n, channels]`: sweeps with pauses, quieter in the second channel, with a little noise."""
    time = np.arange(round(SECONDS * rate)) / rate
    sweep = np.sin(2 * np.pi * (200 * time + 400 * time**2)) * (0.4 + 0.3 * np.sin(2 * np.pi * 1.5 * time))
    noise = np.random.default_rng(0).normal(0, 0.002, (len(time), channels))
    return np.stack([sweep, 0.6 * np.roll(sweep, 37)][:channels], 1) + noise


def compare(path: Path) -> Row:
    data = path.read_bytes()
    stream = _run("ffprobe", "-v", "error", "-select_streams", "a:0", "-show_entries", "stream=sample_rate,channels", "-of",
                "csv=p=0", str(path))  # fmt: skip
    fields = (stream or b"").decode().split("\n")[0].strip().strip(",").split(",")
    raw = _run("ffmpeg", "-v", "error", "-i", str(path), "-map", "0:a:0", "-f", "f32le", "-")
    expected = None
    if raw and len(fields) >= 2 and all(field.isdigit() for field in fields[:2]):
        expected, rate = np.frombuffer(raw, "<f4").reshape(-1, int(fields[1])).mean(1), int(fields[0])
    else:
        rate = 16_000
    try:
        header = probe_audio(data, rate, MediaPolicy())
        decoded = decode_audio(data, rate, MediaPolicy()).numpy()
    except InputError as error:
        return Row(path.name, "neither" if expected is None else "refused", header=str(error)[:90])
    except Exception as error:  # an internal error is a row of the table
        return Row(path.name, "FAULT", header=f"{type(error).__name__}: {error}"[:90])
    about = f"{'=' if header.exact else '<='}{header.samples - len(decoded):+d}"
    if expected is None:
        return Row(path.name, "FFmpeg does not decode it", header=about)
    common = min(len(decoded), len(expected))
    error = float(np.sqrt(np.mean((decoded[:common] - expected[:common]) ** 2))) if common else 1.0
    wrong = "length" if len(decoded) != len(expected) else "samples"
    same = len(decoded) == len(expected) and error < EQUAL
    return Row(path.name, "equal" if same else f"other {wrong}", len(decoded) - len(expected), error, about)


def _run(*command: str, data: bytes | None = None) -> bytes | None:
    """Return the output of a program, or None if it fails."""
    done = subprocess.run(command, input=data, stdin=None if data else subprocess.DEVNULL, capture_output=True, check=False)
    return None if done.returncode else done.stdout


if __name__ == "__main__":
    main()
