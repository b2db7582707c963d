"""The first item of each modality: a thread imports what it needs, and processes a small one."""

from __future__ import annotations

import io
import logging
import threading
import time
import wave
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module

import numpy as np
from PIL import Image

from ...mm.media import gate
from ...mm.media.policy import MediaPolicy
from ..threads import use_threads

_log = logging.getLogger(__name__)


def start_warm_up(modalities: Sequence[str], policy: MediaPolicy, process: Callable[[str, object], None]) -> threading.Thread:
    """Import what items of these modalities need, and call `process` with a small one of each, in a thread. Return the thread.

    It gives way to other threads between the modules. It is no daemon, because torch must not run while Python ends.
    """
    isolated = policy.decode_isolation == "process"  # the workers import what they need
    names = [] if isolated else [name for modality in modalities for name in gate.modules(modality, policy)]

    def run() -> None:
        use_threads(1)
        for name in names:
            with suppress(ImportError):  # the first item that needs it names what to install
                import_module(name)
            time.sleep(0.001)
        for modality in modalities:
            try:
                process(modality, _small_item(modality, isolated))
            except Exception:
                _log.debug("processing a small %s failed", modality, exc_info=True)

    thread = threading.Thread(target=run, name="sensorium-warm-up")
    thread.start()
    return thread


def _small_item(modality: str, isolated: bool) -> object:
    """Return encoded bytes or, for a video or if decoding would start a worker process, pixels or samples."""
    if modality == "video":
        return np.zeros((2, 64, 64, 3), np.uint8), {"fps": 2.0}
    if modality == "vision_chunk":
        return {"type": "image", "image": _small_item("image", isolated)}
    samples, pixels = np.zeros(16_000, np.float32), np.zeros((64, 64, 3), np.uint8)
    if isolated:
        return (samples, 16_000) if modality == "audio" else pixels
    file = io.BytesIO()
    if modality == "image":
        Image.fromarray(pixels).save(file, "PNG")
    else:
        with wave.open(file, "wb") as out:
            out.setparams((1, 2, 16_000, 0, "NONE", ""))
            out.writeframes(bytes(32_000))
    return file.getvalue()
