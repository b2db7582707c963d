"""Names of files that are not in the format of their modality, by their first bytes, for errors that say what to do."""

from __future__ import annotations

import re

# what the file is, its start, and what to do with it
_FORMATS: tuple[tuple[str, str, str], ...] = (
    ("a PDF", r"%PDF-", "<<give_pdf>>"),
    ("an SVG", r"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)?(<!DOCTYPE svg[^>]*>\s*)?<svg", "render it as PNG first"),
    ("an HTML page", r"\s*(<!doctype html|<html)", "give the address of the file itself, or log in and download it"),
    ("a HEIC image", r"....ftyp(heic|heix|heim|heis|hevc|hevx|mif1|msf1)", "give it as an image"),
    ("PostScript", r"%!PS", "render it as PNG first"),
    ("a Git LFS pointer", r"version https://git-lfs", "download the file itself, for example with git lfs pull"),
    ("a ZIP archive", r"PK\x03\x04", "unpack it first"),
    ("a gzip archive", r"\x1f\x8b", "unpack it first"),
    ("an image", r"\x89PNG|\xff\xd8\xff|GIF8|RIFF....WEBP|BM....\0\0\0\0|II\*\0|MM\0\*|....ftypavi[fs]", "give it as an image"),
    ("audio", r"RIFF....WAVE|fLaC|ID3|....ftypM4A", "give it as audio"),
    ("a video", r"....ftyp|\x1a\x45\xdf\xa3|RIFF....AVI ", "give it as a video"),
)
_OWN = {
    "image": ("an image", "a HEIC image"),
    "video": ("a video",),
    "audio": ("audio", "a video"),
}  # broken files of the right kind
_LOOKED_AT = 512  # bytes
_ADVICE = {
    "image": "convert it to PNG or JPEG",
    "video": "convert it to MP4",
    "audio": "<<convert_audio>>",
}


def wrong_format_error(data: bytes, modality: str) -> str:
    """Return the error of a file that cannot be opened as a modality: what it is, if known, and what to do."""
    if not data:
        return "it is empty; download or export it again"
    for name, start, advice in _FORMATS:
        if re.match(start.encode("latin-1"), data[:_LOOKED_AT], re.DOTALL | re.IGNORECASE) is None:
            continue
        if name in _OWN[modality]:
            return f"it begins as {name}, but is broken or cut off; download or export it again"
        return f"it is {name}, not in a supported {modality} format; {advice}"
    return f"it is not in a supported {modality} format; {_ADVICE[modality]}"
