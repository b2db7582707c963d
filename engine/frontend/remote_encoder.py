"""Asks the encoders of other engines for the rows of items."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from ...callers.errors import InputError
from ...mm.embeddings import ROWS
from ...mm.hashing import digest
from ..config import EngineConfig
from ..connectors.item_inputs import ItemInputs, pack_inputs
from ..connectors.packing import PackedSpec, max_packed_bytes, unpack
from ..connectors.peer import PeerConnector
from ..connectors.wire import ItemFailedError
from ..core_info import CoreInfo
from ..stats import TransferStats
from ..transfer_config import peer_token

_LOOKUP_SECONDS = 3.0  # time limit of connecting and of looking up rows that are kept; encoding is limited by signs of life
_PATIENCE_SECONDS = 0.5  # after which an item without rows lets the others be probed, and how long it waits for one that failed
_log = logging.getLogger(__name__)


def remote_encoder(config: EngineConfig, info: CoreInfo, namespace: str) -> RemoteEncoder | None:
    """Return the client of the encoders that an engine's options name, None if they name none."""
    if config.encoder is None:
        return None
    dtype: torch.dtype = getattr(torch, info.dtype)
    width, can_encode = info.row_bytes // dtype.itemsize, config.parts != "decoder"
    token, seconds = peer_token(), min(config.encoder_seconds, _LOOKUP_SECONDS)
    peers = [PeerConnector(address, token, seconds) for address in config.encoder]
    return RemoteEncoder(peers, namespace, config.encoder_seconds, width, dtype, can_encode)


class RemoteEncoder:
    """Gets encoder rows from the servers of other engines (`EncoderServer`). Media workers call it.

    Equal items go to the same encoder, if it answers, so that each keeps other rows. If one fails, the next one is asked. All
    encoders are probed while an item waits for one of them, so that those that are stopped cost their time limit together. One
    that has not answered is asked again once it has answered a probe.

    Args:
        peers: the encoders. `close` closes them.
        namespace: as in EncoderServer.
        seconds: time limit of sending an item and getting its rows.
        width, dtype: of a row.
        can_encode: this engine has encoders, too, which take the items that no peer gives rows for.
    """

    def __init__(
        self,
        peers: Sequence[PeerConnector],
        namespace: str,
        seconds: float,
        width: int,
        dtype: torch.dtype,
        can_encode: bool,
    ) -> None:
        self._namespace, self._seconds, self._can_encode = namespace, seconds, can_encode
        self._peers, self._width, self._dtype = peers, width, dtype
        self._failing = set[str]()  # addresses of those of which a failure was logged
        self._silent = set[str]()  # addresses of those that have not answered
        self._probes: dict[str, Future[None]] = {}  # by address
        self._prober = ThreadPoolExecutor(max(1, len(peers)), "sensorium-encoder-probe")
        self._counts = Counter[str]()
        self._lock = threading.Lock()

    @property
    def stats(self) -> TransferStats:
        with self._lock:
            return TransferStats("encoder rows", "peer", **self._counts)

    def encode(self, item: ItemInputs) -> Tensor | None:
        """Return verified rows `[num_rows, width]`, or None if this engine is to encode the item.

        Raises:
            InputError: no encoder gives rows, and this engine has none. The code is "encoder_failed" if an encoder fails on
                the item, and "unreachable" otherwise.
        """
        reasons, code = list[str](), "unreachable"
        ordered = self._ordered(item.hash)
        others = threading.Timer(_PATIENCE_SECONDS, self._probe_each, (ordered[1:],))
        others.daemon = True
        try:
            others.start()
            rows = self._ask_each(ordered, item, reasons)
        except ItemFailedError as error:
            reasons, code = [str(error)], "encoder_failed"
        else:
            if rows is not None:
                return rows
        finally:
            others.cancel()
        if self._can_encode:
            self._count("fallbacks")
            return None
        if code == "encoder_failed":
            raise InputError(f"encoding failed: {reasons[0]}; send another item", code="encoder_failed")
        raise InputError(f"no encoder gives its rows ({'; '.join(reasons)}); try again later", code="unreachable")

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._prober.shutdown(wait=False, cancel_futures=True)

    def _ordered(self, name: str) -> list[PeerConnector]:
        """Return the encoders in the order in which an item asks them (rendezvous hashing)."""
        return sorted(self._peers, key=lambda peer: digest("sensorium.route", name, peer.address))

    def _ask_each(self, ordered: Sequence[PeerConnector], item: ItemInputs, reasons: list[str]) -> Tensor | None:
        """Return the rows of the first encoder that gives them, or None. `reasons`: gets those of the others."""
        for peer in ordered:
            if not self._answers(peer):
                reasons.append(f"{peer.address} does not answer")
                continue
            try:
                rows = self._ask(peer, item)
            except (OSError, ValueError) as error:
                self._failed(peer, error)
                reasons.append(str(error))
            else:
                self._works(peer)
                return rows
        return None

    def _answers(self, peer: PeerConnector) -> bool:
        """Return False for an encoder that did not answer before, and does not answer a probe now."""
        with self._lock:
            probe, is_silent = self._probes.get(peer.address), peer.address in self._silent
        try:
            if is_silent:
                self._probe(peer).result(_PATIENCE_SECONDS)
            elif probe is not None and not probe.done():
                probe.result()
        except (OSError, RuntimeError, CancelledError):  # TimeoutError is an OSError; RuntimeError: it is closed
            return False
        return True

    def _probe_each(self, peers: Sequence[PeerConnector]) -> None:
        with suppress(RuntimeError):  # it is closed
            for peer in peers:
                self._probe(peer)

    def _probe(self, peer: PeerConnector) -> Future[None]:
        """Begin to find out whether an encoder answers, unless this is being done."""
        with self._lock:
            probe = self._probes.get(peer.address)
            if probe is None or probe.done():
                probe = self._probes[peer.address] = self._prober.submit(self._look, peer)
            return probe

    def _look(self, peer: PeerConnector) -> None:
        """Look up rows that nobody has. Raise OSError if the encoder does not answer."""
        try:
            peer.contains([f"{self._namespace}/{self._namespace}"])
        except OSError as error:
            self._failed(peer, error)
            raise
        with self._lock:
            self._silent.discard(peer.address)

    def _ask(self, peer: PeerConnector, item: ItemInputs) -> Tensor:
        """Return the rows that an encoder keeps, or those that it computes. Errors: as `PeerConnector`, and of `unpack`."""
        key, specs = f"{self._namespace}/{item.hash}", {ROWS: PackedSpec((item.num_rows, self._width), self._dtype)}
        limit = max_packed_bytes(specs)
        data = peer.get(key, limit)
        self._count("misses" if data is None else "hits")
        if data is None:
            inputs = pack_inputs(item)
            data = peer.encode(key, inputs, limit, self._seconds)
            self._count("written_bytes", len(inputs))
        self._count("read_bytes", len(data))
        return unpack(key, data, specs)[ROWS]

    def _failed(self, peer: PeerConnector, error: Exception) -> None:
        """Count a failure. It is logged once until the encoder works again."""
        self._count("failed" if isinstance(error, OSError) else "damaged")
        with self._lock:
            is_new = peer.address not in self._failing
            self._failing.add(peer.address)
            if isinstance(error, OSError):
                self._silent.add(peer.address)
        if is_new:
            instead = "items are encoded here" if self._can_encode else "requests whose items no other encoder takes fail"
            _log.warning("the encoder %s gives no rows (%s); %s", peer.address, error, instead)

    def _works(self, peer: PeerConnector) -> None:
        with self._lock:
            self._silent.discard(peer.address)
            if peer.address in self._failing:
                self._failing.remove(peer.address)
                _log.warning("the encoder %s gives rows again", peer.address)

    def _count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self._counts[what] += number
