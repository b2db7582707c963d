"""Make small encoder stores in a folder, for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from sensorium.engine.connectors.disk import DiskConnector
from sensorium.engine.stats import TransferStats
from sensorium.engine.worker.encoder_store import EncoderStore
from sensorium.mm.hashing import digest

WIDTH = 8
CPU = torch.device("cpu")


def make(folder: Path | None, capacity: int = 1 << 20, fingerprint: str = "model", dtype=torch.bfloat16):
    return EncoderStore([DiskConnector(folder, capacity)] if folder else (), fingerprint, WIDTH, dtype, CPU)


def counts(store: EncoderStore) -> TransferStats:
    """Return the counts of a store's folder."""
    (stats,) = store.stats
    return stats


def key_of(i: int) -> str:
    return digest("test", i)


def rows_of(i: int, count: int = 5, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(i)).to(dtype)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.safetensors"))


def filled(folder: Path, count: int = 1) -> Path:
    store = make(folder)
    for i in range(count):
        store.put(key_of(i), rows_of(i))
    store.close()
    return files(folder)[0]
