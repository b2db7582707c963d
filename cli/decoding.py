"""Decode a shipped picture, clip and sound, for `sensorium doctor`."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from ..callers.errors import BusyError, one_line

ASSETS = Path(__file__).resolve().parents[1] / "assets"
SAMPLES = {"image": "media/line1.png", "video": "media/clip.mp4", "audio": "speech/alarm.flac"}
"""Modality -> a shipped file."""
DECODERS = {"image": ("pillow",), "video": ("av",), "audio": ("soundfile", "soxr", "av")}
"""Modality -> the distributions that decode its file."""


def decoding_problems() -> list[tuple[str, str]]:
    """Decode each file of SAMPLES in a codec worker, as engines that isolate codecs do, and return what fails."""
    from ..mm.media.isolate import close_workers

    try:
        return [(modality, problem) for modality in SAMPLES if (problem := _decoding_problem(modality))]
    finally:
        close_workers()


def _decoding_problem(modality: str) -> str:
    from ..mm.media import gate
    from ..mm.media.policy import DecodeSpec, MediaPolicy
    from ..mm.parse import MediaSource

    name, spec, policy = SAMPLES[modality], DecodeSpec(), MediaPolicy(decode_isolation="process")
    try:
        source = MediaSource(modality, 0, (ASSETS / name).read_bytes())
        gate.probe(source, spec, policy)
        gate.decode(source, spec, policy)
    except BusyError as error:
        return f"{name} could not be tried: {one_line(str(error))}"
    except Exception as error:  # whatever a package of another version raises
        cause = error.__context__ or error  # the error of the item has the codec's as its context
        last = str(cause).strip().rpartition("\n")[2]  # of a worker's traceback
        return f"{name} is not decoded ({one_line(last)}); install again what decodes it: {_reinstall(DECODERS[modality])}"
    return ""


def _reinstall(distributions: tuple[str, ...]) -> str:
    """Return the command that installs these distributions in the versions that sensorium's metadata allows."""
    try:
        lines = metadata.requires("sensorium") or []
    except metadata.PackageNotFoundError:
        lines = []
    bounds = {re.split(r"[^\w.-]", line, maxsplit=1)[0]: line.replace(" ", "") for line in lines if "extra ==" not in line}
    return " ".join(["pip install --force-reinstall --no-deps", *(f'"{bounds.get(name, name)}"' for name in distributions)])
