"""Statistics of the engine, of its sequences and of what drafts tokens for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest


@dataclass(frozen=True)
class DraftStats:
    """Counts of one proposer of drafted tokens. Each accepted token saves a step.

    Args:
        proposer: "text" (`draft_text`), "hypothesis" (token ids as `draft_text`), "suffix", "corpus", "mtp", "draft_model",
            "eagle3", or its own name.
        num_drafts: drafts that were verified.
        drafted, accepted: tokens verified and accepted, by position in their draft.
        switched_off: sequences for which its drafts cost more than they saved, so that it was switched off.
        failed: sequences for which it raised an error, so that it was dropped.
    """

    proposer: str
    num_drafts: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    switched_off: int = 0
    failed: int = 0

    @property
    def num_drafted(self) -> int:
        return sum(self.drafted)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted)

    def __add__(self, other: DraftStats) -> DraftStats:
        """Return the sum of both; the proposer is this one."""
        drafted, accepted = (
            tuple(map(sum, zip_longest(ours, theirs, fillvalue=0)))
            for ours, theirs in ((self.drafted, other.drafted), (self.accepted, other.accepted))
        )
        switched_off, failed = self.switched_off + other.switched_off, self.failed + other.failed
        return DraftStats(self.proposer, self.num_drafts + other.num_drafts, drafted, accepted, switched_off, failed)


def add_stats(parts: Iterable[Iterable[DraftStats]]) -> tuple[DraftStats, ...]:
    """Return the sums by proposer."""
    sums: dict[str, DraftStats] = {}
    for stats in (stats_of_part for part in parts for stats_of_part in part):
        sums[stats.proposer] = sums[stats.proposer] + stats if stats.proposer in sums else stats
    return tuple(sums.values())


@dataclass(frozen=True)
class TransferStats:
    """Counters of one connector, which keeps tensors outside the caches.

    Args:
        kind: kind of the tensors, "encoder rows", "KV blocks" or "processed items".
        connector: "memory", "shared_memory", "disk", "peer" or "redis".
        hits, misses: tensors that were looked up in it and found, or not found.
        damaged: tensors whose bytes were wrong or too short, which were computed instead.
        failed: how often it could not be reached, or did not answer in time.
        late: prompts that did not wait for their blocks any longer.
        writes: tensors written. skipped: tensors not written, because too many waited or they exceed the capacity.
        read_bytes, written_bytes: bytes of the tensors read and written.
        fallbacks: items that this engine encoded because no encoder of `encoder` gave their rows.
    """

    kind: str
    connector: str
    hits: int = 0
    misses: int = 0
    damaged: int = 0
    failed: int = 0
    late: int = 0
    writes: int = 0
    skipped: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    fallbacks: int = 0


def add_transfers(parts: Iterable[Iterable[TransferStats]]) -> tuple[TransferStats, ...]:
    """Return the sums by kind and connector."""
    sums: dict[tuple[str, str], Counter[str]] = {}
    for stats in chain.from_iterable(parts):
        counts = asdict(stats)
        sums.setdefault((counts.pop("kind"), counts.pop("connector")), Counter()).update(counts)
    return tuple(TransferStats(kind, connector, **total) for (kind, connector), total in sums.items())


@dataclass(frozen=True)
class SequenceStats:
    """Use of the caches and preemptions of a sequence.

    Args:
        cached_tokens: prompt tokens that the prefix cache had when the sequence was first scheduled.
        preemptions: how many times the sequence was preempted.
        items: how each item's encoder rows were obtained, in order: "encoded", "cache" (encoder cache), "disk", or "prefix"
            (not needed, because the prefix cache had the tokens).
        drafts: what its proposers of drafted tokens achieved.
    """

    cached_tokens: int = 0
    preemptions: int = 0
    items: tuple[str, ...] = ()
    drafts: tuple[DraftStats, ...] = ()


@dataclass(frozen=True)
class EngineStats:
    """Counters since the start of the engine; "now" marks current values.

    Args:
        running, waiting, idle: sequences now; idle ones are held open after their answer.
        steps: steps computed. steps_ahead: steps that were started before the previous step's tokens were known.
        blocks, blocks_used, blocks_cached: KV-cache blocks in total, now in use, and now only in the prefix cache. A state
            counts as a block.
        kv_usage: fraction of the KV cache's bytes in use now.
        prefix_queries, prefix_hits: prompt tokens of scheduled sequences, and how many of them the prefix cache had.
        prefix_evictions: cached blocks that were evicted.
        encoder_calls: items encoded. encoder_disk_hits: items read from disk.
        encoder_hits, encoder_evictions: items found in the encoder cache, and items evicted from it.
        encoder_bytes, encoder_capacity: bytes of the encoder cache in use now, and its size.
        preemptions: preempted sequences. cut_items: items that were computed in more than one step.
        quarantined: items that are refused now.
        drafts: what each proposer of drafted tokens achieved.
        no_drafts: why no sequence of this engine gets drafts: "off", "rows" (a row's bits may depend on the other rows of its
            step, see `batch_invariant`), "window" (answers keep the keys of their last tokens only) or "" (sequences do).
        transfers: what each connector did (`kv_transfer_config`, `ec_transfer_config`, `encoder_cache_dir`, `encoder`).
    """

    running: int = 0
    waiting: int = 0
    idle: int = 0
    steps: int = 0
    steps_ahead: int = 0
    blocks: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    kv_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_evictions: int = 0
    encoder_calls: int = 0
    encoder_disk_hits: int = 0
    encoder_hits: int = 0
    encoder_evictions: int = 0
    encoder_bytes: int = 0
    encoder_capacity: int = 0
    preemptions: int = 0
    cut_items: int = 0
    quarantined: int = 0
    drafts: tuple[DraftStats, ...] = ()
    no_drafts: str = ""
    transfers: tuple[TransferStats, ...] = ()
