"""A model that cannot be loaded leaves nothing behind."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from hostile import MODEL
from sensorium import LLM
from sensorium.callers.errors import CheckpointError
from sensorium.engine.setup.model_source import ModelSource


def test_a_model_that_cannot_be_loaded_leaves_its_port_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise CheckpointError("damaged")

    monkeypatch.setattr(ModelSource, "load_weights", fail)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    peer = {"kv_connector": "PeerConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"listen": f"127.0.0.1:{port}"}}
    small = {"max_model_len": 256, "max_num_seqs": 2, "kv_cache_memory_bytes": 3 << 20}
    with pytest.raises(CheckpointError):
        LLM(MODEL, kv_transfer_config=peer, kv_offloading_size=0.1, **small)
    socket.create_server(("127.0.0.1", port)).close()
