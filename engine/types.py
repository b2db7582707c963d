"""What goes into the engine, what one step does, what comes out: plain data that round-trips through bytes (codec.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..mm.types import ItemPlan, MultiModalFeature
from .pooling import Pooling
from .sampling_params import SamplingParams


@dataclass(frozen=True)
class EngineRequest:
    """One sequence to compute. `params.n > 1` is fanned out to several requests before they get here.

    Args:
        eos_token_ids: tokens that end the answer unless `params.ignore_eos`.
        features: items in order of their offset.
        priority: smaller is served first and preempted last.
        seed: concrete seed of this sequence; with the token's position it decides the random number.
        bad_word_ids: token sequences that must not be produced.
        hold_open: keep the sequence and its cache after an answer, for `append` and `truncate`, until an append
            closes it or `abort`.
        salt: keys and values are shared with sequences of the same salt only; "" shares with all that have none.
        adapter: which of the model's adapters computes the sequence, by name; "" for none. Caches are kept apart by it.
        cross: what the sequence reads through cross-attention (the encoder's side of an encoder-decoder model); its
            range is `[0, rows)` of the encoder's own sequence.
        pooling: what is wanted of the prompt's last row; then there is no answer.
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
    cross: MultiModalFeature | None = None
    pooling: Pooling | None = None


@dataclass(frozen=True)
class RequestUpdate:
    """A live request was rolled back to `num_tokens` tokens, then these tokens and items were added.

    `restart`: the answer's counts (max_tokens, min_tokens, penalties) start anew at the end of the added tokens.
    `forbid`: token sequences that the rest of the answer must not contain. `adapter`: what computes all of it from now on, None
    for what did before.
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
    """`num_tokens` rows of one request in this step, after `num_computed` that are done, on `block_ids`.

    `sample`: False for a chunk that does not reach the last known token. `write_cross`: the keys and values of the encoder's
    side are made in this step.
    """

    request_id: str
    num_computed: int
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]  # per cache group
    sample: bool = True
    write_cross: bool = False


@dataclass(frozen=True)
class EncodeTask:
    """Item `index` of the request (-1: its encoder side) is to be encoded: before this step's forward, or beside it."""

    request_id: str
    index: int
    hash: str


@dataclass(frozen=True)
class SchedulerOutput:
    """All that a worker needs to run one step: new requests once, then only their ids."""

    step: int
    scheduled: tuple[ScheduledRequest, ...]
    encode: tuple[EncodeTask, ...] = ()
    new_requests: tuple[EngineRequest, ...] = ()
    updates: tuple[RequestUpdate, ...] = ()  # in the order they were made, after new_requests
    finished: tuple[str, ...] = ()  # requests whose memory the worker may drop
    free_encoder: tuple[str, ...] = ()  # encoder-cache hashes no longer needed
    zero_blocks: tuple[tuple[int, ...], ...] = ()  # per group, blocks that may hold NaN: 0 x NaN would leak from them


@dataclass(frozen=True)
class Logprob:
    """One token's log probability (natural log), its rank (1 = most likely) and text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class SequenceStats:
    """How a sequence came by its keys and rows.

    Args:
        cached_tokens: tokens of the prompt whose keys were in the prefix cache when it was first admitted.
        preemptions: times its blocks were taken and computed again.
        items: for each item, in order: "encoded", "cache" (rows were resident), "disk", or "prefix" (not even they
            were needed).
    """

    cached_tokens: int = 0
    preemptions: int = 0
    items: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenOutput:
    """What one step added to one request.

    Args:
        finish_reason: None | "stop" | "length" | "repetition" | "abort" | "error".
        num_removed: tokens at the end of the answer that are taken back (loop repair); then there are no new ones.
        timings: seconds of queue, encode, prefill and decode_steps, with the last output of an answer.
        stats: what the caches saved, with the last output of an answer.
        pooled: float32 `[n]`, what `EngineRequest.pooling` asked for.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_removed: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    stats: SequenceStats | None = None
    pooled: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class EncodeResult:
    """What became of one EncodeTask.

    Args:
        source: "encoded", or "disk" when the rows were found there; "dropped" when they were made for nobody any more.
        error: why there are no rows and what to do, without the item's name; or None.
        poison: the item itself broke the encoder (not the memory that was short): it should not be tried again soon.
        seconds: its share of the call that made its rows, until it was seen to be over.
    """

    hash: str
    source: str = "encoded"
    error: str | None = None
    poison: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class StepOutput:
    """What a worker answers to a SchedulerOutput: one TokenOutput per scheduled request, in order.

    `encoded`: one for each EncodeTask of the step, or of it and earlier ones, once their rows are there.
    """

    tokens: tuple[TokenOutput, ...]
    encoded: tuple[EncodeResult, ...] = ()


@dataclass(frozen=True)
class EngineStats:
    """Counts since the start, except where "now" is said.

    Args:
        running, waiting, idle: sequences now; idle ones are answered and held open.
        steps: batches computed. steps_ahead: those of them that were started before the tokens of the one before were known.
        blocks, blocks_used, blocks_kept: key/value blocks there are, in use now, and kept for later sequences now.
        prefix_queries, prefix_hits: tokens of admitted prompts, and those found in the prefix cache.
        prefix_evictions: kept blocks that were given to others.
        encoder_calls: items encoded. encoder_disk_hits: items read from disk instead.
        encoder_hits: items whose rows were resident. encoder_evictions: rows that were dropped for others.
        encoder_bytes, encoder_capacity: of resident rows now, and their most.
        preemptions: times a sequence lost its blocks to another. cut_items: items computed in more than one step.
        quarantined: items refused now.
    """

    running: int = 0
    waiting: int = 0
    idle: int = 0
    steps: int = 0
    steps_ahead: int = 0
    blocks: int = 0
    blocks_used: int = 0
    blocks_kept: int = 0
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


@dataclass(frozen=True)
class ItemTrace:
    """How one item of a prompt came to its rows.

    Args:
        source_bytes: as given or fetched, encoded or as pixels; 0 where a name stood for it.
        num_bytes: of the tensors that it was processed to.
        num_tokens: of the prompt.
        cached: it was processed already.
        encoder: "encoded", "cache", "disk" or "prefix", see SequenceStats; "" while that is not known.
        timings: seconds of fetch, decode and process.
    """

    modality: str
    index: int
    source_bytes: int = 0
    num_bytes: int = 0
    num_tokens: int = 0
    cached: bool = False
    encoder: str = ""
    timings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. `stop_reason` is the stop string or token id that ended it, None for EOS and length."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one prompt, completions in order of `index`. `error` says why nothing more came, or None.

    Args:
        items: what each picture, clip or sound took, with the frames that were used and what `fit` made smaller.
        timings: seconds of fetch, plan, decode, process, queue, encode, prefill and decode_steps; "queue" is all the time
            it stood in a line. Together they are about the time from asking to the last token.
        trace: how each item came to its rows, in the order of `items`.
        num_cached_tokens: tokens of the prompt that the prefix cache had.
        num_preemptions: times its blocks were taken and computed again.
        pooled: float32 `[n]`, of a prompt that was asked for no answer, see `engine.pooling`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    finished: bool = True
    error: str | None = None
    items: tuple[ItemPlan, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)
    trace: tuple[ItemTrace, ...] = ()
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    pooled: Tensor | None = field(default=None, compare=False)
