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
        hold_open: keep the sequence and its cache after an answer, for `append` and `truncate`, until `abort`.
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


@dataclass(frozen=True)
class RequestUpdate:
    """A live request was rolled back to `num_tokens` tokens, then these tokens and items were added.

    `restart`: the answer's counts (max_tokens, min_tokens, penalties) start anew at the end of the added tokens.
    """

    request_id: str
    num_tokens: int
    token_ids: tuple[int, ...] = ()
    features: tuple[MultiModalFeature, ...] = ()
    restart: bool = False


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
class TokenOutput:
    """What one step added to one request. `finish_reason`: None | "stop" | "length" | "abort" | "error"."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
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
