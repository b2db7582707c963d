"""What goes into the engine, what one step does, what comes out: plain data that round-trips through bytes (codec.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..mm.types import ItemPlan, MultiModalFeature
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
        adapter: name of the adapter that computes the sequence; "" for none. Caches are kept apart by it.
        cross: what the sequence reads through cross-attention (the encoder's side of an encoder-decoder model); its
            range is `[0, rows)` of the encoder's own sequence.
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


@dataclass(frozen=True)
class RequestUpdate:
    """A live request was rolled back to `num_tokens` tokens, then these tokens and items were added.

    `restart`: the answer's counts (max_tokens, min_tokens, penalties) start anew at the end of the added tokens.
    `forbid`: token sequences that the rest of the answer must not contain.
    """

    request_id: str
    num_tokens: int
    token_ids: tuple[int, ...] = ()
    features: tuple[MultiModalFeature, ...] = ()
    restart: bool = False
    forbid: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class ScheduledRequest:
    """`num_tokens` rows of one request in this step, after `num_computed` that are done, on `block_ids`."""

    request_id: str
    num_computed: int
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]  # per cache group
    sample: bool = True  # False for a chunk that does not reach the last known token


@dataclass(frozen=True)
class EncodeTask:
    """Item `index` of the request is to be encoded before this step's forward."""

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
        num_removed: tokens at the answer's end that were taken back before `token_ids` were added (loop repair).
        timings: seconds of queue, encode, prefill and decode_steps, with the last output of an answer.
        stats: what the caches saved, with the last output of an answer.
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

    `items`: what each picture, clip or sound took, with the frames that were used and what `fit` made smaller.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    finished: bool = True
    error: str | None = None
    items: tuple[ItemPlan, ...] = ()
    timings: dict[str, float] = field(
        default_factory=dict
    )  # seconds: plan, decode, process, queue, encode, prefill, decode_steps
