"""Tensors by key in a list of connectors. What is damaged or late counts as missing."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from torch import Tensor

from ..stats import TransferStats
from .interface import KEY, Connector
from .packing import Specs, max_packed_bytes, pack, unpack
from .peer_server import PeerServer

QUEUE_BYTES = 256 << 20  # tensors that may wait to be written
_CLOSE_SECONDS = 10.0  # how long tensors that wait to be written may delay the end of an engine
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class FoundTensors:
    """Tensors on the host, and the name of the connector that had them."""

    tensors: Mapping[str, Tensor]
    source: str


class TensorStore:
    """Tensors by the hash of their content, in connectors that are asked in order. Several threads may use it.

    A connector that fails causes a warning, and what it should have had is computed; it never causes an error. Tensors are
    written in a thread. Those that still wait to be written are found, too.

    Args:
        kind: what the tensors are, such as "encoder rows", for warnings and statistics.
        namespace: 64 hex digits, a hash of everything that the tensors depend on besides their own hash.
        queue_bytes: bytes of tensors that may wait to be written; further ones are not kept.
        server: gives other engines what the connectors have; it is closed with the store.
    """

    def __init__(
        self,
        kind: str,
        namespace: str,
        connectors: Sequence[Connector],
        queue_bytes: int = QUEUE_BYTES,
        server: PeerServer | None = None,
    ) -> None:
        self.kind, self.namespace, self.connectors, self.queue_bytes = kind, namespace, tuple(connectors), queue_bytes
        self._server = server
        self._counts = {connector.name: Counter[str]() for connector in connectors}  # several peers count together
        self._failing = [set[str]() for _ in connectors]  # verbs that fail, by connector
        self._pending: dict[str, Mapping[str, Tensor]] = {}  # tensors that wait to be written, by key
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "sensorium-tensor-store")

    def key(self, name: str) -> str:
        """Return the key of a content's hash, or of a part of it: "hash.number"."""
        return f"{self.namespace}/{name}"

    @property
    def stats(self) -> tuple[TransferStats, ...]:
        with self._lock:
            return tuple(TransferStats(self.kind, name, **counts) for name, counts in self._counts.items())

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> bool:
        """Write tensors in the background; they must not change. Return False if too many wait already: these are not kept."""
        key = self.key(name)
        if not KEY.fullmatch(key):
            return False
        size = sum(tensor.nbytes for tensor in tensors.values())
        with self._lock:
            if key in self._pending:
                return True
            waiting = sum(tensor.nbytes for others in self._pending.values() for tensor in others.values())
            if self._pending and waiting + size > self.queue_bytes:
                for counts in self._counts.values():
                    counts["skipped"] += 1
                return False
            self._pending[key] = tensors
        self._writer.submit(self._write, key, tensors)
        return True

    def get(self, name: str, specs: Specs) -> FoundTensors | None:
        """Return verified tensors of these shapes and dtypes, or None. It may take as long as the connectors' time limits."""
        key = self.key(name)
        if not KEY.fullmatch(key):
            return None
        pending = self._pending.get(key)
        if pending is not None:
            fits = pending.keys() == specs.keys() and all(specs[part].fits(tensor) for part, tensor in pending.items())
            self._count(self.connectors[0], "hits" if fits else "misses")
            return FoundTensors(pending, self.connectors[0].name) if fits else None
        for index, connector in enumerate(self.connectors):
            value = self._get_from(connector, key, specs)
            self._count(connector, "misses" if value is None else "hits")
            if value is not None:
                data, tensors = value
                for nearer in self.connectors[:index]:
                    if nearer.is_in_process:
                        nearer.put(key, data)
                return FoundTensors(tensors, connector.name)
        return None

    def contains(self, names: Sequence[str]) -> set[str]:
        """Return those of the names that a connector reports to have."""
        missing = {key: name for name in names if KEY.fullmatch(key := self.key(name))}
        with self._lock:
            found = {missing.pop(key) for key in list(missing) if key in self._pending}
        for connector in self.connectors:
            if not missing:
                break
            try:
                keys = connector.contains(list(missing))
            except OSError as error:
                self._failed(connector, "read from", error)
                continue
            self._works(connector, "read from")
            found |= {missing.pop(key) for key in keys if key in missing}
        return found

    def count_late(self) -> None:
        """Count tensors that were not read in time. They count for the last connector."""
        self._count(self.connectors[-1], "late")

    def flush(self, seconds: float | None = None) -> bool:
        """Wait until the tensors that wait now are written. Return False if that takes longer than `seconds`."""
        try:
            return not wait([self._writer.submit(int)], seconds).not_done
        except RuntimeError:  # the interpreter ends, and has waited for the thread
            return True

    def close(self) -> None:
        """Write what waits, for at most `_CLOSE_SECONDS`, and close server and connectors. `put` must not be called then."""
        self.flush(_CLOSE_SECONDS)
        self._writer.shutdown(wait=False, cancel_futures=True)
        if self._server is not None:
            self._server.close()
        for connector in self.connectors:
            connector.close()

    def _get_from(self, connector: Connector, key: str, specs: Specs) -> tuple[bytes, dict[str, Tensor]] | None:
        try:
            data = connector.get(key, max_packed_bytes(specs))
            self._works(connector, "read from")
            if data is None:
                return None
            tensors = unpack(key, data, specs)
        except OSError as error:
            self._failed(connector, "read from", error)
        except ValueError as error:
            self._count(connector, "damaged")
            _log.warning("deleted damaged %s %s in %s: %s", self.kind, key, connector.describe(), error)
            self._delete(connector, key)
        else:
            self._count(connector, "read_bytes", len(data))
            return data, tensors
        return None

    def _delete(self, connector: Connector, key: str) -> None:
        try:
            connector.delete(key)
        except OSError as error:
            self._failed(connector, "deleted from", error)

    def _write(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        try:
            data = pack(key, tensors)
            for connector in self.connectors:
                try:
                    is_kept = connector.put(key, data)
                except OSError as error:
                    self._failed(connector, "written to", error)
                else:
                    self._works(connector, "written to")
                    self._count(connector, "writes" if is_kept else "skipped")
                    self._count(connector, "written_bytes", len(data) if is_kept else 0)
        except Exception:  # a thread has no caller
            _log.exception("%s cannot be written", self.kind)
        finally:
            with self._lock:
                del self._pending[key]

    def _failed(self, connector: Connector, verb: str, error: OSError) -> None:
        """Count a failure. It is logged once until the connector works again, because a full disk stays full for a while."""
        self._count(connector, "failed")
        failing = self._failing[self.connectors.index(connector)]
        with self._lock:
            is_new = not failing
            failing.add(verb)
        if is_new:
            reason = error.strerror or error
            _log.warning("%s cannot be %s %s (%s); continuing without", self.kind, verb, connector.describe(), reason)

    def _works(self, connector: Connector, verb: str) -> None:
        failing = self._failing[self.connectors.index(connector)]
        with self._lock:
            is_again = failing == {verb}
            failing.discard(verb)
        if is_again:
            _log.warning("%s can be %s %s again", self.kind, verb, connector.describe())

    def _count(self, connector: Connector, what: str, number: int = 1) -> None:
        with self._lock:
            self._counts[connector.name][what] += number
