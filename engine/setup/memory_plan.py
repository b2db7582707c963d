"""The memory plan of an engine, and its rows as `sensorium doctor` prints them."""

from __future__ import annotations

from dataclasses import dataclass

from ...callers.repr_mixin import ReprMixin
from ...models.layers.ranks import RankTraffic
from .max_items import MaxItem

_MIB = 1 << 20


@dataclass(frozen=True, repr=False)
class MemoryPlan(ReprMixin):
    """The maximum memory of an engine in bytes, by purpose. Interpreter and libraries add about 300 MiB on a CPU.

    Args:
        weights: packed for the device.
        kv_cache: all blocks. On a CPU, pages take memory only once they are written.
        encoder_cache: resident encoder rows, and rows that wait to be written to disk.
        decoder_step, logits_step, encoder_step: the largest forward pass, logits with sampling, and encoder call. They run one
            after the other, so the largest counts; with `encode_beside` the encoder call runs beside the others.
        media_held: processed media of running requests, and input of live streams from which lost states are computed again.
        streams: encoder states of live streams.
        talker: weights, KV cache and largest step of the part that speaks (`load_talker`).
        adapters: those that requests choose (`max_loras` of `max_lora_rank`).
        draft_model: weights and largest step of a model that drafts.
        draft_cache: KV cache of what drafts tokens in the worker.
        kernels: buffers that threads of the C++ kernels keep on a CPU with AMX tiles.
        graphs: recorded decode steps and encoder calls of a GPU.
        media_step: media that workers process on `media_device`; part of the total if the model is on the same device.
        processor_cache: processed media kept for later requests.
        offloaded: KV blocks in the host's memory (`kv_offloading_size`), and blocks on their way to connectors or back.
        kept_rows: encoder rows in the host's memory for engines that ask for them (`encoder_listen`), and shared memory
            (`ec_transfer_config`).
        sequences: tokens and positions of running requests.
        decoding: media that workers decode, at the limits of `media`. It is not part of the total, since these limits are far
            above usual inputs.
        max_items: the largest item of each modality.
        decoding_limits: the fields of `media` that bound `decoding`.
        traffic: what a rank sends to each other rank, with several of them.
        device: that of the model. On a GPU, held media, processor cache, sequences, offloaded blocks and kept rows are in host
            memory.
    """

    weights: int
    kv_cache: int
    encoder_cache: int
    decoder_step: int
    logits_step: int
    encoder_step: int
    media_held: int
    processor_cache: int
    sequences: int
    decoding: int
    max_items: tuple[MaxItem, ...]
    decoding_limits: str = ""
    encode_beside: bool = False
    graphs: int = 0
    media_step: int = 0
    device: str = "cpu"
    media_device: str = "cpu"
    streams: int = 0
    talker: int = 0
    kernels: int = 0
    draft_model: int = 0
    draft_cache: int = 0
    adapters: int = 0
    offloaded: int = 0
    kept_rows: int = 0
    traffic: RankTraffic | None = None

    @property
    def activations(self) -> int:
        steps = max(self.decoder_step, self.logits_step)
        return steps + self.encoder_step if self.encode_beside else max(steps, self.encoder_step)

    @property
    def total(self) -> int:
        """Bytes on the model's device; on a CPU, everything."""
        media = self.media_step if self.media_device == self.device else 0
        parts = (
            self.weights,
            self.kv_cache,
            self.encoder_cache,
            self.activations,
            self.graphs,
            self.streams,
            self.talker,
            self.draft_model,
            self.draft_cache,
            self.adapters,
            self.kernels,
            media,
        )
        return sum(parts) + (self.on_host if self.device == "cpu" else 0)

    @property
    def on_host(self) -> int:
        return self.media_held + self.processor_cache + self.sequences + self.offloaded + self.kept_rows

    def rows(self) -> list[tuple[str, str]]:
        """Return (name, value) pairs as text."""
        sizes = [
            ("weights", self.weights),
            ("key/value cache", self.kv_cache),
            ("encoder cache", self.encoder_cache),
            ("activations", self.activations),
            ("  decoder step", self.decoder_step),
            ("  logits and sampling", self.logits_step),
            ("  encoder call", self.encoder_step),
            ("media held", self.media_held),
            ("processor cache", self.processor_cache),
            ("sequences", self.sequences),
            *([("offloaded KV blocks", self.offloaded)] if self.offloaded else []),
            *([("kept encoder rows", self.kept_rows)] if self.kept_rows else []),
        ]
        if self.streams:
            sizes.insert(3, ("states of live streams", self.streams))
        if self.kernels:
            sizes.insert(7 + bool(self.streams), ("buffers of kernels", self.kernels))
        if self.device != "cpu":
            sizes.insert(6 + bool(self.streams), ("recorded steps", self.graphs))
            sizes.append(("total on the host", self.on_host))
        if self.draft_cache:
            sizes.insert(2, ("cache of drafts", self.draft_cache))
        if self.adapters:
            sizes.insert(1, ("adapters of requests", self.adapters))
        if self.draft_model:
            sizes.insert(1, ("draft model", self.draft_model))
        if self.talker:
            sizes.insert(1, ("talker", self.talker))
        sizes.append(("total" if self.device == "cpu" else f"total on {self.device}", self.total))
        codecs = f"{_mib(self.decoding)} at most, not in the total; lower media_workers or media's {self.decoding_limits}"
        where = "part of that total" if self.media_device == self.device else "not in the total"
        on_media_device = f"{_mib(self.media_step)} at most, {where}; lower media_workers"
        return [
            *((name, _mib(size)) for name, size in sizes),
            ("media codecs", codecs if self.decoding else _mib(0)),
            *([(f"media on {self.media_device}", on_media_device)] if self.media_step else []),
            *((f"largest {item.modality}", str(item)) for item in self.max_items),
            *([("sent to each other rank", str(self.traffic))] if self.traffic is not None else []),
        ]

    def repr_fields(self) -> list[tuple[str, object]]:
        return [(name.strip(), value.strip()) for name, value in self.rows()]

    def __repr__(self) -> str:
        return f"<MemoryPlan of {_mib(self.total).strip()} on {self.device}; print it for its parts>"

    def __str__(self) -> str:
        return "\n".join(f"{name:<24} {value}" for name, value in self.rows())


def _mib(size: int) -> str:
    return f"{size / _MIB:10,.1f} MiB"
