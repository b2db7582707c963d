"""Messages between frontend, core and workers: requests, steps and their results. core/codec.py encodes them as bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..callers.errors import ErrorInfo
from ..mm.types import MultiModalFeature
from .pooling_requests import PoolingRequest
from .sampling_params import SamplingParams
from .stats import EngineStats, SequenceStats
from .structured_outputs import StructuredOutputsParams


@dataclass(frozen=True)
class EngineRequest:
    """One sequence to generate. A request with `params.n > 1` becomes `n` EngineRequests.

    Args:
        eos_token_ids: tokens that end the answer unless `params.ignore_eos` is set.
        features: items in order of their offset.
        priority: smaller values are scheduled first and preempted last.
        seed: seed of this sequence; seed and position determine each random number.
        bad_word_ids: token sequences that must not be generated.
        hold_open: keep the sequence and its KV cache after the answer, for `append` and `truncate`, until
            `append(close=True)` or `abort`.
        salt: KV blocks are shared only with sequences of the same salt.
        adapter: name or identity (`LoadedAdapter`) of the adapter that computes the sequence, "" for none. KV blocks are
            shared only with the same adapter.
        cross: the items that cross-attention reads, in order. Their ranges have the length of their rows, and begin at their
            tokens if they have one.
        pooling: what to compute from the prompt's hidden states instead of generating tokens.
        first_tokens: number of tokens of a pair's first text; the others have token type 1. None: all have type 0.
        draft_token_ids: the tokens of `params.draft_text`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    features: tuple[MultiModalFeature, ...] = ()
    priority: int = 0
    seed: int = 0
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    hold_open: bool = False
    salt: str = ""
    adapter: str = ""
    cross: tuple[MultiModalFeature, ...] = ()
    pooling: PoolingRequest | None = None
    first_tokens: int | None = None
    draft_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class RequestUpdate:
    """A change of a known sequence: cut it to `num_tokens` tokens, then add these tokens and items.

    Args:
        restart: a new answer starts after the added tokens; max_tokens, min_tokens and penalties count from there.
        forbid: token sequences that the rest of the answer must not contain.
        adapter: the adapter that computes the whole sequence from now on; None keeps the current one.
    """

    request_id: str
    num_tokens: int
    token_ids: tuple[int, ...] = ()
    features: tuple[MultiModalFeature, ...] = ()
    restart: bool = False
    forbid: tuple[tuple[int, ...], ...] = ()
    adapter: str | None = None


@dataclass(frozen=True)
class ScheduledRequest:
    """The part of one sequence in a step: `num_tokens` tokens after the first `num_computed`, in the blocks `block_ids`.

    Args:
        block_ids: blocks of the sequence, per KV-cache group.
        sample: False for a chunk that does not reach the end of the known tokens.
        write_cross: also compute the keys and values of the encoder input in this step.
        epoch: number of the sequence's history: no other sequence has it, and it changes when results in flight become stale.
        draft_token_ids: guesses of the tokens after the known ones. They are the last input tokens of this part, and the row of
            each is sampled too; the worker returns the tokens up to the first one that differs from its guess.
        predict: False if what the worker drafts is no longer wanted.
    """

    request_id: str
    num_computed: int
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    sample: bool = True
    write_cross: bool = False
    epoch: int = 0
    draft_token_ids: tuple[int, ...] = ()
    predict: bool = True

    @property
    def num_sampled(self) -> int:
        """Rows at the end of this part whose tokens are sampled."""
        return 1 + len(self.draft_token_ids) if self.sample else 0


CROSS = -1
"""Index of the first item that cross-attention reads among a request's items; the second one's is CROSS - 1."""


@dataclass(frozen=True)
class EncodeTask:
    """Encode item `index` of the request (CROSS or less: of its encoder input), before this step's forward or beside it."""

    request_id: str
    index: int
    hash: str


@dataclass(frozen=True)
class SchedulerOutput:
    """A step to run, from the scheduler to a worker. A request is sent once; later steps refer to it by id.

    Args:
        updates: changes of known requests in the order they were made; they apply after `new_requests`.
        finished: requests whose state the worker may drop.
        free_encoder: hashes of items whose encoder rows are no longer needed.
        zero_blocks: (cache group, block) to fill with zeros, because they may hold NaN and 0 x NaN is NaN.
        ahead: the tokens of the step before are not known to the scheduler: they are the input of this one.
    """

    step: int
    scheduled: tuple[ScheduledRequest, ...]
    encode: tuple[EncodeTask, ...] = ()
    new_requests: tuple[EngineRequest, ...] = ()
    updates: tuple[RequestUpdate, ...] = ()
    finished: tuple[str, ...] = ()
    free_encoder: tuple[str, ...] = ()
    zero_blocks: tuple[tuple[int, int], ...] = ()
    ahead: bool = False


@dataclass(frozen=True)
class StepHandle:
    """A step that an executor has started.

    Args:
        can_follow: the step's tokens are where the next step reads them, so that this may start before they are polled.
    """

    number: int
    can_follow: bool = False


@dataclass(frozen=True)
class GrammarTask:
    """Compile the grammar of a request, and keep it until it is released. `tenant`: see `GrammarFactory.begin`."""

    request_id: str
    params: StructuredOutputsParams
    tenant: str = ""


@dataclass(frozen=True)
class WorkerUpdate:
    """A change of what workers keep beside steps. `release`: requests whose grammar is no longer needed."""

    compile: tuple[GrammarTask, ...] = ()
    release: tuple[str, ...] = ()


@dataclass(frozen=True)
class KVBlock:
    """A block of a cache group and the hash of its content (32 bytes)."""

    group: int
    block: int
    hash: bytes


@dataclass(frozen=True)
class KVLookup:
    """A request to read the blocks of a prompt that connectors have and the KV cache lacks.

    Args:
        number: the epoch of the sequence, as in ScheduledRequest, which identifies the lookup.
        hashes: of the prompt's full blocks, in order.
        resident: for each cache group, whether the KV cache has each of the blocks; () for groups that are not looked up.
        spans: the sequence's bidirectional spans, which a prefix must not cut.
    """

    number: int
    hashes: tuple[bytes, ...]
    resident: tuple[tuple[bool, ...], ...]
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class KVTransfer:
    """KV blocks to copy between the caches of workers and the connectors.

    Args:
        save: blocks to keep; their content does not change until the next step.
        look_up: prompts whose blocks to read, beside the steps.
        cancel: numbers of lookups whose blocks are no longer needed.
        place: for each lookup that was reported, its number and the blocks to fill with what it read. The rest is freed.
        poll_seconds: report the lookups that have ended, and wait at most this long for one; None: report none.
    """

    save: tuple[KVBlock, ...] = ()
    look_up: tuple[KVLookup, ...] = ()
    cancel: tuple[int, ...] = ()
    place: tuple[tuple[int, tuple[KVBlock, ...]], ...] = ()
    poll_seconds: float | None = None


@dataclass(frozen=True)
class KVLookupResult:
    """The blocks that a lookup has read. The lookup has ended.

    Args:
        number: of the KVLookup.
        blocks: (cache group, index in the prompt) of the blocks that were read, in order of the prompt.
    """

    number: int
    blocks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter that requests may choose.

    Args:
        identity: `EngineRequest.adapter` of these requests: a digest of what it adds to which weights.
        num_bytes: of its tensors in the engine.
        rank: its largest rank.
        encoder_identity: `MultiModalFeature.adapter` of items of these requests: a digest of the part that changes encoders
            and connectors, "" if there is none.
        changes_embeddings: it changes token embeddings.
    """

    identity: str
    num_bytes: int
    rank: int
    encoder_identity: str = ""
    changes_embeddings: bool = False


@dataclass(frozen=True)
class GrammarResult:
    """A GrammarTask has ended; `error` says why there is no grammar."""

    request_id: str
    error: ErrorInfo | None = None


@dataclass(frozen=True)
class Logprob:
    """Log probability (natural logarithm) of a token, its rank (1 is the most likely token) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class TokenOutput:
    """Result of one step for one sequence.

    Args:
        token_ids: the tokens of its sampled rows, in order. logprobs: those of each token.
        finish_reason: None, "stop", "length", "repetition", "abort" or "error".
        num_removed: number of tokens to remove from the end of the answer (repair of a loop, or the answer begins again); then
            there are no new tokens.
        timings: seconds of queue, encode, prefill and decode_steps; with the last output of an answer only.
        stats: with the last output of an answer only.
        pooled: float32, the result of `EngineRequest.pooling`.
        encoder_rows: `[rows, width]` of each item, from an engine that has only the encoder.
        predicted: tokens that the worker's drafter expects next; the scheduler keeps them.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: ErrorInfo | None = None
    num_removed: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    stats: SequenceStats | None = None
    pooled: Tensor | None = field(default=None, compare=False)
    encoder_rows: tuple[Tensor, ...] = field(default=(), compare=False)
    predicted: tuple[int, ...] = ()


@dataclass(frozen=True)
class EncodeResult:
    """The result of one EncodeTask.

    Args:
        source: "encoded", "disk" if the rows were read from disk, or "dropped" if they were not needed any more.
        error: why there are no rows, or None. It does not yet name the item.
        item_failed: True if the item itself made the encoder fail, not a lack of memory. It is then quarantined.
        seconds: the item's share of the encoder call's time.
    """

    hash: str
    source: str = "encoded"
    error: ErrorInfo | None = None
    item_failed: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class StepOutput:
    """A worker's answer to a SchedulerOutput.

    Args:
        tokens: one TokenOutput per scheduled request, in order.
        encoded: results of encoder calls that have finished; they may be of earlier steps.
        predict_seconds: seconds that drafting for the next step took.
    """

    tokens: tuple[TokenOutput, ...]
    encoded: tuple[EncodeResult, ...] = ()
    predict_seconds: float = 0.0


@dataclass(frozen=True)
class CoreOutputs:
    """Result of one step of the core.

    Args:
        outputs: one output per sequence that got tokens or ended.
        idle: True if there was nothing to compute.
        stats: a snapshot of the statistics, at most 50 ms old and taken after the last sequence began or ended.
    """

    outputs: tuple[TokenOutput, ...]
    idle: bool
    stats: EngineStats
