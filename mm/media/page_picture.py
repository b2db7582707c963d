"""Pictures of pages for people. `page_jpeg` runs in a codec worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...callers.errors import InputError
from .page_facts import page_pixels
from .pdf import POINTS, is_pdf, opened_page, render
from .policy import MediaPolicy

_QUALITY = 85


def page_jpeg(data: bytes, number: int, side: int, policy: MediaPolicy) -> Tensor:
    """Return a page of a PDF, picture, TIFF or animation as the bytes of a JPEG, uint8 `[bytes]`.

    Args:
        number: of the page, from 1.
        side: pixels of the longer side. Pages of PDFs are rendered at this size; larger pictures are scaled down.

    Raises:
        InputError: as `pdf.decode_page`.
    """
    import cv2

    pixels = _rendered(data, number, side, policy) if is_pdf(data) else page_pixels(data, number, policy)
    encoded, jpeg = cv2.imencode(".jpg", _fitted(pixels.numpy(), side)[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
    if not encoded:
        raise InputError(f"the picture of page {number} cannot be written as JPEG")
    return torch.from_numpy(jpeg.reshape(-1))


def _rendered(data: bytes, number: int, side: int, policy: MediaPolicy) -> Tensor:
    with opened_page(data, number, with_forms=True) as page:
        return render(page, replace(policy, pdf_dpi=POINTS * side / max(*page.get_size(), 1.0)))


def _fitted(pixels: NDArray[np.uint8], side: int) -> NDArray[Any]:
    """Return uint8 `[height, width, 3]` whose longer side is at most `side`."""
    import cv2

    height, width = pixels.shape[:2]
    scale = side / max(height, width)
    if scale >= 1:
        return pixels
    size = max(round(width * scale), 1), max(round(height * scale), 1)
    return cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
