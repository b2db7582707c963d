"""Opens the connectors that an engine's options name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ...callers.errors import ConfigError
from ...mm.hashing import digest
from ...models.interface import CacheSpec
from ...models.layers.ranks import Ranks, all_ranks
from ..config import EngineConfig
from ..connectors.disk import DiskConnector
from ..connectors.interface import Connector
from ..connectors.memory import MemoryConnector
from ..connectors.peer import PeerConnector
from ..connectors.peer_server import PeerServer
from ..connectors.redis_store import RedisConnector
from ..connectors.shared_memory import ROOT, SharedMemoryConnector
from ..connectors.tensor_store import TensorStore
from ..core.codec import decode, encode
from ..core_info import CoreInfo
from ..frontend.item_store import ItemStore
from ..model_files import ModelFiles
from ..transfer_config import ECTransferOptions, KVTransferOptions
from ..worker.encoder_store import code_digest, versions

_FORMAT = 1
_LIBRARIES = ("av", "numpy", "opencv-python-headless", "pillow", "soundfile", "soxr")
"""Distributions that decode and resize media; other versions may make other pixels."""


def open_kv_store(
    config: EngineConfig, content: str, specs: Sequence[CacheSpec], dtype: torch.dtype, ranks: Sequence[Ranks] = ()
) -> TensorStore | None:
    """Return the store of an engine's KV blocks, None if its options name no connector.

    Args:
        content: hash of the checkpoint; "" if only this engine reads the blocks.
        ranks: the groups of processes that share the model, if this is one of them. It finds only parts of blocks that the
            same rank of an equal split has saved.
    """
    whole = all_ranks(ranks)
    options = config.kv_transfer.of_rank(0 if whole is None else whole.rank, config.num_ranks)
    connectors: list[Connector] = []
    if options.memory_bytes:
        connectors.append(MemoryConnector(options.memory_bytes))
    if options.shared_memory:
        connectors.append(open_shared_memory(options.shared_memory, options.shared_bytes, "kv_transfer_config"))
    if options.folder:
        connectors.append(DiskConnector(options.folder, options.folder_bytes, config.num_ranks))
    kept = tuple(connectors)  # what this engine serves
    connectors += [PeerConnector(peer, options.token, options.seconds) for peer in options.peers]
    if options.redis_url:
        connectors.append(RedisConnector(options.redis_url, options.seconds))
    if not connectors:
        return None
    layout = [str(spec) for spec in specs], config.block_size, config.kv_cache_dtype
    libraries = [_version(name) for name in _LIBRARIES]
    inputs = config.media_device, dict(config.mm_processor_kwargs), config.trust_uuid, libraries
    model = content or os.urandom(32), config.quantization, config.batch_invariant, config.kernels
    split = [number for group in ranks for number in (group.rank, group.size, group.layers)]
    namespace = digest("sensorium.kv", _FORMAT, *layout, *inputs, *model, *versions(config.torch_device, dtype), *split)
    return TensorStore("KV blocks", namespace, connectors, server=_serve(kept, options))


def open_media_connectors(options: ECTransferOptions) -> list[Connector]:
    """Return the connectors of encoder rows and processed items that an engine's options name."""
    if options.shared_memory:
        return [open_shared_memory(options.shared_memory, options.shared_bytes, "ec_transfer_config")]
    return [DiskConnector(options.folder, options.folder_bytes)] if options.folder else []


def open_item_store(config: EngineConfig, files: ModelFiles, dtype: torch.dtype) -> ItemStore | None:
    """Return the store of an engine's processed items, None if its options name none."""
    options = config.ec_transfer
    connectors = open_media_connectors(options) if options.items else []
    if not connectors:
        return None
    policy = {name: str(value) for name, value in asdict(config.media).items()}
    inputs = config.media_device, dict(config.mm_processor_kwargs), config.trust_uuid, config.kernels, policy
    code = [_version(name) for name in _LIBRARIES], *versions(config.torch_media_device, dtype)
    namespace = digest("sensorium.items", _FORMAT, files.processing_digest(), str(dtype), *inputs, *code)
    return ItemStore(TensorStore("processed items", namespace, connectors), encode, decode)


def rows_namespace(config: EngineConfig, files: ModelFiles, info: CoreInfo) -> str:
    """Return the hash of what rows depend on besides the tensors of their item and the kind of processor.

    It is "" for an engine that shares no rows over TCP, since hashing a checkpoint takes time.
    """
    if config.encoder is None and config.encoder_listen is None:
        return ""
    code, content = code_digest(Path(__file__).parents[2]), files.content_digest()
    model = content, config.quantization, config.kernels, config.batch_invariant
    return digest("sensorium.encoder_rows", _FORMAT, *model, info.dtype, info.row_bytes, code)


def open_shared_memory(name: str, num_bytes: int, param: str) -> SharedMemoryConnector:
    """Open shared memory, or raise ConfigError for the option `param`."""
    try:
        memory = shutil.disk_usage(ROOT).total
        if num_bytes > memory:
            reason = f"<<param>>['max_bytes']={num_bytes} is more than {ROOT} can hold, {memory} bytes"
            raise ConfigError(reason, param=param, limit=memory, value=num_bytes)
        return SharedMemoryConnector(name, num_bytes)
    except OSError as error:
        reason = f"<<param>>['name']={name!r} cannot be used ({error.strerror or error}); give another name"
        raise ConfigError(reason, param=param) from None


def _version(distribution: str) -> str:
    """Return the version of a distribution, "" if another one has its modules."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _serve(connectors: Sequence[Connector], options: KVTransferOptions) -> PeerServer | None:
    """Start the server of an engine's blocks, if its options ask for one."""
    if not options.listen:
        return None
    try:
        return PeerServer(connectors, options.listen, options.token)
    except OSError as error:
        reason = f"<<param>>['listen']={options.listen!r} cannot be used ({error.strerror or error}); give another port"
        raise ConfigError(reason, param="kv_transfer_config") from None
