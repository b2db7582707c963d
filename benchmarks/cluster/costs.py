"""The costs of a step, an encoder call and a transfer: a measured table, or a roofline of a model and a machine."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Points = Sequence[tuple[float, float]]
"""Measured points in rising order: size, seconds. Between two, and beyond the last ones, the line through them holds."""


@dataclass(frozen=True)
class Costs:
    """Seconds of one engine.

    Args:
        step: of a step by its rows: prompt tokens and one per sequence that generates.
        per_sequence: for each sequence that samples a token in a step.
        per_context_token: for each token in the KV cache that a step reads.
        encode: of the encoder by rows.
        per_request: from the arrival of a request to the engine's queue (text, media, processes).
    """

    step: Points
    per_sequence: float = 0.0
    per_context_token: float = 0.0
    encode: Points = ((0.0, 0.0), (1.0, 0.0))
    per_request: float = 0.0

    def step_seconds(self, rows: int, sequences: int, context_tokens: int) -> float:
        """Return the seconds of a step."""
        return at(self.step, rows) + sequences * self.per_sequence + context_tokens * self.per_context_token

    def encode_seconds(self, rows: int) -> float:
        """Return the seconds of one call of the encoder; 0 for no rows."""
        return at(self.encode, rows) if rows else 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> Costs:
        """Return the costs of a table. Raises TypeError or ValueError for one of another form."""
        points = {name: [(float(size), float(seconds)) for size, seconds in table[name]] for name in ("step", "encode")}
        if any(not rising or list(rising) != sorted(rising) for rising in points.values()):
            raise ValueError("the points of a table must be in rising order")
        return cls(**{**table, **points})


def at(points: Points, size: float) -> float:
    """Return the seconds of a size, 0 or above."""
    if len(points) == 1:
        return points[0][1]
    index = min(max(1, bisect_left(points, (size,))), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return max(0.0, y0 + (y1 - y0) * (size - x0) / (x1 - x0))


@dataclass(frozen=True)
class Link:
    """A connection of a machine: bytes per second, and seconds of each message."""

    bandwidth: float
    latency: float

    def seconds(self, num_bytes: float, messages: int = 1) -> float:
        return messages * self.latency + num_bytes / self.bandwidth


@dataclass(frozen=True)
class Model:
    """The sizes of a model on which costs depend.

    Args:
        layers, hidden, inner: of the decoder. `inner`: numbers within an MLP.
        q_size, kv_size: numbers of all heads of queries, and of all heads of keys.
        vocabulary: rows of the head.
        weight_bytes: bytes of one weight of the decoder: 2 for bfloat16, 0.56 for int4 with scales.
        tower_weights: number of weights of the encoder, of 2 bytes.
        patches_per_row: patches that the encoder computes for one of its rows.
    """

    layers: int
    hidden: int
    inner: int
    q_size: int
    kv_size: int
    vocabulary: int
    weight_bytes: float = 2.0
    tower_weights: float = 0.0
    patches_per_row: int = 4

    @property
    def decoder_weights(self) -> float:
        layer = self.hidden * (2 * self.q_size + 2 * self.kv_size + 3 * self.inner)
        return float(self.layers * layer + self.vocabulary * self.hidden)

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token in the KV cache, in 2 bytes per number."""
        return self.layers * 2 * self.kv_size * 2

    @property
    def row_bytes(self) -> int:
        """Bytes of an encoder row."""
        return self.hidden * 2


@dataclass(frozen=True)
class Machine:
    """One device: rates that are reached in practice, not the data sheet's peaks.

    Args:
        flops: per second, in matrix products.
        bandwidth: bytes per second of the memory.
        memory: bytes for weights and KV cache.
        peers: link to the devices of the same group of ranks.
        network: link to other engines.
        overhead: seconds of a step beside the products.
        per_request: see `Costs`.
    """

    flops: float
    bandwidth: float
    memory: float
    peers: Link
    network: Link
    overhead: float
    per_request: float


_SIZES = (1, 16, 64, 256, 1024, 4096, 16384)


def roofline(model: Model, machine: Machine, tp: int = 1, pp: int = 1) -> Costs:
    """Return the costs of an engine that divides a model among `tp * pp` devices.

    A product takes the longer one of reading the weights and computing. With `tp`, each rank has a part of them, and each layer
    gathers four times; encoders are not divided. Stages (`pp`) run one after the other and hand a layer's output on.
    """
    weights = model.decoder_weights

    def step(rows: int) -> float:
        product = max(weights * model.weight_bytes / machine.bandwidth, 2 * weights * rows / machine.flops) / tp
        return machine.overhead + product + wire_seconds(model, machine, rows, tp, pp)

    def encode(rows: int) -> float:
        read = model.tower_weights * 2 / machine.bandwidth
        return max(read, 2 * model.tower_weights * rows * model.patches_per_row / machine.flops) if model.tower_weights else 0.0

    return Costs(
        step=[(float(rows), step(rows)) for rows in _SIZES],
        per_context_token=model.kv_bytes / tp / machine.bandwidth,
        encode=[(float(rows), encode(rows)) for rows in _SIZES],
        per_request=machine.per_request,
    )


def wire_seconds(model: Model, machine: Machine, rows: int, tp: int, pp: int) -> float:
    """Return the seconds for which the ranks of an engine wait for each other's numbers in a step."""
    seconds = 0.0
    if tp > 1:
        sent = (2 * model.hidden + model.q_size + model.inner) / tp * (tp - 1) * 2 * rows
        seconds += model.layers * machine.peers.seconds(sent, messages=4)
    if pp > 1:
        seconds += pp * machine.peers.seconds(2 * model.hidden * 2 * rows)
    return seconds


def kv_capacity(model: Model, machine: Machine, tp: int = 1, pp: int = 1) -> int:
    """Return the tokens that fit into the KV cache of an engine; 0 or below if the weights do not fit."""
    left = machine.memory * tp * pp - model.decoder_weights * model.weight_bytes - model.tower_weights * 2 * tp * pp
    return int(left // model.kv_bytes)
