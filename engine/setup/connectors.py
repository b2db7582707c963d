"""Opens the connectors of KV blocks that an engine's options name."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ...mm.hashing import digest
from ...models.interface import CacheSpec
from ..config import EngineConfig
from ..connectors.disk import DiskConnector
from ..connectors.interface import Connector
from ..connectors.memory import MemoryConnector
from ..connectors.tensor_store import TensorStore
from ..worker.encoder_store import versions

_FORMAT = 1


def open_connectors(config: EngineConfig, content: str, specs: Sequence[CacheSpec], dtype: torch.dtype) -> TensorStore | None:
    """Return the store of an engine's KV blocks, None if its options name no connector.

    Args:
        content: hash of the checkpoint; "" if only this engine reads the blocks.
    """
    options = config.kv_transfer
    connectors: list[Connector] = []
    if options.memory_bytes:
        connectors.append(MemoryConnector(options.memory_bytes))
    if options.folder:
        connectors.append(DiskConnector(options.folder, options.folder_bytes))
    if not connectors:
        return None
    layout = [str(spec) for spec in specs], config.block_size, config.kv_cache_dtype
    inputs = config.media_device, dict(config.mm_processor_kwargs), config.trust_uuid
    model = content or os.urandom(32), config.quantization, config.batch_invariant, config.kernels
    namespace = digest("sensorium.kv", _FORMAT, *layout, *inputs, *model, *versions(config.torch_device, dtype))
    return TensorStore("KV blocks", namespace, connectors)
