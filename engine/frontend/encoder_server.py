"""Serves encoder rows to engines that have no encoder, or that leave their items to this one."""

from __future__ import annotations

from ...callers.errors import ConfigError, ErrorInfo, SensoriumError
from ...mm.embeddings import ROWS
from ...mm.types import ItemGeometry, ItemPlan, MultiModalFeature, PlaceholderRange
from ..config import EngineConfig
from ..connectors.item_inputs import ItemInputs, unpack_inputs
from ..connectors.memory import MemoryConnector
from ..connectors.packing import pack
from ..connectors.peer_server import PeerServer
from ..connectors.wire import ItemFailedError, PeerError
from ..sampling_params import SamplingParams
from ..transfer_config import peer_token
from .engine_loop import EngineLoop
from .processed_prompt import ProcessedPrompt
from .request import RequestInput
from .request_handle import RequestHandle
from .serve import serve

_OF_ITEMS = ("encoder_failed", "not_finite", "too_long", "invalid_media")  # codes of errors that another encoder has, too


def serve_encoder(config: EngineConfig, engine_loop: EngineLoop, namespace: str) -> EncoderServer | None:
    """Start the server of an engine's encoder rows, if its options ask for one."""
    listen = config.encoder_listen
    if listen is None:
        return None
    try:
        return EncoderServer(engine_loop, namespace, listen, peer_token(), config.kept_row_bytes)
    except OSError as error:
        reason = f"<<param=>>{listen!r} cannot be used ({error.strerror or error}); give another port"
        raise ConfigError(reason, param="encoder_listen") from None


class EncoderServer:
    """Serves the rows of an engine with `parts="encoder"` over TCP, until `close`.

    Clients ask by the hash of an item's processed tensors, and send the tensors if no rows are kept under it. The hash is
    checked, so that rows are never kept under another item's hash. Items of all clients are encoded in the engine's batches.

    Args:
        namespace: hash of the model and all else that rows depend on. Clients with another one are refused.
        address: "host:port"; with port 0, a free port is chosen.
        token: the secret that clients must know.
        num_bytes: of the rows that are kept for further requests; those used least recently are dropped.

    Raises:
        OSError: the address cannot be used.
    """

    def __init__(self, engine_loop: EngineLoop, namespace: str, address: str, token: str, num_bytes: int) -> None:
        self._loop, self._namespace, self._kept = engine_loop, namespace, MemoryConnector(num_bytes)
        self._server = PeerServer([self._kept], address, token, encode=self._encode, is_alive=self._is_alive)
        self.port = self._server.port

    def close(self) -> None:
        """End all connections. The engine must have ended all requests before."""
        self._server.close()
        self._kept.close()

    def _is_alive(self) -> bool:
        return not (self._loop.is_dead or self._loop.is_restarting)

    def _encode(self, key: str, data: bytes) -> bytes:
        """Return the packed rows of an item. Runs in the thread of a client."""
        if not self._is_alive():
            raise PeerError("the engine's process has died")
        namespace, _, name = key.partition("/")
        if namespace != self._namespace:
            raise ValueError("it has another checkpoint, dtype, quantization, kernels, batch_invariant or version of sensorium")
        item = unpack_inputs(data)
        if item.hash != name:
            raise ValueError("the item has another hash")
        self._check(item)
        request = RequestInput(lambda: _prompt(item), SamplingParams(max_tokens=1))
        try:
            ((_, output),) = serve(self._loop, [RequestHandle(request)])
        except SensoriumError as error:  # the engine is closed or dead
            raise PeerError(error.info.message) from None
        if output.error is not None or not output.encoded:
            raise _failure(output.error)
        packed = pack(key, {ROWS: output.encoded[0].rows})
        self._kept.put(key, packed)
        return packed

    def _check(self, item: ItemInputs) -> None:
        info = self._loop.core.info
        if item.modality not in info.modalities:
            raise ItemFailedError(f"it takes no items of the modality {item.modality!r}")
        if not 0 < item.num_rows <= info.max_model_len:
            reason = f"the item makes {item.num_rows} rows, but max_model_len of the encoder is {info.max_model_len}"
            raise ItemFailedError(reason)


def _failure(error: ErrorInfo | None) -> Exception:
    reason = "there are no rows" if error is None else error.reason
    return ItemFailedError(reason) if error is not None and error.code in _OF_ITEMS else PeerError(reason)


def _prompt(item: ItemInputs) -> ProcessedPrompt:
    """Return a prompt of this item alone, whose token ids are not read."""
    rows, grid = item.num_rows, ItemGeometry(1, 1, item.num_rows)
    feature = MultiModalFeature(item.modality, item.kwargs, PlaceholderRange(0, rows), grid, item.hash)
    plan = ItemPlan(item.modality, 0, (0, 0), (1, 1, rows), rows, rows, 0, True)
    return ProcessedPrompt(None, (0,) * rows, (feature,), (plan,), item_of=(0,))
